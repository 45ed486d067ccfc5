"""Whether an engine really loads embeddings by itself: tried once at the start, with an embedding of one token.

It must not know of vLLM; the request is an ordinary one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable

import torch

from deployments.embedding_header import HEADER_BYTES
from deployments.embedding_shelf import EmbeddingShelf
from deployments.incoming import Incoming
from deployments.lending import Lender
from deployments.media_keys import new_key
from deployments.vllm_compat import EmbeddingShape
from deployments.wire import EncodedImage, EncodeTimings, HttpRequest, ImagePlace, SharedEmbedding

CONNECT_S = 10.0
"""For processes of the engine to call: they did so before the engine was up, and may not have been heard yet."""

Answer = Callable[[HttpRequest, ImagePlace, SharedEmbedding], Awaitable[int]]
"""Answers the request and gives its status."""


async def loads_by_itself(incoming: Incoming, answer: Answer, model: str, shape: EmbeddingShape) -> str | None:
    """None where the engine loaded what only it could load; else why embeddings go with the requests from now on."""
    if not incoming.engine_started(timeout_s=CONNECT_S):
        return "the engine's processes have not called"
    grid = (1, shape.merge_size, shape.merge_size)
    shelf = EmbeddingShelf(HEADER_BYTES + 4 * shape.width)
    lender = Lender(shelf)
    try:
        tokens = shelf.room(1, shape.width, torch.float32)
        assert tokens is not None
        tokens.zero_()
        timings = EncodeTimings(0.0, 0.0, 0.0, time.time(), cached=False)
        image = EncodedImage.pack(tokens, grid, hashlib.sha256(b"trial").hexdigest(), timings)
        shelf.offer(image)
        place = ImagePlace(new_key(), new_key(), 0, "the trial")
        before = incoming.num_loaded
        status = await answer(_request(model, place, image.digest), place, image.lent_by(lender.address))
        if status == 200 and incoming.num_loaded > before:
            return None
        incoming.engine_fails()
        return f"a trial request was answered with {status}, {incoming.num_loaded - before} embeddings were loaded"
    finally:
        lender.close()


def _request(model: str, place: ImagePlace, digest: str) -> HttpRequest:
    keys = {"image_embeds": place.tokens_key, "image_grid_thw": place.grid_key}
    content = [{"type": "image_embeds", "image_embeds": keys, "uuid": digest}, {"type": "text", "text": "Hi"}]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    headers = [(b"content-type", b"application/json")]
    return HttpRequest("POST", "/v1/chat/completions", b"", headers, json.dumps(body).encode())
