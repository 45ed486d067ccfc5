"""An ingress, an encoder and a language model with a real vLLM are killed in turn, behind HAProxy, while clients ask.

`tests/cluster/test_chaos.py` kills more of them, with a stand-in for vLLM, which takes a minute or two to
start on two cores.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.application import ServedApplication, configuration
from tests.serve.asking import ask
from tests.serve.soak import KNOWN, Traffic, known_body

NAME = "qwen3"
KINDS = ("Ingress", "Encoder", "LLM")
CLIENTS = 6
REPLACED_S = 600.0

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(3600)]


@pytest.fixture
def served(checkpoints: dict[str, Path], tmp_path: Path) -> Iterator[ServedApplication]:
    """Two replicas of each kind."""
    settings = configuration(checkpoints)
    application = next(found for found in settings["applications"] if found["name"] == NAME)
    application["deployments"] = [{"name": kind, "num_replicas": 2} for kind in KINDS]
    settings["applications"] = [application]
    with ServedApplication(settings, folder=tmp_path, haproxy=True) as served:
        yield served


def working(served: ServedApplication, kind: str) -> set[str]:
    """Replicas that have answered a call, by their identifiers in their logs."""
    return set(re.findall(rf" {NAME}_{kind} (\w+) \S+ -- .* (?:OK|200) ", served.log_file(NAME, kind)))


def began(wrong: str) -> bool:
    """Whether a client had some of its answer when that broke off."""
    return wrong.startswith("a stream without its end") or "without sending complete message body" in wrong


def test_killed_replicas_cost_no_request_that_had_no_byte(served: ServedApplication) -> None:
    url = served.base_url(NAME)
    known = [ask(url, known_body(number))["choices"][0]["token_ids"] for number in range(KNOWN)]
    traffic = Traffic(url, known=known, web_url=None, seed=0)

    async def scenario() -> None:
        asking = asyncio.create_task(traffic.run(86_400, good=CLIENTS, bad=0, raw=0))
        async with asyncio.timeout(REPLACED_S):
            for kind in KINDS:
                while len(before := working(served, kind)) < 2:  # noqa: ASYNC110 - a log tells it
                    await asyncio.sleep(1)
                (await asyncio.to_thread(served.replicas, NAME, kind))[0].kill()
                while working(served, kind) <= before:  # noqa: ASYNC110
                    await asyncio.sleep(1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(scenario())
    tally = traffic.tally
    print(json.dumps({"answered": dict(tally.answered), "asked_again": tally.asked_again, "wrong": tally.wrong}))
    assert tally.answered.total() > 0
    assert [wrong for wrong in tally.wrong if not began(wrong)] == []
    assert len(tally.wrong) <= CLIENTS * len(KINDS)
