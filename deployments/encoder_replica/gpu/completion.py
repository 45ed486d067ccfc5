"""Completion of jobs that were launched on the GPU: each gets its embedding, an error, or a retry alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from deployments.common.replica_errors import DeviceFailedError, DeviceMemoryError
from deployments.encoder_replica.gpu.health import MAX_OUT_OF_MEMORY_IN_A_ROW, Fault
from deployments.encoder_replica.gpu.jobs import Encoded, Job, WorkerEvents
from encoder.device_errors import is_device_lost, is_out_of_memory
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
        self._lock = threading.Lock()
        self._num_out_of_memory = 0
        self.fault: Fault | None = None
        """Why the device failed permanently. Once set, it stays."""

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
        with self._lock:
            self._num_out_of_memory = 0
        for job, tokens in zip(jobs, fetched, strict=True):
            queue_ms, encode_ms = (started - job.queued_at_s) * 1e3, (done - started) * 1e3
            job.future.set_result(Encoded(tokens, queue_ms, encode_ms, ran))

    def fail_or_retry(self, jobs: Sequence[Job], error: BaseException, *, alone: bool) -> None:
        """Sets the error on jobs that failed alone. Others are retried, each alone."""
        self.diagnose(error, alone=alone)
        if self.fault is not None:
            self.fail(jobs, DeviceFailedError("the GPU has failed"))
        elif alone:
            self.fail(jobs, DeviceMemoryError(str(error)) if is_out_of_memory(error) else error)
        else:
            self._events.on_retry(1)
            logger.error("a batch failed; %d images of it are retried one by one", len(jobs), exc_info=error)
            for job in jobs:
                self._retry(replace(job, alone=True))

    def diagnose(self, error: BaseException, *, alone: bool) -> None:
        """Updates the device's health. `alone`: whether the batch was one image, which is not retried."""
        is_lost = is_device_lost(error)
        with self._lock:
            before = self.fault
            if is_lost:
                self.fault = Fault.CUDA_ERROR
            elif alone and is_out_of_memory(error):
                self._num_out_of_memory += 1
                if self._num_out_of_memory >= MAX_OUT_OF_MEMORY_IN_A_ROW:
                    self.fault = self.fault or Fault.OUT_OF_MEMORY
            fault = self.fault
        if before is None and fault is not None:
            logger.error("the GPU has failed and is not used any more", exc_info=error)
            self._events.on_gpu_failure(fault)

    def fail(self, jobs: Sequence[Job], error: BaseException) -> None:
        """Sets the error on those of the jobs that are neither completed nor cancelled."""
        for job in jobs:
            future = job.future
            if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
                future.set_exception(error)
