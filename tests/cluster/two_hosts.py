"""Two hosts, with an encoder and a language model on each: where images are encoded, and how embeddings come.

A program, since the Ray of the other tests has one node. `test_two_hosts.py` runs it; the last line that it prints is
JSON. The hosts are nodes on one machine that do not read each other's shared memory (`controlled.py`).
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
from ray.exceptions import RayActorError

from tests.cluster.served import START_S, ServedApp, deploy
from tests.cluster.test_served_images import chat
from tests.cluster.two_nodes import OTHERS, two_nodes
from tests.unit.deployments.samples import png
from tests.waiting import until

REQUESTS = 2000
CONCURRENT = 16
IMAGES = 400
LOST_REQUESTS = 32


def body(number: int, image: int, kind: int) -> dict[str, Any]:
    """A conversation of its own with one image."""
    asked = chat(png(64, 64, (image % 256, image // 256, kind)))
    asked["messages"].insert(0, {"role": "system", "content": f"This is conversation {kind}/{number}."})
    return asked


async def ask(app: ServedApp, bodies: list[dict[str, Any]], concurrent: int = CONCURRENT) -> dict[int, int]:
    """How many answers had each status."""
    statuses: collections.Counter[int] = collections.Counter()
    places = asyncio.Semaphore(concurrent)
    async with httpx.AsyncClient(timeout=START_S, limits=httpx.Limits(max_connections=concurrent)) as client:

        async def one(asked: dict[str, Any]) -> None:
            async with places:
                statuses[(await client.post(f"{app.url}/v1/chat/completions", json=asked)).status_code] += 1

        await asyncio.gather(*map(one, bodies))
    return dict(statuses)


def both(app: ServedApp) -> list[dict[str, Any]]:
    """The states of both language models; waits while there are not two."""

    def states() -> list[dict[str, Any]] | None:
        try:
            found = app.llms("state")
        except RayActorError:
            return None
        return found if len(found) == 2 else None

    found: list[dict[str, Any]] = until(states, "two language models")
    return found


def encoded(app: ServedApp) -> int:
    return sum(state["encoded"] for state in app.encoders("state"))


def placed(app: ServedApp) -> dict[str, Any]:
    statuses = asyncio.run(ask(app, [body(number, number % IMAGES, 1) for number in range(REQUESTS)]))
    states = both(app)
    received: collections.Counter[str] = collections.Counter()
    for state in states:
        received.update(state["received"])
    return {
        "statuses": statuses,
        "received": received,
        "called": sum(state["calls"] for state in states),
        "called_as_chosen": sum(state["called_as_chosen"] for state in states),
        "hosts": len({state["host"] for state in [*states, *app.encoders("state")]}),
        "encoded": [state["encoded"] for state in app.encoders("state")],
    }


def lost_at_once(app: ServedApp) -> dict[str, Any]:
    """A language model is killed, and requests come before anybody knows: some choose it."""
    before, doomed = encoded(app), both(app)[0]["pid"]
    os.kill(doomed, signal.SIGKILL)
    bodies = [body(number, number, 2) for number in range(LOST_REQUESTS)]
    statuses = asyncio.run(ask(app, bodies, LOST_REQUESTS))
    until(lambda: doomed not in {state["pid"] for state in both(app)}, "another language model")
    return {"statuses": statuses, "encoded": encoded(app) - before}


def lost_while_encoding(app: ServedApp) -> dict[str, Any]:
    """A language model is killed that waits for encoders."""
    before, doomed = encoded(app), both(app)[0]["pid"]
    app.encoders("hold")
    waiting = sum(state["flights"] for state in app.encoders("state"))

    async def scenario() -> dict[int, int]:
        bodies = [body(number, number, 3) for number in range(LOST_REQUESTS)]
        answers = asyncio.create_task(ask(app, bodies, LOST_REQUESTS))

        def all_there() -> bool:
            return sum(state["flights"] for state in app.encoders("state")) == waiting + LOST_REQUESTS

        await asyncio.to_thread(until, all_there, "all images at the encoders")
        await asyncio.to_thread(until, lambda: in_flight(app) >= 1, "requests at the language models")
        os.kill(doomed, signal.SIGKILL)
        await asyncio.sleep(1.0)  # for what follows the loss to reach the encoders
        await asyncio.to_thread(app.encoders, "release")
        return await answers

    statuses = asyncio.run(scenario())
    return {"statuses": statuses, "encoded": encoded(app) - before}


def in_flight(app: ServedApp) -> int:
    return min(state["keys"] for state in both(app))


def main(checkpoint: Path) -> dict[str, Any]:
    with two_nodes() as (_, _, cluster):
        app = deploy(cluster, checkpoint, "hosts", encoders=2, llms=2, others_on=OTHERS, max_queued_tokens=10_000)
        return {"placed": placed(app), "at_once": lost_at_once(app), "while_encoding": lost_while_encoding(app)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
