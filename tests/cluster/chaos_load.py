"""Clients that ask about pictures without a pause, and what became of each request while replicas are killed."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
from PIL import Image

from encoder.checkpoint.video_rules import VideoRules
from encoder.encoder import Encoder
from encoder.images.decoded import Decoded
from encoder.video.bounds import VideoBounds
from encoder.video.decode import decode
from encoder.video.header import read_header
from encoder.video.plan import VideoPlan
from tests.cluster.served import START_S
from tests.hostile.files import chunk
from tests.video_files import Clip
from tests.waiting import until

SEED = 4
CLIENTS = 8
PICTURES, CLIPS = 160, 40
CLIP_FRAMES = 40
"""Five seconds, of which a model samples ten frames: two chunks."""
SIDES = (64, 96, 128)
STREAMED_SHARE = 0.5
STREAMED_EVENTS = 5

T = TypeVar("T")
Seen = tuple[list[int], list[float]]
"""Grid and some numbers of the embedding of a picture or clip."""


def picture(chance: np.random.Generator) -> bytes:
    width, height = chance.choice(SIDES, 2)
    small = Image.fromarray(chance.integers(0, 256, (4, 4, 3), np.uint8))
    file = io.BytesIO()
    small.resize((int(width), int(height))).save(file, "PNG")
    return file.getvalue()


def is_picture(file: bytes) -> bool:
    return file.startswith(b"\x89PNG")


def padded(file: bytes, num_bytes: int) -> bytes:
    """The same picture or clip in a file of about `num_bytes`: a private chunk before the last one, a free box."""
    free = max(0, num_bytes - len(file))
    if not is_picture(file):
        return file + struct.pack(">I4s", 8 + free, b"free") + bytes(free)
    end = chunk(b"IEND")
    assert file.endswith(end)
    return file.removesuffix(end) + chunk(b"paDd", bytes(free)) + end


def embedded(library: Encoder, checkpoint: Path, clip: bytes) -> Seen:
    """What an encoder makes of the clip as a whole: its grid, and the first number of each row."""
    rules = VideoRules.from_checkpoint(checkpoint, library.identity.vision.architecture, library.identity.rules)
    plan = VideoPlan.make(read_header(clip), rules, VideoBounds())
    frames = decode(clip, plan.frames.indices)
    assert len(plan.chunks) > 1
    [(_, [tokens])] = library.encode_batches([Decoded(frames, plan.grid)])
    return list(plan.grid), tokens[:, 0].tolist()


def same(found: Seen, expected: Seen) -> bool:
    return found[0] == expected[0] and bool(np.allclose(found[1], expected[1], rtol=1e-3, atol=1e-4))


def pictures_and_embeddings(checkpoint: Path) -> tuple[list[bytes], list[Seen]]:
    """Pictures and clips, and what their encoder makes of each."""
    chance = np.random.default_rng(SEED)
    files = [picture(chance) for _ in range(PICTURES)]
    library = Encoder.from_checkpoint(checkpoint)
    expected = [(list(made.grid_thw), made.tokens[0, :4].tolist()) for made in library.encode(files)]
    clips = [Clip(CLIP_FRAMES, Fraction(8), seed=SEED + number, block=16).encode() for number in range(CLIPS)]
    files, expected = files + clips, expected + [embedded(library, checkpoint, clip) for clip in clips]
    for number, one in enumerate(expected):
        assert not any(same(one, other) for other in expected[:number]), "pictures must be told apart"
    return files, expected


class Load:
    """Clients that ask again `pause_s` after each answer, about one to four of the pictures and clips, for a whole
    answer or a streamed one.

    A request fails where it gets no byte of an answer, or another status than 200. An answer that began and has no end
    is interrupted: only the client may ask again then.
    """

    def __init__(
        self,
        url: str,
        pictures: Sequence[bytes],
        expected: Sequence[Seen],
        *,
        body_bytes: int = 0,
        pause_s: float = 0.0,
    ) -> None:
        """`body_bytes`: about so large are the bodies at least, each a third of them, a third or all of it."""
        self._pause_s = pause_s
        self._url = f"{url}/v1/chat/completions"
        self._pictures, self._expected = pictures, expected
        self._body_bytes = (0,) if body_bytes == 0 else (0, body_bytes // 3, body_bytes)
        self.ended = False
        self.killed = "nothing"
        """What was killed last."""
        self.statuses: Counter[int] = Counter()
        self.failures: list[str] = []
        self.wrong: list[str] = []
        self.interrupted: Counter[str] = Counter()
        """Answers, by what was killed last."""
        self.last_bytes: list[str] = []
        """How interrupted answers ended."""
        self.images = 0
        self.times_s: list[float] = []
        self._began: dict[int, float] = {}
        """When each client's request began, while it is in flight."""

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=2 * START_S) as client:
            await asyncio.gather(*(self._ask_on(client, number) for number in range(CLIENTS)))

    async def wait_for_earlier(self) -> None:
        """Waits until every request has ended that is in flight now."""
        now = time.perf_counter()
        await asyncio.to_thread(
            until, lambda: all(began > now for began in [*self._began.values()]) or self.ended, "answers to requests"
        )

    async def _ask_on(self, client: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(SEED + number)
        while not self.ended:
            asked = [chance.randrange(len(self._pictures)) for _ in range(chance.randint(1, 4))]
            streamed, body_bytes = chance.random() < STREAMED_SHARE, chance.choice(self._body_bytes)
            self.images += len(asked)
            self._began[number] = time.perf_counter()
            await self._ask(client, asked, streamed=streamed, body_bytes=body_bytes)
            self.times_s.append(time.perf_counter() - self._began.pop(number))
            await asyncio.sleep(self._pause_s)

    async def _ask(self, client: httpx.AsyncClient, asked: Sequence[int], *, streamed: bool, body_bytes: int) -> None:
        file_bytes = body_bytes * 3 // 4 // len(asked)
        content = body([padded(self._pictures[number], file_bytes) for number in asked], streamed=streamed)
        what = f"{'streamed' if streamed else 'whole'}, {len(content)} bytes"
        began = False
        try:
            async with client.stream(
                "POST", self._url, content=content, headers={"content-type": "application/json"}
            ) as response:
                began = True
                text = (await response.aread()).decode()
        except httpx.HTTPError as error:
            if began:
                self.interrupted[self.killed] += 1
                self.last_bytes.append(f"{what}: {error!r}")
            else:
                self.failures.append(f"{what}, {self.killed} killed last: {error!r}")
            return
        self.statuses[response.status_code] += 1
        if response.status_code != 200:
            self.failures.append(f"{what}, {self.killed} killed last: {response.status_code} {text}")
        elif streamed and not text.endswith("data: [DONE]\n\n"):
            self.interrupted[self.killed] += 1
            self.last_bytes.append(f"{what}: {text[-300:]}")
        else:
            self._compare(asked, json.loads(text.partition("\n\n")[0].removeprefix("data: ") if streamed else text))

    def _compare(self, asked: Sequence[int], answer: dict[str, Any]) -> None:
        for number, image in zip(asked, answer["images"], strict=True):
            if not same((image["grid"], image["first"]), self._expected[number]):
                self.wrong.append(f"picture {number}: {image}, expected {self._expected[number]}")


def body(files: Sequence[bytes], *, streamed: bool) -> bytes:
    kinds = ["image" if is_picture(file) else "video" for file in files]
    urls = ["data:;base64," + base64.b64encode(file).decode() for file in files]
    parts = [{"type": f"{kind}_url", f"{kind}_url": {"url": url}} for kind, url in zip(kinds, urls, strict=True)]
    fields = {"stream": True, "max_tokens": STREAMED_EVENTS} if streamed else {}
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}], **fields}).encode()


async def under(load: Load, happens: Callable[[], Awaitable[T]]) -> T:
    """What `happens` gives, while clients ask, from a little before until a little after."""

    def answered() -> Callable[[], bool]:
        count = len(load.times_s) + 2 * CLIENTS
        return lambda: len(load.times_s) >= count or load.ended

    asking = asyncio.create_task(load.run())
    try:
        await asyncio.to_thread(until, answered(), "answers before")
        found = await happens()
        await asyncio.to_thread(until, answered(), "answers after")
        return found
    finally:
        load.ended = True
        await asking
