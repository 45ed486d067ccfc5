"""FIFO thread that fetches finished batches and completes their jobs while the next batch is launched."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger("ray.serve")


class CompletionThread:
    """A FIFO worker thread with a queue of depth one. Its methods are called on one thread."""

    def __init__(self, on_done: Callable[[], None] = lambda: None) -> None:
        """`on_done` is called on the worker thread after each item."""
        self._on_done = on_done
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, name="gpu-answers", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Queues `work`. Blocks while one item runs and one is queued."""
        self._queue.put(work)

    @property
    def is_idle(self) -> bool:
        """Whether no item runs or is queued."""
        return self._queue.unfinished_tasks == 0

    def close(self) -> None:
        """Ends the thread after the queued items."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException:  # the thread must survive: callers wait for the queued items
                logger.exception("a batch could not be completed")
            finally:
                del work  # it may hold embeddings, and `get` may block for long
                self._queue.task_done()
            self._on_done()
        self._queue.task_done()
