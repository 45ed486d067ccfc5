"""Requests at an LLM replica: submit the request to vLLM, receive the embeddings meanwhile, stream the answer.

vLLM's frontend tokenizes the prompt, and its scheduler prefills it up to the first missing embedding
(`deployments/vllm/connector/partial_prefill_scheduler.py`) while encoders run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NoReturn

from deployments.common.api_error import ApiError, conversation_field, error_head_and_body
from deployments.common.messages import (
    Accepted,
    Deferred,
    HttpRequest,
    ImageRefused,
    ItemReference,
    NotEncoded,
    Piece,
    ResponseHead,
    Shape,
    SharedEmbedding,
    TooEarly,
)
from deployments.common.replica_errors import TransferFailedError
from deployments.llm.embedding_receiver import EmbeddingReceiver, Encoding
from deployments.llm.prefix_cache_skip import stream_unless_lost, unless_lost
from deployments.llm.received import EmbeddingMismatchError, NotEncodedError, ReceivedEmbeddings
from deployments.llm.streams import PrefetchedStream, cancel_and_wait
from deployments.llm.vllm_frontend import VllmFrontend
from deployments.telemetry import tracing
from deployments.telemetry.metrics import Counter, Counters
from deployments.vllm.compat import FirstTokenClock
from encoder.item_header import ChunkHeader, ItemHeader

logger = logging.getLogger("ray.serve")


class Requests:
    """All requests of one engine. Used on its event loop."""

    def __init__(
        self,
        receiver: EmbeddingReceiver,
        frontend: VllmFrontend,
        counts: Counters,
        *,
        width: int,
        max_early_requests: int,
        audio_width: int | None = None,
    ) -> None:
        """`width`: columns of the embeddings that the model takes; `audio_width`: of sounds, if it differs.
        `max_early_requests`: limit of requests that wait here for encoders; the replica's other slots are kept for
        requests whose images are encoded."""
        self._receiver = receiver
        self._frontend = frontend
        self._counts = counts
        self._width, self._audio_width = width, audio_width or width
        self._max_early_requests = max_early_requests
        self._num_early_requests = 0
        self.num_early_prefills = 0
        """Requests at vLLM of which some embeddings are not received yet."""
        self.num_in_flight = 0
        """Requests that vLLM is answering, with all embeddings received."""

    async def answer(
        self,
        request: HttpRequest,
        references: Sequence[ItemReference],
        headers: Sequence[ItemHeader | ChunkHeader | None],
        encodings: Sequence[Encoding],
        clock: FirstTokenClock,
    ) -> AsyncGenerator[Piece, None]:
        """Yields Accepted once the embeddings are received, then a ResponseHead, then body chunks.

        `headers`: None for each that comes with its embedding, without which vLLM cannot get the request.
        `encodings`: one for each of `headers`. Yields only NotEncoded if an encoder failed or the engine needs skipped
        embeddings that are stored nowhere, and only TooEarly if `max_early_requests` requests are waiting.

        Raises:
            TransferFailedError: before any piece, if an embedding is not at its stated location; at any time, if the
                engine comes to need an embedding that was skipped.
        """
        if request.early_prefill and self._num_early_requests >= self._max_early_requests:
            yield TooEarly()
            return
        request = dataclasses.replace(request, headers=tracing.inject_trace(request.headers))
        received = ReceivedEmbeddings(clock)
        headers = [header or _known_header(encoding) for header, encoding in zip(headers, encodings, strict=True)]
        expected = [header.embeddings[0] if isinstance(header, ItemHeader) else header for header in headers]
        at_vllm = None not in headers
        if at_vllm and not all(isinstance(encoding, SharedEmbedding | Deferred) for encoding in encodings):
            self._counts.add(Counter.EARLY_PREFILLS)
        sounds = {reference.item for reference in references if reference.modality == "audio"}
        shapes = [
            (None if header is None else header.num_embeds, self._audio_width if number in sounds else self._width)
            for number, header in enumerate(expected)
        ]
        with self._receiver.missing.watch(clock) as missing:
            stream = PrefetchedStream(self._frontend.answer(request, references, headers, received))
            digests = [None if header is None else header.digest for header in expected]
            lost = asyncio.ensure_future(self._receiver.receive_missing(missing, digests, shapes, received))
            try:
                self._num_early_requests += request.early_prefill
                try:
                    receiving = self._receive(request, references, shapes, encodings, received, at_vllm=at_vllm)
                    refusal = await unless_lost(receiving, lost)
                except NotEncodedError as failed:
                    await stream.aclose()
                    yield NotEncoded(failed.images)
                    return
                finally:
                    self._num_early_requests -= request.early_prefill
                missing.changed.set()
                received.mark_complete()
                if refusal is not None:
                    await stream.aclose()
                answer = stream.read() if refusal is None else _answer_error(refusal)
                self.num_in_flight += 1
                try:
                    async with aclosing(self._accept(answer, received, lost)) as pieces:
                        async for piece in pieces:
                            yield piece
                finally:
                    self.num_in_flight -= 1
            finally:
                try:
                    await stream.aclose()
                    await cancel_and_wait(lost)
                finally:
                    self._receiver.close(received)

    async def _receive(
        self,
        request: HttpRequest,
        references: Sequence[ItemReference],
        shapes: Sequence[Shape],
        encodings: Sequence[Encoding],
        received: ReceivedEmbeddings,
        *,
        at_vllm: bool,
    ) -> ApiError | None:
        """Returns once the embeddings are received: the client's error if one was refused or does not fit the model.
        `at_vllm`: whether vLLM has the request meanwhile.

        Raises the other errors of `EmbeddingReceiver.receive`.
        """
        self.num_early_prefills += at_vllm
        try:
            await self._receiver.receive(encodings, shapes, received)
        except EmbeddingMismatchError as error:
            logger.error("embedding refused: %s", error)
            self._counts.add(Counter.EARLY_PREFILLS_ABORTED, reason="shape_mismatch")
            label = _reference_to(error.image, references).label
            return ApiError(500, f"{label}: its embedding does not fit the model", code="embedding_mismatch")
        finally:
            self.num_early_prefills -= at_vllm
        for number, slot in enumerate(received.slots):
            if isinstance(image := slot.image, ImageRefused):
                reference = _reference_to(number, references)
                self._counts.add(Counter.EARLY_PREFILLS_ABORTED, reason="rejected")
                param = conversation_field(request.path)
                code = f"invalid_{reference.modality}"
                return ApiError(400, f"{reference.label}: {image.message}", param=param, code=code)
        return None

    async def _accept(
        self,
        answer: AsyncGenerator[ResponseHead | bytes, None],
        received: ReceivedEmbeddings,
        lost: asyncio.Future[NoReturn],
    ) -> AsyncGenerator[Piece, None]:
        """Yields Accepted and the answer, or NotEncoded if the engine needs skipped embeddings that are `lost`."""
        accepted = Accepted(received.locations)
        if not received.num_skipped:
            yield accepted
            async with aclosing(answer):
                async for part in answer:
                    yield part
            return
        scheduled = False
        try:
            first_token = received.clock.first_token_event
            async with aclosing(stream_unless_lost(answer, lost, first_token, accepted)) as pieces:
                async for piece in pieces:
                    if not scheduled and first_token.is_set():  # a count of tokens needs no embedding
                        self._counts.add(Counter.EMBEDDINGS_SKIPPED, received.num_skipped)
                    scheduled = True
                    yield piece
        except NotEncodedError as error:
            if scheduled:  # vLLM preempted the request and evicted its prefix
                raise TransferFailedError("the prefix cache no longer covers an image") from error
            yield NotEncoded(error.images)


def _reference_to(number: int, references: Sequence[ItemReference]) -> ItemReference:
    """Returns a reference to the item of an embedding: that of a video refers to its first chunk."""
    return max((one for one in references if one.item <= number), key=lambda one: one.item)


def _known_header(encoding: Encoding) -> ItemHeader | ChunkHeader | None:
    """Returns the header of an embedding whose last known location is given, else None."""
    location = encoding.location if isinstance(encoding, Deferred) else encoding
    return location.header if isinstance(location, SharedEmbedding) else None


async def _answer_error(error: ApiError) -> AsyncGenerator[ResponseHead | bytes, None]:
    head, body = error_head_and_body(error)
    yield head
    yield body
