"""Calls vLLM's OpenAI application with embeddings by key in place of images, and measures the time to first token.

Every embedding is validated before the engine gets it: a wrong width kills the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from deployments.common.api_error import ApiError, error_head_and_body
from deployments.common.messages import HttpRequest, ImageReference, ImageRefused, ResponseHead, WireError
from deployments.common.replica_errors import WorkerEndedError
from deployments.llm import asgi_client
from deployments.llm.dropped_images import find_dropped_images
from deployments.llm.received import ReceivedEmbeddings
from deployments.telemetry import tracing
from deployments.telemetry.metrics import Histogram, Histograms
from deployments.telemetry.server_timing import format_server_timing
from deployments.telemetry.tracing import Stage
from deployments.vllm import compat
from deployments.vllm.media_connector import KeyStore

if TYPE_CHECKING:
    from opentelemetry.context import Context

logger = logging.getLogger("ray.serve")


Contents = list[tuple[ImageReference, torch.Tensor, torch.Tensor]]
"""Each place with its embedding `[num_tokens, width]`, or a placeholder `[num_tokens, 0]` if the engine loads it, and
its grid `[3]` int64."""


@dataclass
class RequestTimeline:
    """Times at which a request's embeddings were received and its first token was produced."""

    clock: compat.FirstTokenClock
    received_epoch_s: float = 0.0
    received_at_s: float = 0.0
    """`time.perf_counter()` when the embeddings were received."""
    received: asyncio.Event = field(default_factory=asyncio.Event)
    trace: Context | None = field(default_factory=tracing.current_context)

    def mark_received(self) -> None:
        self.received_epoch_s, self.received_at_s = time.time(), time.perf_counter()
        self.received.set()

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the embeddings to the first token; None before it."""
        first = self.clock.first_token_at_s
        return None if first is None else first - self.received_at_s


class VllmFrontend:
    """OpenAI application of one engine. Used on its event loop."""

    def __init__(
        self,
        app: compat.AsgiApp,
        keys: KeyStore,
        shape: compat.EmbeddingShape,
        *,
        engine_died: Callable[[], bool] = lambda: False,
    ) -> None:
        """`keys`: store from which vLLM takes embeddings. `shape`: shape of the embeddings that it takes."""
        self.app = app
        self._engine_died = engine_died
        self.keys = keys
        self._shape = shape
        self._times = Histograms()

    async def answer(
        self,
        request: HttpRequest,
        image_refs: Sequence[ImageReference],
        received: ReceivedEmbeddings,
        timeline: RequestTimeline,
        *,
        use_placeholders: bool = False,
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Yields a head, then body chunks; the head contains the first chunk if `request.body_in_head`.

        The head is delayed until the first chunk, so that its Server-Timing contains the time to the first token.
        `use_placeholders`: the embeddings are not received yet, and the engine is expected to load them.

        Raises WorkerEndedError before the head if the engine has ended and the answer would be an error: vLLM sends a
        500, or an event stream without a token.
        """
        try:
            contents = (
                self._make_placeholders(image_refs)
                if use_placeholders
                else self._collect_embeddings(image_refs, received)
            )
        except ApiError as error:
            head, body = error_head_and_body(error)
            yield head
            yield body
            return
        compat.first_token_clock.set(timeline.clock)
        tensors = {image_ref.tokens_key: tokens for image_ref, tokens, _ in contents}
        tensors |= {image_ref.grid_key: grid for image_ref, _, grid in contents}
        for key, tensor in tensors.items():
            self.keys.put(key, tensor)
        start: compat.Message | None = None
        try:
            async with aclosing(asgi_client.call(self.app, request)) as messages:
                async for message in messages:
                    if message["type"] == "http.response.start":
                        start = message
                        continue
                    body = message.get("body", b"")
                    if start is not None:
                        await timeline.received.wait()
                        head = await self._make_head(start, body, request, tensors, received, timeline)
                        start, body = None, head.body
                        if request.body_in_head:
                            yield dataclasses.replace(head, complete=not message.get("more_body", False))
                            continue
                        yield dataclasses.replace(head, body=b"")
                    if body:
                        yield body
        finally:
            self.keys.discard(tensors)
            if (first_token_s := timeline.first_token_s) is not None:
                generated_s = time.perf_counter() - timeline.received_at_s - first_token_s
                tracing.record_span(Stage.GENERATE, generated_s, parent=timeline.trace)

    async def _make_head(
        self,
        start: compat.Message,
        body: bytes,
        request: HttpRequest,
        tensors: Mapping[str, torch.Tensor],
        received: ReceivedEmbeddings,
        timeline: RequestTimeline,
    ) -> ResponseHead:
        """Returns the head with the first chunk. Raises WorkerEndedError for an error of an engine that has ended."""
        head = ResponseHead(start["status"], list(start["headers"]), body)
        no_token = timeline.first_token_s is None
        if (head.status >= 500 or no_token) and self._engine_died():
            raise WorkerEndedError("the engine has ended")
        if head.status == 500 and tensors and no_token:
            dropped = await find_dropped_images(self.app, self.keys, request, tensors)
            if dropped is not None:
                refusal, refusal_body = error_head_and_body(dropped)
                head = dataclasses.replace(refusal, body=refusal_body)
        self._observe_timings(received, timeline)
        timing = format_server_timing(
            received.images,
            received.transfer_s,
            timeline.received_at_s,
            timeline.clock.first_token_at_s,
            received.path.value,
        )
        return dataclasses.replace(head, headers=[*head.headers, (b"server-timing", timing.encode())])

    def _make_placeholders(self, image_refs: Sequence[ImageReference]) -> Contents:
        """Returns placeholders for embeddings that are not received, from the grids of the places."""
        contents = []
        for image_ref in image_refs:
            assert image_ref.grid_thw is not None
            grid = torch.tensor(image_ref.grid_thw, dtype=torch.int64)
            contents.append((image_ref, torch.empty((int(grid.prod()) // self._shape.merge_size**2, 0)), grid))
        return contents

    def mismatch_reason(self, image_refs: Sequence[ImageReference], received: ReceivedEmbeddings) -> str | None:
        """Returns why a request that was submitted with placeholders must be resubmitted; None if it need not be.

        Raises TransferFailedError if an embedding's memory holds another one.
        """
        if received.has_rejected:
            return "rejected"
        if received.num_skipped:
            return "evicted"
        if not received.engine_loads:
            return "not_loaded"
        try:
            contents = self._collect_embeddings(image_refs, received)
        except ApiError:
            return "shape_mismatch"
        return (
            None
            if all(image_ref.grid_thw == tuple(grid.tolist()) for image_ref, _, grid in contents)
            else "shape_mismatch"
        )

    def _collect_embeddings(self, image_refs: Sequence[ImageReference], received: ReceivedEmbeddings) -> Contents:
        """Returns the received embeddings.

        Raises:
            ApiError: 400 for an image that the encoder refused, 500 for an embedding that does not fit the model.
        """
        contents = []
        width, merge_size = self._shape.width, self._shape.merge_size
        for image_ref in image_refs:
            image = received.images[image_ref.image]
            if isinstance(image, ImageRefused):
                raise ApiError(400, f"{image_ref.label}: {image.message}", param="messages", code="invalid_image")
            try:
                tokens = received.tensor(image_ref.image, width=width, merge_size=merge_size)
            except WireError as error:
                logger.error("embedding refused: %s", error)
                raise ApiError(
                    500, f"{image_ref.label}: its embedding does not fit the model", code="embedding_mismatch"
                ) from error
            contents.append((image_ref, tokens, torch.tensor(image.grid_thw, dtype=torch.int64)))
        return contents

    def _observe_timings(self, received: ReceivedEmbeddings, timeline: RequestTimeline) -> None:
        if (transfer_s := received.transfer_s) is not None:
            self._times.observe(Histogram.TRANSFER_SECONDS, transfer_s)
            attributes = {"vitray.bytes": received.num_bytes}
            tracing.record_span(
                Stage.TRANSFER,
                transfer_s,
                ended_s=timeline.received_epoch_s,
                parent=timeline.trace,
                attributes=attributes,
            )
        if (seconds := timeline.first_token_s) is not None:
            self._times.observe(Histogram.LLM_FIRST_TOKEN_SECONDS, seconds)
            tracing.record_span(
                Stage.FIRST_TOKEN, seconds, ended_s=timeline.received_epoch_s + seconds, parent=timeline.trace
            )
