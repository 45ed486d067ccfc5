"""Calls vLLM's OpenAI application with references in place of images, and measures the time to first token."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from deployments.common.api_error import error_head_and_body
from deployments.common.messages import HttpRequest, ItemReference, ResponseHead
from deployments.common.replica_errors import WorkerEndedError
from deployments.llm import asgi_client
from deployments.llm.dropped_images import find_dropped_images
from deployments.llm.received import ReceivedEmbeddings
from deployments.telemetry import tracing
from deployments.telemetry.metrics import Histogram, Histograms
from deployments.telemetry.server_timing import format_server_timing
from deployments.telemetry.tracing import Stage
from deployments.vllm import compat
from deployments.vllm.references import References
from encoder.item_header import ChunkHeader, ItemHeader

PIECE_BYTES = 2**20
"""Maximum bytes of a message to the ingress, whose gRPC client refuses those over 4 MiB."""


class VllmFrontend:
    """OpenAI application of one engine. Used on its event loop."""

    def __init__(
        self,
        app: compat.AsgiApp,
        references: References,
        *,
        engine_died: Callable[[], bool] = lambda: False,
    ) -> None:
        """`references`: the items that `app` knows."""
        self.app = app
        self._engine_died = engine_died
        self.references = references
        self._times = Histograms()

    async def answer(
        self,
        request: HttpRequest,
        references: Sequence[ItemReference],
        headers: Sequence[ItemHeader | ChunkHeader | None],
        received: ReceivedEmbeddings,
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Yields a head, then body chunks of at most PIECE_BYTES; the head has the first.

        The head is delayed until all embeddings are received, so that the request can still be retried, and until the
        first chunk, so that its Server-Timing contains the time to the first token. References are valid meanwhile.
        `headers`: vLLM is called once those that are None have come with their embeddings; empty if `references` are
        known to it, as those to decoded images are.

        Raises WorkerEndedError before the head if the engine has ended and the answer would be an error: vLLM sends a
        500, or an event stream without a token.
        """
        compat.first_token_clock.set(received.clock)
        compat.cache_salt.set(request.cache_salt)
        keys: list[str] = []
        start: compat.Message | None = None
        try:
            if None in headers:
                await received.complete.wait()
            for reference in references if headers else ():
                header = headers[reference.item] or received.header(reference.item)
                assert isinstance(header, ItemHeader), "a reference is to an item's first embedding"
                keys.append(self.references.add(header, reference.key))
            async with aclosing(asgi_client.call(self.app, request)) as messages:
                async for message in messages:
                    if message["type"] == "http.response.start":
                        start = message
                        continue
                    body, more_body = message.get("body", b""), message.get("more_body", False)
                    if start is not None:
                        await received.complete.wait()
                        head = await self._make_head(start, body, request, received, has_images=bool(references))
                        start, body = None, head.body
                        in_head, body = body[:PIECE_BYTES], body[PIECE_BYTES:]
                        yield dataclasses.replace(head, body=in_head, complete=not body and not more_body)
                    for begin in range(0, len(body), PIECE_BYTES):
                        yield body[begin : begin + PIECE_BYTES]
        finally:
            self.references.release(keys)
            if (first_token_s := received.first_token_s) is not None:
                generated_s = time.perf_counter() - received.received_at_s - first_token_s
                tracing.record_span(Stage.GENERATE, generated_s, parent=received.trace)

    async def _make_head(
        self,
        start: compat.Message,
        body: bytes,
        request: HttpRequest,
        received: ReceivedEmbeddings,
        *,
        has_images: bool,
    ) -> ResponseHead:
        """Returns the head with the first chunk. Raises WorkerEndedError for an error of an engine that has ended."""
        head = ResponseHead(start["status"], list(start["headers"]), body)
        no_token = received.first_token_s is None
        if (head.status >= 500 or no_token) and self._engine_died():
            raise WorkerEndedError("the engine has ended")
        if head.status == 500 and has_images and no_token:
            dropped = await find_dropped_images(self.app, request)
            if dropped is not None:
                refusal, refusal_body = error_head_and_body(dropped)
                head = dataclasses.replace(refusal, body=refusal_body)
        self._observe_timings(received)
        timing = format_server_timing(
            received.images,
            received.transfer_s,
            received.first_token_s,
            None if received.path is None else received.path.value,
        )
        return dataclasses.replace(head, headers=[*head.headers, (b"server-timing", timing.encode())])

    def _observe_timings(self, received: ReceivedEmbeddings) -> None:
        if (transfer_s := received.transfer_s) is not None:
            self._times.observe(Histogram.TRANSFER_SECONDS, transfer_s)
            attributes = {"vitray.bytes": received.num_bytes}
            tracing.record_span(
                Stage.TRANSFER,
                transfer_s,
                ended_s=received.received_epoch_s,
                parent=received.trace,
                attributes=attributes,
            )
        if (seconds := received.first_token_s) is not None:
            self._times.observe(Histogram.LLM_FIRST_TOKEN_SECONDS, seconds)
            tracing.record_span(
                Stage.FIRST_TOKEN, seconds, ended_s=received.received_epoch_s + seconds, parent=received.trace
            )
