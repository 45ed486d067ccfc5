"""A thread that fetches what the device has computed and answers for it, while the next batch is being launched.

It works in order, one thing at a time, and takes one ahead; who brings a third waits. It must not know what the work
is.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger("ray.serve")


class Answers:
    """Work done in order on a thread of its own. `put` and the others are called on one thread."""

    def __init__(self, done: Callable[[], None] = lambda: None) -> None:
        """`done` is called, on the other thread, whenever a piece of work is done."""
        self._done = done
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, name="gpu-answers", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Blocks while one piece of work is under way and one waits."""
        self._queue.put(work)

    @property
    def idle(self) -> bool:
        """Whether all work is done."""
        return self._queue.unfinished_tasks == 0

    def wait_idle(self) -> None:
        """Blocks until all work is done."""
        self._queue.join()

    def close(self) -> None:
        """Ends the thread after the work that it has."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException:  # the thread must go on: others wait for what it has
                logger.exception("an answer could not be given")
            finally:
                del work  # it may hold embeddings, and the next may be long in coming
                self._queue.task_done()
            self._done()
        self._queue.task_done()
