"""What becomes of images that the GPU was given: each job gets its embedding, an error, or another try by itself.

It must not know of the line, nor of the threads that call it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from deployments.device_health import DeviceHealth, Fault
from deployments.gpu_jobs import Encoded, Job, WorkerEvents
from deployments.replica_errors import DeviceMemoryError, DeviceSickError, WorkerEndedError
from encoder.device_errors import out_of_memory
from encoder.pipeline import UnderWay
from encoder.staging import Room

logger = logging.getLogger("ray.serve")


class Outcomes:
    """Answers jobs on any thread, and knows whether the device can still be trusted."""

    def __init__(self, events: WorkerEvents, again: Callable[[Job], None], room: Room | None) -> None:
        """`again` takes a job that is to be tried by itself; `room`: where embeddings are to lie."""
        self._events = events
        self._again = again
        self._room = room
        self._health = DeviceHealth()

    @property
    def fault(self) -> Fault | None:
        """What the device has failed of for good, if it has."""
        return self._health.fault

    def fetch(self, launched: UnderWay, jobs: Sequence[Job], started: float) -> None:
        """Waits for a batch and answers its jobs. `started`: by `time.perf_counter`, when it left the line.

        Whatever may fail comes before the first answer, so that none is without an answer or an error.
        """
        try:
            fetched, ran = launched.fetch(self._room), launched.ran
            if len(fetched) != len(jobs):
                raise RuntimeError(f"a batch of {len(jobs)} images gave {len(fetched)} embeddings")
        except BaseException as error:
            self.failed(jobs, error, alone=len(jobs) == 1 or not isinstance(error, Exception))
            return
        done = time.perf_counter()
        self._health.worked()
        for job, tokens in zip(jobs, fetched, strict=True):
            queue_ms, encode_ms = (started - job.queued_at) * 1e3, (done - started) * 1e3
            job.future.set_result(Encoded(tokens, queue_ms, encode_ms, ran))

    def failed(self, jobs: Sequence[Job], error: BaseException, *, alone: bool) -> None:
        """Gives the error to a job that failed by itself; others are to be tried again, each by itself."""
        self.diagnose(error, alone=alone)
        if self.fault is not None:
            self.refuse(jobs)
            return
        if alone:
            told = DeviceMemoryError(str(error)) if out_of_memory(error) else error
            for job in jobs:
                job.future.set_exception(told)
            return
        self._events.retried(1)
        logger.error("a batch failed; %d images of it are tried alone", len(jobs), exc_info=error)
        for job in jobs:
            self._again(replace(job, alone=True))

    def diagnose(self, error: BaseException, *, alone: bool) -> None:
        """`alone`: of one image, which is not tried again."""
        if self._health.failed(error, alone=alone) and self.fault is not None:
            logger.error("the device has failed, it is not used any more", exc_info=error)
            self._events.sick(self.fault)

    def refuse(self, jobs: Sequence[Job]) -> None:
        """Others may encode them."""
        for job in jobs:
            job.future.set_exception(DeviceSickError("the device has failed"))

    def abandon(self, jobs: Sequence[Job]) -> None:
        """Those that nobody will encode; some may have been answered, or cancelled."""
        for job in jobs:
            future = job.future
            if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
                future.set_exception(WorkerEndedError("the thread that owned the GPU has ended"))
