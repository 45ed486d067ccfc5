"""Translation of failed replica calls into errors for the client, and which of them are retried."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ray.exceptions import ObjectLostError, ObjectStoreFullError, OutOfDiskError, RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.common.api_error import ApiError, Shed
from deployments.common.replica_errors import (
    DeviceMemoryError,
    EngineDeadError,
    IdentityGoneError,
    OtherIdentityError,
    QueueFullError,
    TransferFailedError,
    VersionGoneError,
    WorkerEndedError,
)
from deployments.telemetry.metrics import Counter, Counters

logger = logging.getLogger("ray.serve")

MAX_ATTEMPTS = 5
"""Attempts at one request: a request that crashes every replica it reaches must not crash all of them."""

FIRST_RETRY_DELAY_S = 0.05
"""Delay before the first retry; it doubles with each further one."""


class ReplicaLostError(ApiError):
    """A replica died during a call or could not finish it. The request can be retried on another replica, as long as no
    byte of the answer has been sent."""

    encoder = llm = True
    """Whether a retry should use another encoder, and another language model."""


class EncoderLostError(ReplicaLostError):
    """An encoder replica was lost."""

    llm = False


class LLMLostError(ReplicaLostError):
    """A language model replica was lost; encoders still have the embeddings."""

    encoder = False


class EngineLostError(LLMLostError):
    """The engine of a language model ended while it had the request."""


class Failures:
    """Translates and counts the failures that an ingress replica sees."""

    def __init__(self, counts: Counters, *, retry_after_s: int, overloaded_retry_s: Callable[[], int]) -> None:
        """`overloaded_retry_s` estimates `Retry-After` under overload; `retry_after_s` is for unavailable replicas."""
        self._counts = counts
        self._retry_after_s = retry_after_s
        self._overloaded_retry_s = overloaded_retry_s

    def to_client_error(self, error: Exception, lost: type[ReplicaLostError] = EncoderLostError) -> Exception:
        """Returns the client's error for a failed replica call. Errors that the ingress handles are returned as is.

        `lost`: the class that represents the loss of the called replica.
        """
        if isinstance(error, ApiError | IdentityGoneError | TimeoutError):
            return error
        retry = self._retry_after_s
        if isinstance(error, BackPressureError | QueueFullError):
            return self._shed(Shed.REPLICA_QUEUE, "the server is at its limit; try again")
        if _has_cause(error, ObjectStoreFullError, OutOfDiskError):
            return self._shed(Shed.OBJECT_STORE, "the memory for files is full; try again")
        if isinstance(error, DeploymentUnavailableError):
            return ApiError(503, "the model is not up; try again", code="unavailable", retry_after_s=retry)
        if isinstance(error, VersionGoneError):
            updating = "the application is being updated to another version; try again"
            return ApiError(503, updating, code="unavailable", retry_after_s=retry)
        if isinstance(error, TransferFailedError):
            self._counts.add(Counter.TRANSFER_FAILURES)
            return ReplicaLostError(503, "an embedding was lost; try again", code="replica_lost", retry_after_s=retry)
        if isinstance(error, OtherIdentityError):
            other = "an encoder has other weights or numerics; try again"
            return EncoderLostError(503, other, code="overloaded", retry_after_s=retry)
        if _has_cause(error, DeviceMemoryError):
            short = "an encoder had no memory left for this; try again"
            return lost(503, short, code="overloaded", retry_after_s=self._overloaded_retry_s())
        if isinstance(error, EngineDeadError) and error.had_request:
            self._counts.add(Counter.REPLICAS_LOST)
            ended = "a language model's engine ended while it worked on this"
            return EngineLostError(503, ended, code="replica_lost", retry_after_s=retry)
        if _has_cause(error, RayActorError, ObjectLostError, TaskCancelledError, WorkerEndedError):
            self._counts.add(Counter.REPLICAS_LOST)
            message = "a replica was lost while it worked on this; try again"
            return lost(503, message, code="replica_lost", retry_after_s=retry)
        logger.error("a replica failed", exc_info=error)
        return ApiError(500, "the server failed to answer", code="internal_error")

    def _shed(self, reason: Shed, message: str) -> ApiError:
        """Counts a request that is refused for lack of room, and returns its error."""
        self._counts.add(Counter.SHED_REQUESTS, reason=reason.value)
        return ApiError(503, message, code="overloaded", retry_after_s=self._overloaded_retry_s())


def _has_cause(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    """Whether `error` or an error in its chain of causes is of one of the kinds: Serve wraps a replica's error."""
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False
