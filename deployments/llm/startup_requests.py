"""Requests to vLLM before the replica is ready: a warm-up, and a check that the engine loads embeddings."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable

import torch

from deployments.common.messages import (
    EncodedImage,
    EncodeTimings,
    HttpRequest,
    ItemReference,
    SharedEmbedding,
    new_key,
)
from deployments.llm import asgi_client
from deployments.llm.embedding_receiver import EmbeddingReceiver
from deployments.transfer.header import HEADER_BYTES
from deployments.transfer.same_host import ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from deployments.vllm.compat import AsgiApp
from encoder.item_header import ItemHeader

logger = logging.getLogger("ray.serve")

WARM_UP_OPTIONS: tuple[dict[str, object], ...] = (
    {},
    {"logprobs": True, "top_logprobs": 1, "temperature": 1.0, "top_p": 0.9, "top_k": 2, "min_p": 0.1},
    {"temperature": 1.0, "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "seed": 1},
    {"response_format": {"type": "json_object"}},
)
"""Options of the warm-up requests, in this order. Options that vLLM refuses from clients need no warm-up."""
MAX_TOKENS = 2
"""Tokens per warm-up answer: prefill produces the first, a decode step the second."""
CONNECT_TIMEOUT_S = 10.0
"""Timeout for the engine's processes to connect, which they begin before the engine is up."""
REPORT_TIMEOUT_S = 5.0
"""Timeout for the report of the probe's load, which comes by another way than its answer."""

Answer = Callable[[HttpRequest, ItemReference, ItemHeader, SharedEmbedding], Awaitable[int]]
"""Answers the request and returns the status."""


async def warm_up(app: AsgiApp, model: str) -> None:
    """Sends warm-up requests for `model`, a served model name, to vLLM's application `app`.

    At the first request with certain options vLLM loads or compiles code, which takes up to 15 s and blocks its engine;
    no client should wait for that.
    """
    for options in WARM_UP_OPTIONS:
        async for message in asgi_client.call(app, _request(model, "Hi", max_tokens=MAX_TOKENS, **options)):
            if message["type"] == "http.response.start" and message["status"] != 200:
                logger.info("vLLM refuses the warm-up request with %s: status %d", options, message["status"])


class EngineLoadError(RuntimeError):
    """The engine does not load embeddings, so that no image could be answered."""


async def probe_engine_loads(
    receiver: EmbeddingReceiver, answer: Answer, model: str, header: ItemHeader, width: int
) -> None:
    """Checks that the engine loads an embedding of `width` columns, that of `header`. Raises EngineLoadError."""
    if not receiver.link.wait_for_engine(timeout_s=CONNECT_TIMEOUT_S):
        raise EngineLoadError("the engine's processes have not connected")
    store = EmbeddingStore(HEADER_BYTES + 4 * width * header.num_embeds)
    server = ShmServer(store)
    try:
        tokens = store.allocate(header.num_embeds, width, torch.float32)
        assert tokens is not None
        tokens.zero_()
        timings = EncodeTimings(0.0, 0.0, 0.0, time.time(), cached=False)
        image = EncodedImage.pack(tokens, header.digest, timings)
        store.offer(image)
        reference = ItemReference(new_key(), 0, "the probe")
        kind = f"{header.modality}_url" if header.modality in ("audio", "video") else "image_url"
        content = [{"type": kind, kind: {"url": reference.key}}, {"type": "text", "text": "Hi"}]
        before = receiver.num_loaded
        request = _request(model, content, max_tokens=1)
        status = await answer(request, reference, header, image.to_shared(server.address))
        end_s = time.monotonic() + REPORT_TIMEOUT_S
        while status == 200 and receiver.num_loaded == before and time.monotonic() < end_s:  # noqa: ASYNC110 - a thread
            await asyncio.sleep(0.01)
        if status != 200 or receiver.num_loaded == before:
            num_loaded = receiver.num_loaded - before
            raise EngineLoadError(f"a probe was answered with {status}, {num_loaded} embeddings were loaded")
    finally:
        server.close()


def _request(model: str, content: object, **options: object) -> HttpRequest:
    body = {"model": model, "messages": [{"role": "user", "content": content}], **options}
    headers = [(b"content-type", b"application/json")]
    return HttpRequest("POST", "/v1/chat/completions", b"", headers, json.dumps(body).encode())
