"""How the ingress reaches the replicas: calls by Serve's handles, and what a failed call means to a client.

It must not know of HTTP requests or chat bodies.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any, cast

from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from deployments.encoder import IdentityChangedError
from deployments.errors import ApiError
from deployments.gpu_worker import QueueFullError, WorkerEndedError
from deployments.metrics import Count, Counts
from deployments.wire import EncodedImage, HttpRequest, ImageJob, ImagePlace, ImageRefused, ResponseHead
from encoder.identity import EncoderIdentity

logger = logging.getLogger("ray.serve")

Encoding = DeploymentResponse[EncodedImage | ImageRefused]
Answer = DeploymentResponseGenerator[ResponseHead | bytes]


class Replicas:
    """The encoders and the language models of the application."""

    def __init__(self, encoder: DeploymentHandle[Any], llm: DeploymentHandle[Any], *, retry_after_s: int) -> None:
        # By reference: values go from replica to replica through the object store, whatever Serve's default is.
        self._encoder = encoder.options(_by_reference=True)
        self._llm = llm.options(method_name="handle", stream=True, _by_reference=True)
        self._retry_after_s = retry_after_s
        self._identity: EncoderIdentity | None = None
        self._counts = Counts()

    async def encoder_identity(self) -> EncoderIdentity:
        """What digests are made with; asked for once, and again after `forget_identity`."""
        if self._identity is None:
            try:
                self._identity = await cast(DeploymentResponse[EncoderIdentity], self._encoder.identity.remote())
            except Exception as error:
                raise self.explained(error) from error
        return self._identity

    def forget_identity(self) -> None:
        self._identity = None

    def encode(self, job: ImageJob) -> Encoding:
        """Starts encoding; what is returned is handed on to `answer`, not awaited here."""
        return cast(Encoding, self._encoder.encode.remote(job))

    def answer(self, request: HttpRequest, places: Sequence[ImagePlace], encodings: Sequence[Encoding]) -> Answer:
        """Starts the answer: a ResponseHead, then body chunks. Serve waits for the encodings, then picks a replica."""
        return cast(Answer, self._llm.remote(request, places, *encodings))

    def cancel(self, answer: Answer, encodings: Sequence[Encoding]) -> None:
        """Stops what is under way; what has failed or ended already stays as it is."""
        started: list[Answer | Encoding] = [answer, *encodings]
        for response in started:
            with contextlib.suppress(Exception):  # Serve raises here what made the call fail, which was told already
                response.cancel()  # type: ignore[no-untyped-call]

    def explained(self, error: Exception) -> Exception:
        """What the client is told when a replica could not answer; errors that are for this server stay as they are."""
        if isinstance(error, ApiError | IdentityChangedError | TimeoutError):
            return error
        retry = self._retry_after_s
        if isinstance(error, BackPressureError | QueueFullError):
            return ApiError(503, "the server is at its limit; try again", code="overloaded", retry_after_s=retry)
        if isinstance(error, DeploymentUnavailableError):
            return ApiError(503, "the model is not up; try again", code="unavailable", retry_after_s=retry)
        if _tells_of_a_lost_replica(error):
            self._counts.add(Count.REPLICAS_LOST)
            lost = "a replica was lost while it worked on this; try again"
            return ApiError(503, lost, code="replica_lost", retry_after_s=retry)
        logger.error("a replica failed", exc_info=error)
        return ApiError(500, "the server failed to answer", code="internal_error")


def _tells_of_a_lost_replica(error: BaseException | None) -> bool:
    """Whether `error` reports the death of an actor, or of the thread it lives by.

    Serve wraps the death of an encoder in an error of its own.
    """
    while error is not None:
        if isinstance(error, RayActorError | ObjectLostError | WorkerEndedError):
            return True
        error = error.__cause__ or error.__context__
    return False
