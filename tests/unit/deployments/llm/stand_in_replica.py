"""A language model replica around a stand-in for vLLM, and requests to it."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
from collections.abc import Coroutine, Sequence
from typing import Any

import torch

from configs.schema import AppConfig
from deployments.common.messages import (
    Accepted,
    EncodedImage,
    EncodeTimings,
    HttpRequest,
    ItemReference,
    ResponseHead,
    SharedEmbedding,
    new_key,
)
from deployments.transfer.same_host import ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from encoder.item_header import ItemHeader, PromptRun, PromptUpdate
from tests.cluster.stand_in_llm import StandInLLM
from tests.unit.deployments.samples import at_once

WIDTH = 6
TIMINGS = EncodeTimings(1.0, 2.0, 3.0, 4.0, cached=False)


def replica() -> StandInLLM:
    return StandInLLM(AppConfig(), WIDTH)


def digest(value: float) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()


@functools.cache
def encoder() -> tuple[EmbeddingStore, ShmServer]:
    """What an encoder on this host has, and its server."""
    store = EmbeddingStore(2**24)
    return store, ShmServer(store)


def encoded(value: float = 1.0, width: int = WIDTH, rows: int = 6) -> SharedEmbedding:
    """An encoder's answer, for one reader."""
    store, server = encoder()
    room = store.allocate(rows, width, torch.float32)
    assert room is not None
    image = EncodedImage.pack(room.fill_(value), digest(value), TIMINGS)
    store.offer(image)
    return image.to_shared(server.address)


def header(value: float = 1.0, grid: tuple[int, int, int] = (1, 4, 6)) -> ItemHeader:
    """Of `encoded`."""
    update = PromptUpdate("replace", (7,), (PromptRun(7, 6, True),))
    return ItemHeader(digest(value), "image", 6, (update,), grid)


HEADERS = [header()]


def place(item: int, label: str = "image 1 of 1") -> ItemReference:
    return ItemReference(new_key(), item, label)


def request(*places: ItemReference, roles: Sequence[str] = (), **fields: object) -> HttpRequest:
    """All images in one message of a user, or each in one of its role."""
    parts = [{"type": "image_url", "image_url": {"url": place.key}} for place in places]
    messages = [{"role": role, "content": [part]} for role, part in zip(roles, parts, strict=bool(roles))]
    body = {"messages": messages or [{"role": "user", "content": parts}], **fields}
    headers = [(b"content-type", b"application/json")]
    return HttpRequest("POST", "/v1/chat/completions", b"", headers, json.dumps(body).encode())


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def answered(
    llm: StandInLLM,
    places: list[ItemReference],
    images: list[Any],
    headers: Sequence[ItemHeader | None] | None = None,
    **asked: Any,
) -> tuple[ResponseHead, Any]:
    """`headers`: by default those of embeddings of 1.0, 2.0 and so on."""
    headers = headers or [header(float(1 + number)) for number in range(len(images))]

    async def ask() -> list[Any]:
        return [piece async for piece in llm.handle(request(*places, **asked), places, headers, at_once(*images))]

    accepted, head, *chunks = asyncio.run(ask())
    assert isinstance(accepted, Accepted)
    return head, json.loads(b"".join([head.body, *chunks]))
