"""How the ingress reaches the replicas: calls by Serve's handles.

It must not know of HTTP requests or chat bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from deployments.affinity import Call
from deployments.failures import Failures, OutdatedError
from deployments.grpc_calls import GrpcAnswer
from deployments.hedging import Begun, Hedging, object_ref
from deployments.metrics import Count, Counts
from deployments.own_calls import on_its_own
from deployments.replica_errors import TransferFailedError
from deployments.shared_calls import SharedCall, SharedCalls
from deployments.tower_identity import TowerIdentity
from deployments.tracing import Stage, stage
from deployments.whereabouts import Whereabouts
from deployments.wire import (
    NOWHERE,
    Accepted,
    EncodedImage,
    HttpRequest,
    ImageJob,
    ImagePlace,
    ImageRefused,
    Piece,
    SharedEmbedding,
)

EncoderAnswer = EncodedImage | SharedEmbedding | ImageRefused
Calling = SharedCall[DeploymentResponse[EncoderAnswer]]
Encoding = Calling | SharedEmbedding | ImageJob
"""A call to an encoder, or where the embedding was seen lately, or what the language model is to encode by itself."""
Answer = DeploymentResponseGenerator[Piece] | GrpcAnswer[Piece]
Begin = Callable[[], Awaitable[Answer]]
T = TypeVar("T")


NO_HOST = "nowhere"
"""Stands for the host of a language model that takes nothing from shared memory."""

PULLS_REMEMBERED = 8
"""Answers of language models that tell whether encoders of other hosts are to lend."""

EARLY_CALLS = 64
"""Answers of one ingress that may wait at language models for encoders: their places are for what can be answered."""

END_S = 30.0
"""What a replica has to end a call whose answer was whole, before the call is cancelled."""


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
        by_grpc: bool = True,
    ) -> None:
        """`overloaded_retry_s` estimates when there is room again; `retry_after_s` is for what is not up.

        `hedge_after_s`: an image that takes longer is sent to a second encoder. `max_whereabouts`: of how many
        embeddings it is remembered where they lie. `fallback_after_s`: where no encoder is there for so long, language
        models encode by themselves; None where they cannot. `by_grpc`: where no reference goes with a request.
        """
        # By reference: values go from replica to replica through the object store, whatever Serve's default is.
        self._encode = encoder.options(method_name="encode", _by_reference=True)
        self._llm = llm.options(method_name="handle", stream=True, _by_reference=True)
        self._by_grpc = llm.options(method_name="handle", stream=True, _by_reference=False) if by_grpc else None
        self._encodings: SharedCalls[DeploymentResponse[EncoderAnswer]] = SharedCalls()
        self._read_on: set[str] = set()
        self._pulls: deque[bool] = deque(maxlen=PULLS_REMEMBERED)
        self._whereabouts = Whereabouts(max_whereabouts)
        self._early: set[asyncio.Future[Any]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._counts = Counts()
        self.failures = Failures(self._counts, retry_after_s=retry_after_s, overloaded_retry_s=overloaded_retry_s)
        self._hedging = None if hedge_after_s is None else Hedging(hedge_after_s, self._counts)
        self.identity = TowerIdentity(
            encoder, llm, self.failures, retry_after_s=retry_after_s, fallback_after_s=fallback_after_s
        )
        self._watch = self.identity.watch

    def seen(self, jobs: Sequence[ImageJob], conversation: str | None) -> list[SharedEmbedding | None]:
        """For each of a request's images, where its embedding was seen lately, if it was."""
        return self._whereabouts.of_all([job.digest for job in jobs], conversation)

    def encode(self, job: ImageJob, attempt: int = 0, *, seen: SharedEmbedding | None = None) -> Encoding:
        """Starts encoding, or joins a call for the same image; what is returned goes to `answer`, not awaited here.

        Nothing is called for what was `seen`, nor where no encoder is there and language models encode by themselves.

        `attempt`: how often a replica was lost at it, or an embedding could not be had from shared memory; after the
        first it goes through the object store. Let `encoded` or `cancel` follow.
        """
        if seen is not None:
            self._counts.add(Count.WHEREABOUTS_KNOWN)
            stage(Stage.CACHED, 0)
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
        started = on_its_own(lambda: to.remote(job))
        return cast(DeploymentResponse[EncoderAnswer], started)

    async def answer(
        self,
        request: HttpRequest,
        places: Sequence[ImagePlace],
        encodings: Sequence[Encoding],
        *,
        conversation: str | None = None,
        attempt: int = 0,
        prompt_tokens: int = 0,
    ) -> Answer:
        """Starts the answer: Accepted (or NotEncoded, and nothing more), a head, body chunks.

        The language model fetches each encoding by itself as soon as it is there; it is called once every encoder has
        its job, or, where EARLY_CALLS wait there, once every encoder is done with it. `conversation`: what its turns
        have in common, 64 hex characters. `prompt_tokens`: about so many.

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
        call = Call(conversation, 1, attempt, prompt_tokens)
        if refs or self._by_grpc is None:  # references go by Ray alone
            return cast(Answer, self._llm.options(session_id=call.label()).remote(request, places, given, call))
        self._counts.add(Count.CALLS_BY_GRPC)
        return GrpcAnswer(self._by_grpc.options(session_id=call.label()).remote(request, places, given, call))

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

    async def not_encoded(self, encoding: Encoding, *, conversation: str | None = None) -> NoReturn:
        """Raises what the encoding has failed with, as the language model found."""
        if isinstance(encoding, SharedEmbedding):
            if encoding.lender != NOWHERE:
                self._whereabouts.forget(encoding.digest)
            elif conversation is not None:
                self._whereabouts.not_in_engine(conversation, encoding.digest)
            self._counts.add(Count.WHEREABOUTS_OUTDATED)
            raise OutdatedError
        assert isinstance(encoding, SharedCall), "what a language model encodes by itself is no call"
        if encoding.race is None:
            await (await object_ref(encoding.response))
        raise TransferFailedError("an encoding was given up")  # another encoder was faster

    def encoded(self, encodings: Sequence[Encoding], accepted: Accepted, *, conversation: str | None = None) -> None:
        """A language model has them, or what comes of them."""
        self._read_on.add(accepted.reads_on or NO_HOST)
        self._pulls.append(accepted.pulls)
        for calling in _callings(encodings):
            self._encodings.used(calling)
        for seen in accepted.read_from:
            if seen is not None and seen.lender == NOWHERE:
                if conversation is not None:
                    self._whereabouts.in_engine(conversation, seen)
            # Another host's language model could not read there.
            elif seen is not None and len(self._read_on) == 1:
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
                response.cancel()

    def ends(self, answer: Answer) -> None:
        """All of the answer is there: its end is waited for beside what comes next, since Serve counts the call until
        then.
        """
        task = asyncio.create_task(_to_its_end(answer))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def trying_again(self) -> None:
        self._counts.add(Count.TRIES_AGAIN)


async def _to_its_end(answer: Answer) -> None:
    with contextlib.suppress(Exception):  # of an answer that was whole
        try:
            async with asyncio.timeout(END_S):
                async for _ in answer:
                    pass
        except TimeoutError:
            answer.cancel()


def _callings(encodings: Sequence[Encoding]) -> list[Calling]:
    """Those for which an encoder was called."""
    return [encoding for encoding in encodings if isinstance(encoding, SharedCall)]
