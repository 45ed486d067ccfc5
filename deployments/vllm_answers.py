"""vLLM's application, asked with embeddings under keys instead of images, and how long its first token takes.

Every embedding is checked before the engine sees it: a wrong width kills the engine. This module must not know how
embeddings come here, nor what is done with the answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from deployments import asgi, tracing, vllm_compat
from deployments.arrived import Arrived
from deployments.errors import ApiError, error_head_and_body
from deployments.media_keys import KeyStore
from deployments.metrics import Distribution, Distributions
from deployments.server_timing import server_timing
from deployments.tracing import Stage
from deployments.wire import HttpRequest, ImagePlace, ImageRefused, ResponseHead, WireError

if TYPE_CHECKING:
    from opentelemetry.context import Context

logger = logging.getLogger("ray.serve")


Contents = list[tuple[ImagePlace, torch.Tensor, torch.Tensor]]
"""Each place with its embedding `[num_tokens, width]`, without columns where the engine loads it by itself, and its
grid `[3]` int64."""


@dataclass
class Arrival:
    """When a request's embeddings had arrived, and when its first token came."""

    epoch_s: float = 0.0
    at_s: float = 0.0
    """Of `time.perf_counter()`."""
    clock: vllm_compat.FirstTokenClock = field(default_factory=vllm_compat.FirstTokenClock)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def now(self) -> None:
        self.epoch_s, self.at_s = time.time(), time.perf_counter()
        self.complete.set()

    @property
    def first_token_s(self) -> float | None:
        """Seconds until the first token; None before it."""
        first = self.clock.first_token_at_s
        return None if first is None else first - self.at_s


class VllmAnswers:
    """The application of one engine. Used on its event loop."""

    def __init__(self, app: vllm_compat.AsgiApp, keys: KeyStore, shape: vllm_compat.EmbeddingShape) -> None:
        """`keys` is where the engine looks for embeddings; `shape` is what it takes."""
        self.app = app
        self.keys = keys
        self._shape = shape
        self._times = Distributions()

    async def answer(
        self,
        request: HttpRequest,
        places: Sequence[ImagePlace],
        embeddings: Arrived,
        arrival: Arrival,
        *,
        expected: bool = False,
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """A head, then body chunks; the head brings the first of them where `request.joined`.

        The head is held back until the first chunk, so that its Server-Timing tells the time to the first token.
        `expected`: the embeddings are on their way, and the engine loads them by itself.
        """
        trace = tracing.current()
        try:
            contents = self.expected(places) if expected else self.checked(places, embeddings)
        except ApiError as error:
            head, body = error_head_and_body(error)
            yield head
            yield body
            return
        vllm_compat.first_token_clock.set(arrival.clock)
        for place, tokens, grid in contents:
            self.keys.put(place.tokens_key, tokens)
            self.keys.put(place.grid_key, grid)
        start: vllm_compat.Message | None = None
        try:
            async with aclosing(asgi.call(self.app, request)) as messages:  # else it would be closed some time later
                async for message in messages:
                    if message["type"] == "http.response.start":
                        start = message
                        continue
                    if start is not None:
                        await arrival.complete.wait()
                        self._note_transfer(embeddings, arrival, trace)
                        self._note_first_token(arrival, trace)
                        timing = server_timing(
                            embeddings.images,
                            arrival.epoch_s,
                            arrival.at_s,
                            arrival.clock.first_token_at_s,
                            embeddings.way.value,
                        )
                        head = ResponseHead(start["status"], [*start["headers"], (b"server-timing", timing.encode())])
                        start = None
                        if request.joined:
                            whole = not message.get("more_body", False)
                            yield dataclasses.replace(head, body=message.get("body", b""), complete=whole)
                            continue
                        yield head
                    if message.get("body"):
                        yield message["body"]
        finally:
            self.keys.withdraw(key for place in places for key in (place.tokens_key, place.grid_key))
            if (first_token_s := arrival.first_token_s) is not None:
                generated_s = time.perf_counter() - arrival.at_s - first_token_s
                tracing.stage(Stage.GENERATE, generated_s, within=trace)

    def expected(self, places: Sequence[ImagePlace]) -> Contents:
        """What stands for embeddings that have not come, by the grids that the places tell."""
        contents = []
        for place in places:
            assert place.grid_thw is not None
            grid = torch.tensor(place.grid_thw, dtype=torch.int64)
            contents.append((place, torch.empty((int(grid.prod()) // self._shape.merge_size**2, 0)), grid))
        return contents

    def why_not_as_expected(self, places: Sequence[ImagePlace], embeddings: Arrived) -> str | None:
        """Of a request that was begun with what was expected: why it cannot go on so; None where it can.

        Raises TransferFailedError where something else lies in an embedding's place.
        """
        if any(isinstance(image, ImageRefused) for image in embeddings.images):
            return "refused"
        if embeddings.unsent:
            return "unsent"
        if not embeddings.engine_loads:
            return "not_loaded"
        try:
            contents = self.checked(places, embeddings)
        except ApiError:
            return "unlike"
        return None if all(place.grid_thw == tuple(grid.tolist()) for place, _, grid in contents) else "unlike"

    def checked(self, places: Sequence[ImagePlace], embeddings: Arrived) -> Contents:
        """Of embeddings that have come.

        Raises:
            ApiError: 400 for an image that the encoder refused, 500 for an embedding that does not fit the model.
        """
        checked = []
        width, merge_size = self._shape.width, self._shape.merge_size
        for place in places:
            image = embeddings.images[place.image]
            if isinstance(image, ImageRefused):
                raise ApiError(400, f"{place.label}: {image.message}", param="messages", code="invalid_image")
            try:
                tokens = embeddings.tensor(place.image, image, width=width, merge_size=merge_size)
            except WireError as error:
                logger.error("embedding refused: %s", error)
                raise ApiError(
                    500, f"{place.label}: its embedding does not fit the model", code="embedding_mismatch"
                ) from error
            checked.append((place, tokens, torch.tensor(image.grid_thw, dtype=torch.int64)))
        return checked

    def _note_transfer(self, embeddings: Arrived, arrival: Arrival, trace: Context | None) -> None:
        if encoded := [image for image in embeddings.images if not isinstance(image, ImageRefused)]:
            transfer_s = arrival.epoch_s - max(image.timings.ready_at_s for image in encoded)
            self._times.add(Distribution.TRANSFER_MS, transfer_s * 1e3)
            attributes = {"vitray.bytes": embeddings.num_bytes}
            tracing.stage(Stage.TRANSFER, transfer_s, ended_s=arrival.epoch_s, within=trace, attributes=attributes)

    def _note_first_token(self, arrival: Arrival, trace: Context | None) -> None:
        if (seconds := arrival.first_token_s) is not None:
            self._times.add(Distribution.FIRST_TOKEN_MS, seconds * 1e3)
            tracing.stage(Stage.FIRST_TOKEN, seconds, ended_s=arrival.epoch_s + seconds, within=trace)
