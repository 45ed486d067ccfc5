"""What digests of embeddings are made with, as one ingress replica knows it: an encoder tells it, or, while there is
none and language models encode by themselves, one of those.

It must not know of images or requests.
"""

from __future__ import annotations

import contextlib
from typing import Any, cast

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments.encoder_watch import EncoderWatch, NoEncoderError
from deployments.errors import ApiError
from deployments.failures import Failures
from deployments.own_calls import on_its_own
from encoder.identity import EncoderIdentity

PATIENCE_S = 2.0
"""With encoders that are asked whether they are there."""


class TowerIdentity:
    """Used on one event loop."""

    def __init__(
        self,
        encoder: DeploymentHandle[Any],
        llm: DeploymentHandle[Any],
        failures: Failures,
        *,
        retry_after_s: int,
        fallback_after_s: float | None,
    ) -> None:
        """`fallback_after_s`: where no encoder is there for so long, language models encode by themselves; None where
        they cannot, and there is no watch."""
        self._encoder = encoder.options(_by_reference=True)
        self._encodes_itself = llm.options(_by_reference=True)
        self._failures = failures
        self._retry_after_s = retry_after_s
        self._identity: EncoderIdentity | None = None
        self.watch: EncoderWatch | None = None
        if fallback_after_s is not None:
            self.watch = EncoderWatch(
                lambda: on_its_own(self._encoder.identity.remote), self._any_encoder, after_s=fallback_after_s
            )

    async def get(self) -> EncoderIdentity:
        """What digests are made with; asked for once, and again after `forget`."""
        if self._identity is None:
            try:
                self._identity = await self._ask()
            except Exception as error:
                raise self._failures.explained(error) from error
        return self._identity

    async def _ask(self) -> EncoderIdentity:
        """An encoder's, or, where none is there, that of the language models' own."""
        if self.watch is None:
            return await cast(DeploymentResponse[EncoderIdentity], self._encoder.identity.remote())
        if not self.watch.none_there:
            with contextlib.suppress(NoEncoderError):
                return await self.watch.unless_none(
                    cast(DeploymentResponse[EncoderIdentity], self._encoder.identity.remote())
                )
        theirs = await cast(DeploymentResponse[EncoderIdentity | None], self._encodes_itself.encoder_identity.remote())
        if theirs is None:
            raise ApiError(503, "no encoder is up; try again", code="unavailable", retry_after_s=self._retry_after_s)
        return theirs

    async def _any_encoder(self) -> bool:
        """Whether one runs; one that does not answer for being busy does."""
        try:
            asked = on_its_own(lambda: self._encoder.broadcast("identity"))
            answers = await asked.results_async(timeout_s=PATIENCE_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return False
        except TimeoutError:
            return True
        return not all(isinstance(answer, RayActorError) for answer in answers)

    def forget(self) -> None:
        self._identity = None
