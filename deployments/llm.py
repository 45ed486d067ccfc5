"""The language model replica: vLLM with vLLM's own OpenAI application, fed with embeddings instead of images.

It checks every embedding before the engine sees it (a wrong width kills the engine) and streams what vLLM streams. It
must not know how images are fetched, decoded or encoded.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import torch

from configs.schema import AppConfig
from deployments import asgi, vllm_compat
from deployments.checkpoint import local_model
from deployments.errors import ApiError, error_head_and_body
from deployments.log_buffers import log_buffers_kept
from deployments.media_keys import KeyStore
from deployments.orphans import guard_children
from deployments.server_timing import server_timing
from deployments.wire import Accepted, EncodedImage, HttpRequest, ImagePlace, ImageRefused, ResponseHead, WireError

logger = logging.getLogger("ray.serve")


class LLM:
    """One vLLM engine. Serve calls `handle` for every request that the ingress lets through."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]  # Serve awaits it, on its event loop
        with log_buffers_kept():
            self._engine, args = vllm_compat.start_engine(
                local_model(config.model),
                {"served_model_name": [config.model], **config.llm.engine_args},
                config.llm.server_args,
                cpu_kv_cache_gib=None if config.llm.num_gpus else config.llm.cpu_kv_cache_gib,
            )
            self._guard = guard_children()
            self._keys = KeyStore()
            self._app = await vllm_compat.build_application(self._engine, args, self._keys)
            self._shape = vllm_compat.embedding_shape(self._engine)
            self._lifespan = self._app.router.lifespan_context(self._app)  # type: ignore[attr-defined]
            await self._lifespan.__aenter__()
            await self._warm_up(args.model)  # the first name that it serves under

    async def _warm_up(self, model: str) -> None:
        """Answers a request, so that the first client does not wait for what vLLM does at its first one."""
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        headers = [(b"content-type", b"application/json")]
        request = HttpRequest("POST", "/v1/chat/completions", b"", headers, json.dumps(body).encode())
        async for _ in asgi.call(self._app, request):
            pass

    async def check_health(self) -> None:
        """Raises when the engine is dead; Serve then replaces the replica."""
        await self._engine.check_health()

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()

    async def handle(
        self, request: HttpRequest, places: Sequence[ImagePlace], *images: EncodedImage | ImageRefused
    ) -> AsyncIterator[Accepted | ResponseHead | bytes]:
        """Answers one request: at once that it is here, then a ResponseHead, then body chunks.

        The head is held back until the first chunk, so that its Server-Timing tells the time to the first token.
        """
        arrived_at_s, arrived = time.time(), time.perf_counter()
        yield Accepted()
        try:
            tensors = self._checked(places, images)
        except ApiError as error:
            head, body = error_head_and_body(error)
            yield head
            yield body
            return
        clock = vllm_compat.FirstTokenClock()
        vllm_compat.first_token_clock.set(clock)
        for place, tokens, grid in tensors:
            self._keys.put(place.tokens_key, tokens)
            self._keys.put(place.grid_key, grid)
        start: vllm_compat.Message | None = None
        try:
            async with aclosing(asgi.call(self._app, request)) as messages:  # else it would be closed some time later
                async for message in messages:
                    if message["type"] == "http.response.start":
                        start = message
                        continue
                    if start is not None:
                        timing = server_timing(images, arrived_at_s, arrived, clock.first_token_at_s)
                        yield ResponseHead(start["status"], [*start["headers"], (b"server-timing", timing.encode())])
                        start = None
                    if message.get("body"):
                        yield message["body"]
        finally:
            self._keys.withdraw(key for place in places for key in (place.tokens_key, place.grid_key))

    def _checked(
        self, places: Sequence[ImagePlace], images: Sequence[EncodedImage | ImageRefused]
    ) -> list[tuple[ImagePlace, torch.Tensor, torch.Tensor]]:
        """Each place with its embedding `[num_tokens, width]` and its grid `[3]` int64.

        Raises:
            ApiError: 400 for an image that the encoder refused, 500 for an embedding that does not fit the model.
        """
        checked = []
        for place in places:
            image = images[place.image]
            if isinstance(image, ImageRefused):
                raise ApiError(400, f"{place.label}: {image.message}", param="messages", code="invalid_image")
            try:
                tokens = image.unpack(width=self._shape.width, merge_size=self._shape.merge_size)
            except WireError as error:
                logger.error("embedding refused: %s", error)
                raise ApiError(
                    500, f"{place.label}: its embedding does not fit the model", code="embedding_mismatch"
                ) from error
            checked.append((place, tokens, torch.tensor(image.grid_thw, dtype=torch.int64)))
        return checked
