"""Two nodes, a language model on each; one falls silent with answers under way: its processes are stopped, not ended,
so that its connections stay open and nothing comes over them. More is asked at once, before Ray can know. All of it
with affinity and without.

A program, since the Ray of the other tests has one node. `test_two_nodes.py` runs it; the last line that it prints is
JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.cluster.served import START_S, ServedApp, deploy
from tests.cluster.two_nodes import OTHERS, two_nodes

STREAMS = 6
PROBE_FANOUT = 8
"""More, of which each goes to one of the two."""
SILENT_S = 60.0
"""For the answers of the silent node, at most."""


class Streams:
    """Answers without an end, by their number: when each broke off, and with what."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._begun = 0
        self.all_begun = asyncio.Event()
        self.one_ended = asyncio.Event()
        self.ended: dict[int, tuple[float, str]] = {}

    async def one(self, client: httpx.AsyncClient, number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"Hello {number}"}], "stream": True}
        last = ""
        async with client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
            self._begun += response.status_code == 200
            if self._begun == STREAMS:
                self.all_begun.set()
            async for line in response.aiter_lines():
                last = line or last
        self.ended[number] = time.monotonic(), last
        self.one_ended.set()


def processes(node: Any) -> list[psutil.Process]:
    """The raylet, and what it has started."""
    (raylet,) = node.all_processes["raylet"]
    of_raylet = psutil.Process(raylet.process.pid)
    return [of_raylet, *of_raylet.children(recursive=True)]


async def fall_silent(apps: dict[str, ServedApp], node: Any) -> dict[str, Any]:
    """By the name of the application, what becomes of its answers."""
    streams = {name: Streams(app.url) for name, app in apps.items()}
    async with httpx.AsyncClient(timeout=START_S) as client:
        tasks = [asyncio.create_task(one.one(client, number)) for one in streams.values() for number in range(STREAMS)]
        await asyncio.gather(*(asyncio.wait_for(one.all_begun.wait(), START_S) for one in streams.values()))
        for process in processes(node):
            process.send_signal(signal.SIGSTOP)
        silent_at = time.monotonic()

        async def answers(url: str) -> list[tuple[int, float]]:
            bodies = [{"messages": [{"role": "user", "content": f"Hi {number}"}]} for number in range(PROBE_FANOUT)]
            asked = [client.post(f"{url}/v1/chat/completions", json=body) for body in bodies]
            return [(each.status_code, each.elapsed.total_seconds()) for each in await asyncio.gather(*asked)]

        asked = await asyncio.gather(*(answers(app.url) for app in apps.values()))
        with contextlib.suppress(TimeoutError):
            await asyncio.gather(*(asyncio.wait_for(one.one_ended.wait(), SILENT_S) for one in streams.values()))
        await asyncio.sleep(1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        name: {
            "told": [json.loads(last.removeprefix("data: ")) for _, last in one.ended.values()],
            "after_s": [at - silent_at for at, _ in one.ended.values()],
            "goes_on": STREAMS - len(one.ended),
            "asked": found,
        }
        for (name, one), found in zip(streams.items(), asked, strict=True)
    }


def main(checkpoint: Path) -> dict[str, Any]:
    health = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 3000, "failure_threshold": 3}
    with two_nodes(**health) as (_, other, cluster):
        apps = {
            name: deploy(
                cluster,
                checkpoint,
                name,
                encoders=1,
                llms=2,
                others_on=OTHERS,
                llm={"affinity": name == "affinity"},
                patient=False,
            )
            for name in ("affinity", "without")
        }
        stopped = processes(other)
        try:
            return asyncio.run(fall_silent(apps, other))
        finally:
            for process in stopped:
                if process.is_running():
                    process.kill()


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
