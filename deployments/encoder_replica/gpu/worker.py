"""The thread that owns the GPU: the encoder packs and runs the first jobs of a bounded fair queue (`fair_queue.py`).

It does not wait for launched batches: a second thread fetches the results and completes the jobs' futures
(`completion.py`). `deployments/encoder_replica/deployment.py` submits the jobs.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from deployments.common.fair_queue import WINDOW, FairQueue
from deployments.common.replica_errors import DeviceFailedError, QueueFullError, WorkerEndedError
from deployments.common.throughput import BusySpeed
from deployments.encoder_replica.gpu.completion import Completion
from deployments.encoder_replica.gpu.completion_thread import CompletionThread
from deployments.encoder_replica.gpu.health import Fault
from deployments.encoder_replica.gpu.jobs import Encoded, Item, Job, Signal, WorkerEvents
from encoder.interface import ItemEncoder
from encoder.staging.staging import HostAllocator

logger = logging.getLogger("ray.serve")


class GpuWorker:
    """Owns one encoder on one thread. `submit` is thread-safe."""

    def __init__(
        self,
        make_encoder: Callable[[], ItemEncoder[Any]],
        *,
        max_queued_tokens: int,
        events: WorkerEvents | None = None,
        allocate: HostAllocator | None = None,
    ) -> None:
        """Blocks until `make_encoder` has returned on the GPU thread, and raises its exception.

        `allocate` allocates memory for embeddings; it is called on the completion thread.
        """
        self._max_queued_tokens = max_queued_tokens
        self._events = events or WorkerEvents()
        self._inbox: queue.SimpleQueue[Job | Signal] = queue.SimpleQueue()
        self._fair_queue: FairQueue[Job] = FairQueue()
        self._launching: list[Job] = []
        """Jobs of the `launch_batches` call in progress."""
        self._stopping = self._ended = False
        self._lock = threading.Lock()
        self._queued_tokens = 0
        """Tokens of the jobs that are queued or being encoded."""
        self._speed = BusySpeed()
        self._completion = Completion(self._events, self._inbox.put, allocate)
        self._can_idle = True
        encoder_future: Future[ItemEncoder[Any]] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make_encoder, encoder_future), name="gpu-owner", daemon=True
        )
        self._thread.start()
        encoder = encoder_future.result()
        self.identity, self.resizes_on_device = encoder.identity, encoder.resizes_on_device
        self._count_tokens = encoder.count_tokens

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def fault(self) -> Fault | None:
        """Why the device failed permanently, or None. After a failure, every image is refused."""
        return self._completion.fault

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second measured in busy time; 0 before the first image."""
        return self._speed.tokens_per_s

    def submit(self, item: Item, place: float | None = None) -> Future[Encoded]:
        """Queues one image. An image that exceeds `max_queued_tokens` alone is accepted if the queue is empty.

        `place`: place in the queue, from `fair_queue.virtual_arrival_s` and `time.perf_counter`; None: now.

        Raises:
            QueueFullError: the queue has no room for the image's tokens.
            WorkerEndedError: the thread has ended, or the device has failed.
        """
        num_job_tokens = self._count_tokens(item)
        now = time.perf_counter()
        job = Job(item, num_job_tokens, now, now if place is None else place)
        if self.fault is not None:
            raise DeviceFailedError(f"the GPU has failed: {self.fault.value}")
        with self._lock:
            if self._ended:
                raise WorkerEndedError("the thread that owned the GPU has ended")
            if self._queued_tokens and self._queued_tokens + num_job_tokens > self._max_queued_tokens:
                raise QueueFullError(
                    f"the encoder's queue holds {self._queued_tokens} visual tokens; {num_job_tokens} more would "
                    f"exceed its limit of {self._max_queued_tokens}"
                )
            self._queued_tokens += num_job_tokens
            self._speed.begin()
            self._events.on_queued_tokens(self._queued_tokens)
            self._inbox.put(job)  # under the lock, so that no job is queued after the thread's last look
        job.future.add_done_callback(lambda done: self._release(num_job_tokens, done))
        return job.future

    def stop(self, *, wait: bool = False) -> None:
        """Ends the thread after the queued jobs, without retries. `wait`: whether to block until it has ended."""
        self._inbox.put(Signal.STOP)
        if wait:
            self._thread.join()

    def _release(self, num_job_tokens: int, done: Future[Encoded]) -> None:
        encoded = not done.cancelled() and done.exception() is None
        with self._lock:
            self._queued_tokens -= num_job_tokens
            self._speed.end(num_job_tokens if encoded else 0)
            self._events.on_queued_tokens(self._queued_tokens)

    def _run(self, make_encoder: Callable[[], ItemEncoder[Any]], encoder_future: Future[ItemEncoder[Any]]) -> None:
        try:
            encoder = make_encoder()
        except BaseException as error:
            encoder_future.set_exception(error)
            return
        encoder_future.set_result(encoder)
        self._completion_thread = CompletionThread(lambda: self._inbox.put(Signal.WAKE))
        self._events.on_run(encoder.counts)
        self._run_idle_steps(encoder)
        try:
            while not self._stopping:
                self._encode_queued(encoder)
                self._run_idle_steps(encoder)
        finally:
            self._completion_thread.close()
            self._fail_remaining()

    def _run_idle_steps(self, encoder: ItemEncoder[Any]) -> None:
        """Runs the encoder's idle steps while no job is queued or in flight.

        A graph capture needs the device to itself. After an idle step that raised, none is tried again.
        """
        try:
            while (
                self._can_idle
                and not self._stopping
                and self.fault is None
                and self._inbox.empty()
                and self._completion_thread.is_idle
                and encoder.idle_step()
            ):
                self._events.on_run(encoder.counts)
        except Exception as error:
            self._can_idle = False
            self._completion.diagnose(error, alone=False)
            logger.exception("an idle step of the encoder failed; no further idle step is run")

    def _encode_queued(self, encoder: ItemEncoder[Any]) -> None:
        """Blocks until an item arrives, then launches all queued jobs, batch by batch."""
        self._enqueue(self._inbox.get())
        while self._fair_queue:
            self._wait_for_room(encoder)
            self._drain_inbox()
            self._launch(encoder, self._select_jobs(encoder))
            self._events.on_run(encoder.counts)

    def _wait_for_room(self, encoder: ItemEncoder[Any]) -> None:
        """Jobs that arrive meanwhile are packed too."""
        try:
            encoder.wait_for_room()
        except Exception as error:  # of a batch in flight, whose jobs are completed with it
            self._completion.diagnose(error, alone=False)

    def _select_jobs(self, encoder: ItemEncoder[Any]) -> list[Job]:
        """Takes the first jobs of the queue that are to be packed together; the first only, if it is retried alone."""
        first = [job for _, job in self._fair_queue.take(WINDOW)]
        together = first[:1] if first[0].alone else [job for job in first if not job.alone]
        together = together[: encoder.num_to_launch([job.num_tokens for job in together], self._queued_tokens)]
        self._requeue(set(first).difference(together))
        # Cancelled jobs are dropped here, before they cost GPU time; from here on, jobs cannot be cancelled.
        return [job for job in together if job.future.running() or job.future.set_running_or_notify_cancel()]

    def _requeue(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._fair_queue.add(job.place, job)

    def _fail_remaining(self) -> None:
        """Refuses further jobs and fails those that remain, so that no caller waits for a thread that has ended."""
        with self._lock:
            self._ended = True
        while not self._inbox.empty():
            self._enqueue(self._inbox.get())
        jobs = [*self._launching, *(job for _, job in self._fair_queue.take())]
        self._launching = []
        self._completion.fail(jobs, WorkerEndedError("the thread that owned the GPU has ended"))

    def _drain_inbox(self) -> None:
        """Moves jobs from the inbox to the fair queue, up to a stop signal."""
        while not self._stopping and not self._inbox.empty():
            self._enqueue(self._inbox.get())

    def _enqueue(self, item: Job | Signal) -> None:
        if isinstance(item, Job):
            self._fair_queue.add(item.place, item)
        elif item is Signal.STOP:
            self._stopping = True

    def _launch(self, encoder: ItemEncoder[Any], jobs: list[Job]) -> None:
        """Launches the batch with the first job, then the other batches as long as no new job arrives; returns the
        rest to the queue.

        If a batch of several jobs fails, each is retried alone, so that only the one at fault fails.
        """
        if not jobs:
            return
        if self.fault is not None:
            self._completion.fail(jobs, DeviceFailedError("the GPU has failed"))
            return
        self._launching = jobs
        launched_indices: set[int] = set()
        started = time.perf_counter()
        try:
            for launched in encoder.launch_batches([job.item for job in jobs]):
                launched_indices.update(launched.batch.indices)
                batch = [jobs[index] for index in launched.batch.indices]
                self._completion_thread.put(partial(self._completion.complete_batch, launched, batch, started))
                self._wait_for_room(encoder)
                self._drain_inbox()
                if self._fair_queue:  # a new job may precede the remaining ones, or be packed with them
                    break
                started = time.perf_counter()
            self._requeue([job for index, job in enumerate(jobs) if index not in launched_indices])
        except Exception as error:
            remaining = [job for index, job in enumerate(jobs) if index not in launched_indices]
            self._completion.fail_or_retry(remaining, error, alone=len(jobs) == 1)
        self._launching = []
