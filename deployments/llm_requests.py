"""Requests at a language model replica: their embeddings waited for, vLLM asked, and what comes of both told in order.

It must not know how embeddings come, how vLLM answers, or how the replica starts and reports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import cast

from deployments import tracing
from deployments.arrived import Arrived, NotEncodedError
from deployments.early import Early
from deployments.errors import ApiError, error_head_and_body
from deployments.incoming import Encoding, Incoming
from deployments.local_encoder import LocalEncoder, LocalEncoding
from deployments.pieces import after
from deployments.replica_errors import TransferFailedError
from deployments.unsent import MissingError, unless_missing
from deployments.vllm_answers import Arrival, VllmAnswers
from deployments.wire import Accepted, HttpRequest, ImageJob, ImagePlace, NotEncoded, Piece, ResponseHead


class Requests:
    """Of one engine."""

    early: Early | None = None
    """Where vLLM is given requests before all of their embeddings are there."""

    def __init__(
        self, incoming: Incoming, answers: VllmAnswers, *, reads_on: str | None, local: LocalEncoder | None
    ) -> None:
        """`reads_on`: the host whose shared memory embeddings are read from, if any. `local` encodes what comes as a
        job, since no encoder is there."""
        self._incoming = incoming
        self._answers = answers
        self.reads_on = reads_on
        self.local = local
        self.num_under_way = 0
        """Those whose embeddings have arrived."""

    @property
    def num_begun(self) -> int:
        """Those that vLLM has while something of theirs has not come."""
        return self.early.num_begun if self.early else 0

    async def answer(
        self, request: HttpRequest, places: Sequence[ImagePlace], encodings: Sequence[Encoding | ImageJob]
    ) -> AsyncGenerator[Piece, None]:
        """First that its embeddings are within reach, then a ResponseHead, then body chunks.

        `encodings`: what encoders answer or will answer, by reference, or where an embedding lay lately. Where one has
        failed, or is gone and the engine needs it, NotEncoded is all. A job where no encoder is there: the image is
        encoded here.

        Raises:
            TransferFailedError: before anything else, where an embedding is not where it was said to lie; at any time
                where the engine came to need one that it had done without.
        """
        request = dataclasses.replace(request, headers=tracing.passed_on(request.headers))
        embeddings, arrival = self._incoming.expecting(), Arrival()
        try:
            try:
                answer = await self._arrived(request, places, encodings, embeddings, arrival)
            except NotEncodedError as failed:
                yield NotEncoded(failed.image)
                return
            except ApiError as error:
                head, body = error_head_and_body(error)
                yield head
                yield body
                return
            async with aclosing(answer), aclosing(self._told(answer, embeddings, arrival)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._incoming.close(embeddings)

    async def _told(
        self, answer: AsyncGenerator[ResponseHead | bytes, None], embeddings: Arrived, arrival: Arrival
    ) -> AsyncGenerator[Piece, None]:
        """That its embeddings are within reach, and the answer."""
        arrival.now()
        accepted = Accepted(self.reads_on, embeddings.read_from, self._incoming.pulls)
        told: AsyncGenerator[Piece, None]
        if embeddings.unsent:
            told = self._unless_missing(answer, embeddings, arrival, accepted)
        else:
            told = after(accepted, answer)
        self.num_under_way += 1
        try:
            async with aclosing(told):
                async for piece in told:
                    yield piece
        finally:
            self.num_under_way -= 1

    async def _unless_missing(
        self,
        pieces: AsyncGenerator[ResponseHead | bytes, None],
        embeddings: Arrived,
        arrival: Arrival,
        accepted: Accepted,
    ) -> AsyncGenerator[Piece, None]:
        """The answer as `handle` gives it, where the engine gets on without the embeddings that were not sent."""
        taken_up = False
        try:
            with self._incoming.watched(embeddings) as missing:
                async with aclosing(unless_missing(pieces, missing, arrival.clock.ticked, accepted)) as told:
                    async for piece in told:
                        if not taken_up:
                            self._incoming.spared(embeddings)
                        taken_up = True
                        yield piece
        except MissingError as error:
            if taken_up:  # vLLM had put the request back, and its prefix has left the cache
                raise TransferFailedError("the prefix cache has an image's prefix no more") from error
            yield NotEncoded(embeddings.unsent_by_digest[error.digest])

    async def _arrived(
        self,
        request: HttpRequest,
        places: Sequence[ImagePlace],
        encodings: Sequence[Encoding | ImageJob],
        embeddings: Arrived,
        arrival: Arrival,
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """The answer, once its embeddings have arrived; where they can be expected, vLLM is at it by then.

        Raises what `Incoming.arrive` does, and ApiError: 503 where an image cannot be encoded here.
        """
        if self.early is not None and self.early.suits(places, encodings):
            begun = self.early.begin(request, places, embeddings, arrival)
            if await self.early.arrived(begun, places, cast(Sequence[Encoding], encodings), embeddings):
                return begun.rest()
        else:
            await self._arrive(encodings, embeddings)
            if self.early is not None:
                self.early.came(encodings, embeddings)
        return self._answers.answer(request, places, embeddings, arrival)

    async def _arrive(self, encodings: Sequence[Encoding | ImageJob], embeddings: Arrived) -> None:
        jobs = [one for one in encodings if isinstance(one, ImageJob)]
        encoded_here: AbstractContextManager[list[LocalEncoding]] = nullcontext([])
        if jobs:
            if self.local is None:
                raise ApiError(503, "the model is not up; try again", code="unavailable")
            encoded_here = self.local.encodings(jobs)
        with encoded_here as here:
            coming = iter(here)
            given = [next(coming) if isinstance(one, ImageJob) else one for one in encodings]
            await self._incoming.arrive(given, embeddings)
