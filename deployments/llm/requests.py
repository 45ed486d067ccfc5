"""Requests at an LLM replica: receive the embeddings, submit the request to vLLM, stream the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from deployments.common.messages import Accepted, HttpRequest, ImageReference, NotEncoded, Piece, ResponseHead, TooEarly
from deployments.common.replica_errors import TransferFailedError
from deployments.llm.early_prefill import EarlyPrefill
from deployments.llm.embedding_receiver import EmbeddingReceiver, Encoding
from deployments.llm.prefix_cache_skip import EmbeddingNeededError, stream_unless_missing
from deployments.llm.received import NotEncodedError, ReceivedEmbeddings
from deployments.llm.streams import PrefetchedStream, prepend
from deployments.llm.vllm_frontend import RequestTimeline, VllmFrontend
from deployments.telemetry import tracing
from deployments.telemetry.metrics import Counter, Counters
from deployments.vllm.compat import FirstTokenClock


class Requests:
    """All requests of one engine. Used on its event loop."""

    early_prefill: EarlyPrefill | None = None
    """Set if requests may be submitted to vLLM before all of their embeddings are received."""

    def __init__(
        self,
        receiver: EmbeddingReceiver,
        frontend: VllmFrontend,
        counts: Counters,
        *,
        shm_host: str | None,
        max_early_requests: int,
    ) -> None:
        """`shm_host`: the host whose shared memory embeddings are read from, if any. `max_early_requests`: limit of
        requests that wait here for encoders; the replica's other slots are kept for requests whose images
        are encoded."""
        self._receiver = receiver
        self._frontend = frontend
        self._counts = counts
        self.shm_host = shm_host
        self._max_early_requests = max_early_requests
        self._num_early_requests = 0
        self.num_in_flight = 0
        """Requests that vLLM is answering, with all embeddings received."""

    @property
    def num_early_prefills(self) -> int:
        return self.early_prefill.num_waiting if self.early_prefill else 0

    async def answer(
        self,
        request: HttpRequest,
        image_refs: Sequence[ImageReference],
        encodings: Sequence[Encoding],
        clock: FirstTokenClock,
    ) -> AsyncGenerator[Piece, None]:
        """Yields Accepted once the embeddings are received, then a ResponseHead, then body chunks.

        `encodings`: encoders' future answers, or last known locations. Yields only NotEncoded if an encoder failed or
        the engine needs an embedding that was freed, and only TooEarly if `max_early_requests` requests are waiting.

        Raises:
            TransferFailedError: before any piece, if an embedding is not at its stated location; at any time, if the
                engine comes to need an embedding that was skipped.
        """
        if request.early_prefill and self._num_early_requests >= self._max_early_requests:
            yield TooEarly()
            return
        request = dataclasses.replace(request, headers=tracing.inject_trace(request.headers))
        received, timeline = self._receiver.new_batch(), RequestTimeline(clock)
        try:
            self._num_early_requests += request.early_prefill
            try:
                answer = await self._submit(request, image_refs, encodings, received, timeline)
            except NotEncodedError as failed:
                yield NotEncoded(failed.image)
                return
            finally:
                self._num_early_requests -= request.early_prefill
            timeline.mark_received()
            self.num_in_flight += 1
            try:
                async with aclosing(answer), aclosing(self._accept(answer, received, timeline)) as pieces:
                    async for piece in pieces:
                        yield piece
            finally:
                self.num_in_flight -= 1
        finally:
            self._receiver.close(received)

    async def _submit(
        self,
        request: HttpRequest,
        image_refs: Sequence[ImageReference],
        encodings: Sequence[Encoding],
        received: ReceivedEmbeddings,
        timeline: RequestTimeline,
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Returns vLLM's answer once the embeddings are received. With early prefill, vLLM gets the request before.

        Raises the errors of `EmbeddingReceiver.receive`, and TransferFailedError if memory holds another embedding.
        """
        early_prefill = self.early_prefill
        if early_prefill is None or not early_prefill.is_eligible(image_refs, encodings):
            await self._receiver.receive(encodings, received)
            if early_prefill is not None:
                early_prefill.record(encodings, received)
            return self._frontend.answer(request, image_refs, received, timeline)
        self._counts.add(Counter.EARLY_PREFILLS)
        stream = PrefetchedStream(self._frontend.answer(request, image_refs, received, timeline, use_placeholders=True))
        early_prefill.num_waiting += 1
        try:
            await self._receiver.receive(encodings, received, grant_each=True)
            early_prefill.record(encodings, received)
            mismatch = self._frontend.mismatch_reason(image_refs, received)
        except BaseException:
            await stream.close()
            raise
        finally:
            early_prefill.num_waiting -= 1
        if mismatch is None:
            return stream.read()
        self._counts.add(Counter.EARLY_PREFILLS_ABORTED, reason=mismatch)
        await stream.close()
        return self._frontend.answer(request, image_refs, received, timeline)

    async def _accept(
        self,
        answer: AsyncGenerator[ResponseHead | bytes, None],
        received: ReceivedEmbeddings,
        timeline: RequestTimeline,
    ) -> AsyncGenerator[Piece, None]:
        """Yields Accepted and the answer, or NotEncoded if the engine needs an embedding that was skipped."""
        accepted = Accepted(self.shm_host, received.locations, self._receiver.uses_rdma)
        if not received.num_skipped:
            async with aclosing(prepend(accepted, answer)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        scheduled = False
        try:
            with self._receiver.watch_skipped(received) as missing:
                async with aclosing(
                    stream_unless_missing(answer, missing, timeline.clock.first_token_event, accepted)
                ) as pieces:
                    async for piece in pieces:
                        if not scheduled:
                            self._receiver.count_skipped(received)
                        scheduled = True
                        yield piece
        except EmbeddingNeededError as error:
            if scheduled:  # vLLM preempted the request and evicted its prefix
                raise TransferFailedError("the prefix cache no longer covers an image") from error
            yield NotEncoded(received.skipped[error.digest])
