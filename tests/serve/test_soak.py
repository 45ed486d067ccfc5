"""Good and bad traffic at once, at full load: nothing is lost that should be answered, and nothing piles up.

Some 20 seconds of it go to the application of the other tests. `make soak` gives `--soak-seconds` of 30 minutes to one
of its own behind HAProxy, with caches so small that they are full before its second quarter: what grows then is a leak.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.serve.application import ServedApplication, configuration
from tests.serve.asking import TIMEOUT_S, ask, metric
from tests.serve.conversations import chat
from tests.serve.loopback import LoopbackServer
from tests.serve.pictures import encoded, picture
from tests.serve.soak import KNOWN, Sample, Traffic, growth, known_body, sampled, series
from tests.waiting import until

pytestmark = pytest.mark.slow

CLIENTS = {"good": 10, "bad": 3, "raw": 3}
LONG_S = 300
SAMPLES = 120
MAX_IMAGE_BYTES = 2_000_000
MORE_FILES = 8
# vLLM's CPU backend keeps what it compiles for each shape of a batch, up to a bound that 30 minutes do not reach.
ENGINE, MORE_ENGINE_BYTES = "VLLM::EngineCore", 250_000_000
"""Connections that happen to be open, one way or the other."""


@pytest.fixture(scope="module")
def seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--soak-seconds"))


@pytest.fixture(scope="module")
def soaked(
    seconds: float, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedApplication]:
    """What is soaked: the shared application for a short run, one with small caches for a long one."""
    if seconds < LONG_S:
        yield request.getfixturevalue("application")
        return
    settings = configuration(request.getfixturevalue("checkpoints"))
    application = next(found for found in settings["applications"] if found["name"] == "qwen3")
    application["args"]["encoder_replica"]["cache_bytes"] = 4_000_000
    fetch = {"http": True, "allow_private_addresses": True, "timeout_s": 1.0}
    # The directory is full after a minute: with its default size it would fill for an hour, like a leak.
    ingress = {"fetch": fetch, "max_image_bytes": MAX_IMAGE_BYTES, "embedding_directory_entries": 1000}
    application["args"]["ingress"] |= ingress
    settings["applications"] = [application]
    with ServedApplication(settings, folder=tmp_path_factory.mktemp("soak"), haproxy=True) as served:
        yield served


@pytest.fixture
def web(seconds: float) -> Iterator[LoopbackServer | None]:
    """A web server of bad answers, where the application may fetch."""
    if seconds < LONG_S:
        yield None
        return
    file = encoded(picture(1, 97, 61))
    with LoopbackServer(file, file + bytes(MAX_IMAGE_BYTES)).serving() as server:
        yield server


def test_mixed_traffic(soaked: ServedApplication, seconds: float, web: LoopbackServer | None) -> None:
    url = soaked.base_url("qwen3")
    known = [ask(url, known_body(number))["choices"][0]["token_ids"] for number in range(KNOWN)]
    traffic = Traffic(url, known=known, web_url=None if web is None else web.url, seed=0)
    samples: list[dict[tuple[int, str], Sample]] = []

    async def scenario() -> None:
        running = asyncio.create_task(traffic.run(seconds, **CLIENTS))
        while not running.done():
            samples.append(await asyncio.to_thread(sampled, soaked.pid))
            await asyncio.wait([running], timeout=max(1.0, seconds / SAMPLES))
        await running

    started = time.monotonic()
    asyncio.run(scenario())
    until(lambda: _nothing_runs(url))
    tally, grown = traffic.tally, growth(samples)
    print(
        json.dumps(
            {
                "seconds": round(time.monotonic() - started),
                "answered": dict(tally.answered),
                "refused": dict(tally.refused),
                "asked_again": tally.asked_again,
                "wrong": tally.wrong,
                "grown": [[found.role, found.own_bytes, found.files, found.threads] for found in grown],
                "own_bytes_of": {found.role: series(samples, found.role) for found in grown[:5]},
                "own_bytes": [sum(sample.own_bytes for sample in held.values()) for held in samples],
            }
        )
    )
    assert tally.wrong == []
    assert tally.answered.total() > seconds / 2
    assert len(tally.answered) == 7
    assert tally.refused.total() > seconds / 2
    assert ask(url, chat({"role": "user", "content": "Hello!"}))["choices"]
    assert httpx.get(url + "/health", timeout=TIMEOUT_S).status_code == 200
    most = max_growth_bytes(seconds)
    assert [found for found in grown if found.files > MORE_FILES] == []
    assert [found for found in grown if found.own_bytes > (MORE_ENGINE_BYTES if found.role == ENGINE else most)] == []


def _nothing_runs(url: str) -> bool:
    """Asks a short question first: the engine tells its counters when it takes a step."""
    ask(url, chat({"role": "user", "content": "Hi"}, max_tokens=2))
    return metric(url, "vllm:num_requests_running") == 0


def max_growth_bytes(seconds: float) -> int:
    """Of a process between the second and the last quarter. A short run still fills caches and allocators."""
    return 100_000_000 if seconds < LONG_S else 15_000_000


def test_growth_is_seen() -> None:
    """A process that keeps 3 MB and a file more at every look, beside one that keeps nothing and one that goes."""
    held = [
        {(1, "leaks"): Sample(number * 3_000_000, number, 5), (2, "keeps"): Sample(10**8 - number % 2, 9, 5)}
        | ({(3, "goes"): Sample(1, 1, 1)} if number < 8 else {})
        for number in range(16)
    ]
    first, second = growth(held)
    assert (first.role, second.role) == ("leaks", "keeps")
    assert (first.own_bytes, first.files) == (8 * 3_000_000, 8)
    assert (second.own_bytes, second.files) in ((0, 0), (1, 0), (-1, 0))
