"""How the ingress reaches the replicas: calls by Serve's handles, and what a failed call means to a client.

It must not know of HTTP requests or chat bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

from ray.exceptions import ObjectLostError, RayActorError, TaskCancelledError
from ray.serve.context import _set_request_context
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from deployments.admission import Shed
from deployments.affinity import Call
from deployments.arrived import TransferFailedError
from deployments.encoder import IdentityChangedError
from deployments.encoder_watch import EncoderWatch, NoEncoderError
from deployments.errors import ApiError
from deployments.gpu_jobs import DeviceMemoryError, QueueFullError, WorkerEndedError
from deployments.hedging import Begun, Hedging, object_ref
from deployments.metrics import Count, Counts
from deployments.shared_calls import SharedCall, SharedCalls
from deployments.whereabouts import Whereabouts
from deployments.wire import (
    Accepted,
    EncodedImage,
    HttpRequest,
    ImageJob,
    ImagePlace,
    ImageRefused,
    NotEncoded,
    ResponseHead,
    SharedEmbedding,
)
from encoder.identity import EncoderIdentity

logger = logging.getLogger("ray.serve")

EncoderAnswer = EncodedImage | SharedEmbedding | ImageRefused
Calling = SharedCall[DeploymentResponse[EncoderAnswer]]
Encoding = Calling | SharedEmbedding | ImageJob
"""A call to an encoder, or where the embedding was seen lately, or what the language model is to encode by itself."""
Piece = Accepted | NotEncoded | ResponseHead | bytes
Answer = DeploymentResponseGenerator[Piece]
Begin = Callable[[], Awaitable[Answer]]
T = TypeVar("T")


NOWHERE = "nowhere"
"""Stands for the host of a language model that takes nothing from shared memory."""

PATIENCE_S = 2.0
"""With encoders that are asked whether they are there."""

PULLS_REMEMBERED = 8
"""Answers of language models that tell whether encoders of other hosts are to lend."""

EARLY_CALLS = 64
"""Answers of one ingress that may wait at language models for encoders: their places are for what can be answered."""


class ReplicaLostError(ApiError):
    """A replica died at its work, or could not do it. It can be tried again elsewhere, as long as nothing of the answer
    has been told."""


class OutdatedError(Exception):
    """An embedding is not where it was seen lately; encoders are to be asked."""


class Replicas:
    """The encoders and the language models of the application."""

    def __init__(
        self,
        encoder: DeploymentHandle[Any],
        llm: DeploymentHandle[Any],
        *,
        retry_after_s: int,
        overloaded_retry_s: Callable[[], int],
        hedge_after_s: float | None = None,
        max_whereabouts: int = 0,
        fallback_after_s: float | None = None,
    ) -> None:
        """`overloaded_retry_s` estimates when there is room again; `retry_after_s` is for what is not up.

        `hedge_after_s`: an image that takes longer is sent to a second encoder. `max_whereabouts`: of how many
        embeddings it is remembered where they lie. `fallback_after_s`: where no encoder is there for so long, language
        models encode by themselves; None where they cannot.
        """
        # By reference: values go from replica to replica through the object store, whatever Serve's default is.
        self._encoder = encoder.options(_by_reference=True)
        self._encode = encoder.options(method_name="encode", _by_reference=True)
        self._llm = llm.options(method_name="handle", stream=True, _by_reference=True)
        self._encodes_itself = llm.options(_by_reference=True)
        self._retry_after_s = retry_after_s
        self._overloaded_retry_s = overloaded_retry_s
        self._identity: EncoderIdentity | None = None
        self._encodings: SharedCalls[DeploymentResponse[EncoderAnswer]] = SharedCalls()
        self._read_on: set[str] = set()
        self._pulls: deque[bool] = deque(maxlen=PULLS_REMEMBERED)
        self._whereabouts = Whereabouts(max_whereabouts)
        self._early: set[asyncio.Future[Any]] = set()
        self._counts = Counts()
        self._hedging = None if hedge_after_s is None else Hedging(hedge_after_s, self._counts)
        self._watch: EncoderWatch | None = None
        if fallback_after_s is not None:
            self._watch = EncoderWatch(
                lambda: _on_its_own(self._encoder.identity.remote), self._any_encoder, after_s=fallback_after_s
            )

    async def encoder_identity(self) -> EncoderIdentity:
        """What digests are made with; asked for once, and again after `forget_identity`."""
        if self._identity is None:
            try:
                self._identity = await self._ask_identity()
            except Exception as error:
                raise self.explained(error) from error
        return self._identity

    async def _ask_identity(self) -> EncoderIdentity:
        """An encoder's, or, where none is there, that of the language models' own."""
        if self._watch is None:
            return await cast(DeploymentResponse[EncoderIdentity], self._encoder.identity.remote())
        if not self._watch.none_there:
            with contextlib.suppress(NoEncoderError):
                return await self._watch.unless_none(
                    cast(DeploymentResponse[EncoderIdentity], self._encoder.identity.remote())
                )
        theirs = await cast(DeploymentResponse[EncoderIdentity | None], self._encodes_itself.encoder_identity.remote())
        if theirs is None:
            raise ApiError(503, "no encoder is up; try again", code="unavailable", retry_after_s=self._retry_after_s)
        return theirs

    async def _any_encoder(self) -> bool:
        """Whether one runs; one that does not answer for being busy does."""
        try:
            asked = _on_its_own(lambda: self._encoder.broadcast("identity"))
            answers = await asked.results_async(timeout_s=PATIENCE_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return False
        except TimeoutError:
            return True
        return not all(isinstance(answer, RayActorError) for answer in answers)

    def forget_identity(self) -> None:
        self._identity = None

    def encode(self, job: ImageJob, attempt: int = 0, *, ask: bool = False) -> Encoding:
        """Starts encoding, or joins a call for the same image; what is returned goes to `answer`, not awaited here.

        Nothing is called where it is known where the embedding lies, unless `ask`, nor where no encoder is there and
        language models encode by themselves.

        `attempt`: how often a replica was lost at it, or an embedding could not be had from shared memory; after the
        first it goes through the object store. Let `encoded` or `cancel` follow.
        """
        seen = None if ask or attempt else self._whereabouts.get(job.digest)
        if seen is not None:
            self._counts.add(Count.WHEREABOUTS_KNOWN)
            return seen
        if self._watch is not None and self._watch.none_there:
            return job
        pulled = not attempt and len(self._pulls) > 0 and all(self._pulls)
        job = dataclasses.replace(job, read_on=() if attempt else tuple(sorted(self._read_on)), pulled=pulled)
        key = f"{job.digest} {job.read_on} {job.pulled}"
        encoding, shared = self._encodings.take(key, lambda: self._call_encoder(job, attempt))
        if shared:
            self._counts.add(Count.ENCODINGS_SHARED)
        return encoding

    def _call_encoder(self, job: ImageJob, attempt: int) -> DeploymentResponse[EncoderAnswer]:
        to = self._encode.options(session_id=Call(job.digest, job.num_tokens, attempt).label())
        started = _on_its_own(lambda: to.remote(job))
        return cast(DeploymentResponse[EncoderAnswer], started)

    async def answer(
        self,
        request: HttpRequest,
        places: Sequence[ImagePlace],
        encodings: Sequence[Encoding],
        *,
        conversation: str | None = None,
        attempt: int = 0,
    ) -> Answer:
        """Starts the answer: Accepted (or NotEncoded, and nothing more), a head, body chunks.

        The language model fetches each encoding by itself as soon as it is there; it is called once every encoder has
        its job, or, where EARLY_CALLS wait there, once every encoder is done with it. `conversation`: what its turns
        have in common, 64 hex characters.

        Raises:
            NoEncoderError: encoders were to be called, and none is there.
        """
        taken = asyncio.gather(*(object_ref(calling.response) for calling in _callings(encodings)))
        refs = await (taken if self._watch is None else self._watch.unless_none(taken))
        if refs:
            there = asyncio.gather(*(ref._ready() for ref in refs))  # presence alone: nothing is fetched
            if len(self._early) >= EARLY_CALLS:
                await there
            else:
                self._early.add(there)
                there.add_done_callback(self._no_more_early)
        coming = iter(refs)
        given = [next(coming) if isinstance(one, SharedCall) else one for one in encodings]
        llm = self._llm.options(session_id=Call(conversation, 1, attempt).label())
        return cast(Answer, llm.remote(request, places, given))

    def _no_more_early(self, there: asyncio.Future[Any]) -> None:
        self._early.discard(there)
        if not there.cancelled():
            there.exception()  # told to who waits for the encoding

    async def hurried(
        self, answer: Answer, jobs: Sequence[ImageJob], encodings: Sequence[Encoding], *, attempt: int, again: Begin
    ) -> Answer:
        """The answer; a new one by `again` where an encoding was slow and another encoder was asked as well.

        `jobs` are those of the encodings.
        """
        callings = _callings(encodings)
        if self._hedging is None or not callings:
            return answer
        begun: Begun[Piece] = Begun(answer)
        spares = [
            partial(self._call_encoder, job, attempt + 1)
            for job, encoding in zip(jobs, encodings, strict=True)
            if isinstance(encoding, SharedCall)
        ]
        try:
            anew = await self._hedging.hurried(begun, callings, spares)
        except BaseException:
            begun.cancel()
            raise
        return await again() if anew else cast(Answer, begun)

    async def not_encoded(self, encoding: Encoding) -> NoReturn:
        """Raises what the encoding has failed with, as the language model found."""
        if isinstance(encoding, SharedEmbedding):
            self._whereabouts.forget(encoding.digest)
            self._counts.add(Count.WHEREABOUTS_OUTDATED)
            raise OutdatedError
        assert isinstance(encoding, SharedCall), "what a language model encodes by itself is no call"
        if encoding.race is None:
            await (await object_ref(encoding.response))
        raise TransferFailedError("an encoding was given up")  # another encoder was faster

    def encoded(self, encodings: Sequence[Encoding], accepted: Accepted) -> None:
        """A language model has them."""
        self._read_on.add(accepted.reads_on or NOWHERE)
        self._pulls.append(accepted.pulls)
        for calling in _callings(encodings):
            self._encodings.used(calling)
        for seen in accepted.read_from:
            # Another host's language model could not read there.
            if seen is not None and len(self._read_on) == 1:
                self._whereabouts.put(seen.digest, seen)
        if len(self._read_on) > 1:
            self._whereabouts.clear()

    def cancel(self, answer: Answer | None, encodings: Sequence[Encoding], *, failed: bool = False) -> None:
        """Stops what is under way and nobody else's; what has failed or ended already stays as it is.

        `failed`: something of it has failed, and those who come are not to share it.
        """
        give_up = self._encodings.failed if failed else self._encodings.left
        started: list[Answer | DeploymentResponse[EncoderAnswer]] = [] if answer is None else [answer]
        for calling in _callings(encodings):
            if give_up(calling):
                started += [calling.response, *([calling.spare] if calling.spare is not None else [])]
                if calling.race is not None:
                    calling.race.cancel()
        for response in started:
            with contextlib.suppress(Exception):  # Serve raises here what made the call fail, which was told already
                response.cancel()  # type: ignore[no-untyped-call]

    def trying_again(self) -> None:
        self._counts.add(Count.TRIES_AGAIN)

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


def _callings(encodings: Sequence[Encoding]) -> list[Calling]:
    """Those for which an encoder was called."""
    return [encoding for encoding in encodings if isinstance(encoding, SharedCall)]


def _on_its_own(start: Callable[[], T]) -> T:
    """Starts a call that outlives the HTTP request it is started for: others may have come to share it.

    Serve cancels what was called on behalf of a request whose client has gone.
    """

    def alone() -> T:
        _set_request_context(_internal_request_id=uuid.uuid4().hex)
        return start()

    return contextvars.copy_context().run(alone)


def _tells_of(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    """Whether `error` is of one of the kinds, or comes of one: Serve wraps an encoder's error in one of its own."""
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False
