"""The thread that owns the GPU: it drains a bounded queue, lets the encoder pack and run, and answers through futures.

It must not know of Ray, HTTP or caching. It is fed by `deployments/encoder.py`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from encoder.encoder import Encoder
from encoder.image_size import num_tokens
from encoder.preprocess import Pixels
from encoder.run_counts import RunCounts

logger = logging.getLogger("ray.serve")


class QueueFullError(RuntimeError):
    """The tokens that wait for the GPU have reached their bound."""


class WorkerEndedError(RuntimeError):
    """The thread that owned the GPU has ended; nothing is encoded here any more."""


@dataclass(frozen=True)
class Encoded:
    """What a job's future gives."""

    tokens: torch.Tensor
    """`[num_tokens, width]` in host memory."""
    queue_ms: float
    encode_ms: float


@dataclass(frozen=True)
class _Job:
    pixels: Pixels
    num_tokens: int
    queued_at: float
    future: Future[Encoded] = field(default_factory=Future)


def _ignore(_: object) -> None: ...


@dataclass(frozen=True)
class WorkerEvents:
    """Called, on any thread, when something happens that is worth counting."""

    queued_tokens: Callable[[int], None] = _ignore
    """The tokens that wait or run now."""
    retried: Callable[[int], None] = _ignore
    """So many batches failed and are tried again image by image."""
    ran: Callable[[RunCounts], None] = _ignore
    """What the encoder has counted since its start: replays, and eager runs by reason."""


class GpuWorker:
    """Owns one Encoder, on one thread."""

    def __init__(
        self, make_encoder: Callable[[], Encoder], *, max_queued_tokens: int, events: WorkerEvents | None = None
    ) -> None:
        """Blocks until the encoder is made, on the thread that will own it; raises what making it raises."""
        self._max_queued_tokens = max_queued_tokens
        self._events = events or WorkerEvents()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_tokens = 0
        self._ended = False
        self._idling = True
        made: Future[Encoder] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_encoder, made), name="gpu-owner", daemon=True)
        self._thread.start()
        self.identity = made.result().identity

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def queued_tokens(self) -> int:
        """Tokens of the jobs that wait or run."""
        return self._queued_tokens

    def submit(self, pixels: Pixels) -> Future[Encoded]:
        """Queues one image. An image that alone is over the bound is taken when nothing else waits.

        Raises:
            QueueFullError: too many tokens wait already. WorkerEndedError: the thread has ended.
        """
        count = num_tokens(pixels.grid_thw, self.identity.rules.merge_size)
        job = _Job(pixels, count, time.perf_counter())
        with self._lock:
            if self._ended:
                raise WorkerEndedError("the thread that owned the GPU has ended")
            if self._queued_tokens and self._queued_tokens + count > self._max_queued_tokens:
                raise QueueFullError(
                    f"{self._queued_tokens} visual tokens wait, {count} more would pass {self._max_queued_tokens}"
                )
            self._queued_tokens += count
            self._events.queued_tokens(self._queued_tokens)
            self._queue.put(job)  # under the lock: nothing is queued after the thread has looked for the last time
        job.future.add_done_callback(lambda _: self._release(count))
        return job.future

    def stop(self) -> None:
        """Ends the thread after the jobs that are queued."""
        self._queue.put(None)

    def _release(self, count: int) -> None:
        with self._lock:
            self._queued_tokens -= count
            self._events.queued_tokens(self._queued_tokens)

    def _run(self, make_encoder: Callable[[], Encoder], made: Future[Encoder]) -> None:
        try:
            encoder = make_encoder()
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(encoder)
        jobs: list[_Job] = []
        try:
            stopping = False
            while not stopping:
                self._events.ran(encoder.counts)
                self._idle(encoder)
                jobs, stopping = self._drain()
                # A cancelled job is dropped here, before it costs anything; the others can no longer be cancelled.
                if wanted := [job for job in jobs if job.future.set_running_or_notify_cancel()]:
                    self._encode(encoder, wanted)
                jobs, wanted = [], []  # not held while the thread waits: their futures hold embeddings
            encoder.close()
        finally:
            self._end(jobs)

    def _idle(self, encoder: Encoder) -> None:
        """Steps of the encoder's own, one by one, for as long as nothing waits. One that fails is not tried again."""
        try:
            while self._idling and self._queue.empty() and encoder.idle_step():
                self._events.ran(encoder.counts)
        except Exception:
            self._idling = False
            logger.exception("what the encoder does in idle moments failed; it goes on without")

    def _end(self, jobs: list[_Job]) -> None:
        """Takes no more jobs, and tells everybody who still waits; nobody may hang for a thread that is gone."""
        with self._lock:
            self._ended = True
        while not self._queue.empty():
            item = self._queue.get()
            if item is not None:
                jobs.append(item)
        for job in jobs:
            future = job.future
            if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
                future.set_exception(WorkerEndedError("the thread that owned the GPU has ended"))

    def _drain(self) -> tuple[list[_Job], bool]:
        """All that waits, at least one job; and whether the thread is to stop."""
        jobs: list[_Job] = []
        item = self._queue.get()
        while item is not None:
            jobs.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return jobs, False
        return jobs, True

    def _encode(self, encoder: Encoder, jobs: Sequence[_Job]) -> None:
        """Answers every job. When a run over several fails, each is tried alone, so that only the culprit fails."""
        started = time.perf_counter()
        try:
            for batch, outputs in encoder.encode_batches([job.pixels for job in jobs]):
                host = [tokens.cpu() for tokens in outputs]  # waits for the device: the results leave this process
                done = time.perf_counter()
                for index, tokens in zip(batch.indices, host, strict=True):
                    job = jobs[index]
                    job.future.set_result(Encoded(tokens, (started - job.queued_at) * 1e3, (done - started) * 1e3))
                started = done
        except Exception as error:
            open_jobs = [job for job in jobs if not job.future.done()]
            if len(jobs) == 1:
                for job in open_jobs:
                    job.future.set_exception(error)
                return
            self._events.retried(1)
            logger.exception("a batch of %d images failed; %d of them are tried alone", len(jobs), len(open_jobs))
            for job in open_jobs:
                self._encode(encoder, [job])
