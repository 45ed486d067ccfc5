"""A language model replica in this process, whose encoders are the test's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from deployments.common.messages import (
    Accepted,
    EncodedImage,
    EncodeTimings,
    HttpRequest,
    ImageRefused,
    ItemReference,
    ResponseHead,
    SharedEmbedding,
    new_key,
)
from deployments.llm.deployment import LLM
from deployments.telemetry.metrics import Counter
from deployments.transfer.same_host import ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.tcp_server import TcpServer
from encoder.item_header import ChunkHeader, ItemHeader, PromptRun, PromptUpdate, VideoFields
from tests.unit.deployments.llm.receivers import FreeAdded, eventually

PATIENCE_S = 120.0
LOOK_S = 0.3
"""For what must not happen."""
SIDES = ((8, 8), (12, 8), (8, 16))
"""Of the images' grids, in patches."""
TOLERANCE = 1e-3
"""Of a log-probability: a prompt that is read in parts is added up in another order."""

Coming = asyncio.Future[SharedEmbedding | ImageRefused]


@dataclass
class Replica:
    llm: LLM
    counts: FreeAdded
    store: EmbeddingStore
    server: ShmServer
    tcp: TcpServer
    width: int
    merge: int
    token: int
    """Of an image in a prompt."""
    loop: asyncio.AbstractEventLoop
    num_compiled: int
    """What torch had compiled in the engine when the replica was ready."""
    num_made: int = 0

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        self.counts.added.clear()
        self.loop.run_until_complete(asyncio.wait_for(scenario, PATIENCE_S))

    def images(self) -> list[EncodedImage]:
        """New ones of SIDES, in the encoder's memory."""
        made = []
        for h, w in SIDES:
            self.num_made += 1
            rows = h * w // self.merge**2
            tokens = self.store.allocate(rows, self.width, torch.float32)
            assert tokens is not None
            tokens.copy_(torch.randn(rows, self.width, generator=torch.Generator().manual_seed(self.num_made)))
            timings = EncodeTimings(1.0, 2.0, 3.0, time.time(), cached=False)
            made.append(EncodedImage.pack(tokens, f"{self.num_made:064x}", timings))
            assert self.store.offer(made[-1])
        return made

    def lent(self, image: EncodedImage, *, far: bool = False) -> SharedEmbedding:
        """`far`: by an encoder on another host."""
        return image.to_shared("far/encoder" if far else self.server.address, self.tcp.address)

    def header(self, image: EncodedImage) -> ItemHeader:
        (grid,) = ((1, h, w) for h, w in SIDES if h * w == image.shape[0] * self.merge**2)
        update = PromptUpdate("replace", (self.token,), (PromptRun(self.token, image.shape[0], True),))
        return ItemHeader(image.digest, "image", image.shape[0], (update,), grid)

    def request(self, images: list[EncodedImage], **fields: object) -> tuple[HttpRequest, list[ItemReference]]:
        references = [ItemReference(new_key(), n, f"image {n}") for n in range(len(images))]
        content: list[object] = []
        for reference in references:
            content += [
                {"type": "text", "text": "And this one?"},
                {"type": "image_url", "image_url": {"url": reference.key}},
            ]
        return self.post(content, **fields), references

    def post(self, content: list[object], **fields: object) -> HttpRequest:
        """With a salt of its own, by which it finds nothing in the prefix cache."""
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
            "temperature": 0,
            "logprobs": True,
            "cache_salt": new_key(),
            **fields,
        }
        headers = [(b"content-type", b"application/json")]
        return HttpRequest("POST", "/v1/chat/completions", b"", headers, json.dumps(body).encode())

    async def told(
        self, images: list[EncodedImage], encodings: Sequence[Awaitable[Any] | SharedEmbedding], **fields: object
    ) -> list[object]:
        request, references = self.request(images, **fields)
        headers = [self.header(image) for image in images]
        return [piece async for piece in self.llm.handle(request, references, headers, encodings)]

    def asked(self, images: list[EncodedImage], **fields: object) -> tuple[list[Coming], asyncio.Task[list[object]]]:
        """What encoders are to answer, and what is told."""
        futures = coming(self.loop, len(images))
        return futures, asyncio.ensure_future(self.told(images, list(futures), **fields))

    async def begun(self) -> tuple[list[EncodedImage], list[Coming], asyncio.Task[list[object]]]:
        """A request whose first image vLLM has, and whose others are on their way."""
        images, before = self.images(), self.num_loaded
        futures, answer = self.asked(images)
        futures[0].set_result(self.lent(images[0]))
        await eventually(lambda: self.num_loaded > before)
        return images, futures, answer

    def video(self, grid: tuple[int, int, int], chunks: tuple[int, ...]) -> tuple[ItemHeader, list[EncodedImage]]:
        """A new video and its embeddings. `chunks`: temporal patches of each chunk."""
        self.num_made += 1
        t, h, w = grid
        each = h * w // self.merge**2
        fields = VideoFields(grid, tuple(0.5 * number for number in range(t)))
        rows = tuple(each * number for number in chunks)
        header = ItemHeader(f"{self.num_made:064x}", "video", t * each, (), fields, rows)
        values = torch.randn(t * each, self.width, generator=torch.Generator().manual_seed(self.num_made))
        return header, self.parts(header, values)

    def parts(self, header: ItemHeader, values: torch.Tensor) -> list[EncodedImage]:
        """The embeddings of an item with these rows, in the encoder's memory."""
        made = []
        for part, rows in zip(header.embeddings, values.split(header.chunks or [header.num_embeds]), strict=True):
            tokens = self.store.allocate(part.num_embeds, self.width, torch.float32)
            assert tokens is not None
            tokens.copy_(rows)
            timings = EncodeTimings(1.0, 2.0, 3.0, time.time(), cached=False)
            made.append(EncodedImage.pack(tokens, part.digest, timings))
            assert self.store.offer(made[-1])
        return made

    async def told_of_video(self, header: ItemHeader, encodings: Sequence[Any]) -> list[object]:
        reference = ItemReference(new_key(), 0, "video 1", "video")
        request = self.post([{"type": "video_url", "video_url": {"url": reference.key}}, {"type": "text", "text": "?"}])
        headers: list[ItemHeader | ChunkHeader | None] = [header, *header.embeddings[1:]]
        return [piece async for piece in self.llm.handle(request, [reference], headers, encodings)]

    @property
    def num_loaded(self) -> int:
        return self.llm._receiver.num_loaded

    def nothing_is_left(self) -> bool:
        return (
            len(self.llm._receiver._granted) == len(self.llm._frontend.references._digests) == 0
            and self.llm._requests.num_early_prefills == self.llm._requests.num_in_flight == 0
        )

    def in_vain(self) -> dict[str | None, int]:
        return {why: number for (which, why), number in self.counts.added.items() if which is IN_VAIN}


IN_VAIN = Counter.EARLY_PREFILLS_ABORTED


async def compiled(llm: LLM) -> int:
    engine: Any = llm._engine
    (number,) = await engine.collective_rpc("num_compiled")
    return int(number)


def coming(loop: asyncio.AbstractEventLoop, number: int) -> list[Coming]:
    return [loop.create_future() for _ in range(number)]


def answered(pieces: Sequence[object]) -> tuple[int, list[tuple[str, float]]]:
    """The status, and each token with its log-probability."""
    accepted, head, *chunks = pieces
    assert isinstance(accepted, Accepted)
    assert isinstance(head, ResponseHead)
    body = json.loads(head.body + b"".join(chunk for chunk in chunks if isinstance(chunk, bytes)))
    tokens = body["choices"][0]["logprobs"]["content"] if head.status == 200 else []
    return head.status, [(each["token"], each["logprob"]) for each in tokens]


async def at_once(replica: Replica, images: list[EncodedImage]) -> list[tuple[str, float]]:
    """The answer without anything of this: the embeddings are there before the request."""
    status, tokens = answered(await replica.told(images, [replica.lent(image) for image in images]))
    assert status == 200
    return tokens


def same(tokens: list[tuple[str, float]], expected: list[tuple[str, float]]) -> None:
    assert [token for token, _ in tokens] == [token for token, _ in expected]
    assert [value for _, value in tokens] == pytest.approx([value for _, value in expected], abs=TOLERANCE)
