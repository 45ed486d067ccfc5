"""Encoders are killed one after the other while clients ask: no request fails, and each answer is of its own images.

Three encoders, of which one that works is killed with signal 9 every 5 s whenever at least two are running. They keep
no cache, so that every image is encoded. The language model is a stand-in that answers with what it was given. Some 20
seconds of it are part of `make test`; `make chaos` gives it `--chaos-seconds` of 5 minutes.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import numpy as np
import pytest
from PIL import Image
from ray.exceptions import RayActorError

from encoder.encoder import Encoder
from tests.unit.deployments.conftest import START_S, Cluster, ServedApp, deploy, until
from tests.unit.deployments.test_served_images import chat

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]

SEED = 4
ENCODERS = 3
CLIENTS = 8
PICTURES = 200
KILL_EVERY_S = 5.0
SIDES = (64, 96, 128)

T = TypeVar("T")
Seen = tuple[list[int], list[float]]
"""An image's grid and the first numbers of its embedding."""


def picture(chance: np.random.Generator) -> bytes:
    width, height = chance.choice(SIDES, 2)
    small = Image.fromarray(chance.integers(0, 256, (4, 4, 3), np.uint8))
    file = io.BytesIO()
    small.resize((int(width), int(height))).save(file, "PNG")
    return file.getvalue()


class Load:
    """Clients that ask again as soon as they have an answer, about one to four of the pictures."""

    def __init__(self, url: str, pictures: list[bytes], expected: list[Seen]) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._pictures, self._expected = pictures, expected
        self.ended = False
        self.statuses: Counter[int] = Counter()
        self.failures: list[str] = []
        self.wrong: list[str] = []
        self.images = 0
        self.times_s: list[float] = []

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=2 * START_S) as client:
            await asyncio.gather(*(self._ask_on(client, random.Random(SEED + number)) for number in range(CLIENTS)))

    async def _ask_on(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        while not self.ended:
            asked = [chance.randrange(PICTURES) for _ in range(chance.randint(1, 4))]
            began = time.perf_counter()
            response = await client.post(self._url, json=chat(*(self._pictures[number] for number in asked)))
            self.times_s.append(time.perf_counter() - began)
            self.statuses[response.status_code] += 1
            self.images += len(asked)
            if response.status_code != 200:
                self.failures.append(f"{response.status_code}: {response.text}")
                continue
            for number, image in zip(asked, response.json()["images"], strict=True):
                if not same((image["grid"], image["first"]), self._expected[number]):
                    self.wrong.append(f"picture {number}: {image}, expected {self._expected[number]}")


def same(found: Seen, expected: Seen) -> bool:
    return found[0] == expected[0] and bool(np.allclose(found[1], expected[1], rtol=1e-3, atol=1e-4))


async def kill_encoders(app: ServedApp, seconds: float) -> int:
    """Until the time is over; how many were killed."""
    chance, killed = random.Random(SEED), 0
    ends = time.monotonic() + seconds
    while (began := time.monotonic()) < ends:
        pids = await asyncio.to_thread(running, app)
        if len(pids) >= 2:
            os.kill(chance.choice(sorted(pids)), signal.SIGKILL)
            killed += 1
        await asyncio.sleep(max(0.0, began + KILL_EVERY_S - time.monotonic()))
    return killed


def running(app: ServedApp) -> list[int]:
    try:
        return [state["pid"] for state in app.encoders("state")]
    except RayActorError:  # the call has found out that one is dead
        return []


@pytest.fixture(scope="module")
def seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--chaos-seconds"))


def deployed(cluster: Cluster, checkpoints: dict[str, Path], **changes: int) -> ServedApp:
    settings = {"encoders": ENCODERS, "cache_bytes": 0, "max_queued_tokens": 10_000} | changes
    return deploy(cluster, checkpoints["qwen3_vl"], "chaos", drain_s=START_S, **settings)


@pytest.fixture(scope="module")
def chaotic(cluster: Cluster, checkpoints: dict[str, Path]) -> Iterator[ServedApp]:
    from ray import serve

    yield deployed(cluster, checkpoints)
    serve.delete("chaos")


def pictures_and_embeddings(checkpoint: Path) -> tuple[list[bytes], list[Seen]]:
    """The pictures, and what their encoder makes of each."""
    chance = np.random.default_rng(SEED)
    files = [picture(chance) for _ in range(PICTURES)]
    library = Encoder.from_checkpoint(checkpoint)
    expected = [(list(made.grid_thw), made.tokens[0, :4].tolist()) for made in library.encode(files)]
    for number, one in enumerate(expected):
        assert not any(same(one, other) for other in expected[:number]), "pictures must be told apart"
    return files, expected


@pytest.fixture(scope="module")
def pictures(checkpoints: dict[str, Path]) -> tuple[list[bytes], list[Seen]]:
    return pictures_and_embeddings(checkpoints["qwen3_vl"])


@pytest.fixture
def load(chaotic: ServedApp, pictures: tuple[list[bytes], list[Seen]]) -> Load:
    return Load(chaotic.url, *pictures)


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


def all_right(load: Load) -> None:
    assert load.statuses[200] > 0
    assert load.failures == []
    assert load.wrong == []


def test_killed_encoders_cost_no_request(chaotic: ServedApp, load: Load, seconds: float) -> None:
    killed = asyncio.run(under(load, lambda: kill_encoders(chaotic, seconds)))
    counts = chaotic.ingress("counts")
    print(
        json.dumps(
            {
                "seconds": seconds,
                "killed": killed,
                "requests": sum(load.statuses.values()),
                "images": load.images,
                "failed": len(load.failures),
                "wrong": len(load.wrong),
                "tried_again": counts["TRIES_AGAIN"],
                "s_p50": round(float(np.percentile(load.times_s, 50)), 3),
                "s_p99": round(float(np.percentile(load.times_s, 99)), 3),
                "s_max": round(max(load.times_s), 3),
            }
        )
    )
    assert killed >= 1
    all_right(load)
    until(lambda: len(running(chaotic)) == ENCODERS, "all encoders again")


def test_an_update_and_fewer_replicas_cost_no_request(
    chaotic: ServedApp, load: Load, cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    """New settings exchange every replica, one encoder fewer; then they are taken back, with one fewer again."""
    seen = set(running(chaotic))

    async def updates() -> None:
        for changes in ({"max_queued_tokens": 20_000, "encoders": 2}, {"encoders": 1}):
            await asyncio.to_thread(deployed, cluster, checkpoints, **changes)
            now = await asyncio.to_thread(until, lambda: running(chaotic), "running encoders")
            assert not seen & set(now)
            seen.update(now)

    asyncio.run(under(load, updates))
    all_right(load)
    until(lambda: len(running(chaotic)) == 1, "one encoder")
