"""Completion of jobs that were launched on the GPU: each gets its embedding, an error, or a retry alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from deployments.common.replica_errors import DeviceFailedError, DeviceMemoryError, WorkerEndedError
from deployments.encoder_replica.gpu.health import DeviceHealth, Fault
from deployments.encoder_replica.gpu.jobs import Encoded, Job, WorkerEvents
from encoder.device_errors import is_out_of_memory
from encoder.interface import LaunchedBatch
from encoder.staging.staging import HostAllocator

logger = logging.getLogger("ray.serve")


class Completion:
    """Completes jobs, on any thread, and tracks the device's health."""

    def __init__(self, events: WorkerEvents, retry: Callable[[Job], None], allocate: HostAllocator | None) -> None:
        """`retry` queues a job that is retried alone; `allocate` allocates memory for embeddings."""
        self._events = events
        self._retry = retry
        self._allocate = allocate
        self._health = DeviceHealth()

    @property
    def fault(self) -> Fault | None:
        """Why the device failed permanently, or None."""
        return self._health.fault

    def complete_batch(self, launched: LaunchedBatch, jobs: Sequence[Job], started: float) -> None:
        """Waits for a batch and completes its jobs. `started`: when the batch left the queue, by `time.perf_counter`.

        Every step that may fail precedes the first completion, so that each job gets an embedding or an error.
        """
        try:
            fetched, ran = launched.fetch(self._allocate), launched.run_record
            if len(fetched) != len(jobs):
                raise RuntimeError(f"a batch of {len(jobs)} images gave {len(fetched)} embeddings")
        except BaseException as error:
            self.fail_or_retry(jobs, error, alone=len(jobs) == 1 or not isinstance(error, Exception))
            return
        done = time.perf_counter()
        self._health.record_success()
        for job, tokens in zip(jobs, fetched, strict=True):
            queue_ms, encode_ms = (started - job.queued_at_s) * 1e3, (done - started) * 1e3
            job.future.set_result(Encoded(tokens, queue_ms, encode_ms, ran))

    def fail_or_retry(self, jobs: Sequence[Job], error: BaseException, *, alone: bool) -> None:
        """Sets the error on jobs that failed alone. Others are retried, each alone."""
        self.diagnose(error, alone=alone)
        if self.fault is not None:
            self.fail_jobs(jobs)
            return
        if alone:
            failure = DeviceMemoryError(str(error)) if is_out_of_memory(error) else error
            for job in jobs:
                job.future.set_exception(failure)
            return
        self._events.on_retry(1)
        logger.error("a batch failed; %d images of it are retried one by one", len(jobs), exc_info=error)
        for job in jobs:
            self._retry(replace(job, alone=True))

    def diagnose(self, error: BaseException, *, alone: bool) -> None:
        """Updates the device's health. `alone`: whether the batch was one image, which is not retried."""
        if self._health.record_failure(error, alone=alone) and self.fault is not None:
            logger.error("the GPU has failed and is not used any more", exc_info=error)
            self._events.on_gpu_failure(self.fault)

    def fail_jobs(self, jobs: Sequence[Job]) -> None:
        """Fails the jobs because the device failed; another replica may encode them."""
        for job in jobs:
            job.future.set_exception(DeviceFailedError("the GPU has failed"))

    def fail_pending(self, jobs: Sequence[Job]) -> None:
        """Fails those of the jobs that are neither completed nor cancelled, because the thread has ended."""
        for job in jobs:
            future = job.future
            if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
                future.set_exception(WorkerEndedError("the thread that owned the GPU has ended"))
