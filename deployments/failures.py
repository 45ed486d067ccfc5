"""What a call to a replica that failed means to a client, and what may be tried again.

It must not know how calls are made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ray.exceptions import ObjectLostError, RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.admission import Shed
from deployments.encoder_watch import NoEncoderError
from deployments.errors import ApiError
from deployments.metrics import Count, Counts
from deployments.replica_errors import (
    DeviceMemoryError,
    IdentityChangedError,
    QueueFullError,
    TransferFailedError,
    WorkerEndedError,
)

logger = logging.getLogger("ray.serve")


class ReplicaLostError(ApiError):
    """A replica died at its work, or could not do it. It can be tried again elsewhere, as long as nothing of the answer
    has been told."""


class OutdatedError(Exception):
    """An embedding is not where it was seen lately; encoders are to be asked."""


class Failures:
    """Of one ingress replica."""

    def __init__(self, counts: Counts, *, retry_after_s: int, overloaded_retry_s: Callable[[], int]) -> None:
        """`overloaded_retry_s` estimates when there is room again; `retry_after_s` is for what is not up."""
        self._counts = counts
        self._retry_after_s = retry_after_s
        self._overloaded_retry_s = overloaded_retry_s

    def explained(self, error: Exception) -> Exception:
        """What the client is told when a replica could not answer; errors that are for this server stay as they are."""
        if isinstance(error, ApiError | IdentityChangedError | OutdatedError | TimeoutError):
            return error
        retry = self._retry_after_s
        if isinstance(error, BackPressureError | QueueFullError):
            self._counts.add(Count.SHED_REQUESTS, reason=Shed.REPLICA_QUEUE.value)
            told = "the server is at its limit; try again"
            return ApiError(503, told, code="overloaded", retry_after_s=self._overloaded_retry_s())
        if isinstance(error, DeploymentUnavailableError):
            return ApiError(503, "the model is not up; try again", code="unavailable", retry_after_s=retry)
        if isinstance(error, NoEncoderError):  # the next try does without
            return ReplicaLostError(503, "no encoder is up; try again", code="unavailable", retry_after_s=retry)
        if isinstance(error, TransferFailedError):
            self._counts.add(Count.TRANSFERS_FAILED)
            return ReplicaLostError(503, "an embedding was lost; try again", code="replica_lost", retry_after_s=retry)
        if _tells_of(error, DeviceMemoryError):
            short = "an encoder had no memory left for this; try again"
            return ReplicaLostError(503, short, code="overloaded", retry_after_s=self._overloaded_retry_s())
        if _tells_of(error, RayActorError, ObjectLostError, TaskCancelledError, WorkerEndedError):
            self._counts.add(Count.REPLICAS_LOST)
            lost = "a replica was lost while it worked on this; try again"
            return ReplicaLostError(503, lost, code="replica_lost", retry_after_s=retry)
        logger.error("a replica failed", exc_info=error)
        return ApiError(500, "the server failed to answer", code="internal_error")


def _tells_of(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    """Whether `error` is of one of the kinds, or comes of one: Serve wraps an encoder's error in one of its own."""
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False
