"""Two nodes, a language model on each; one falls silent with answers under way: its processes are stopped, not ended,
so that its connections stay open and nothing comes over them.

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

from tests.unit.deployments.conftest import START_S, ServedApp, deploy
from tests.unit.deployments.two_nodes import OTHERS, two_nodes

STREAMS = 6
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


async def fall_silent(app: ServedApp, node: Any) -> dict[str, Any]:
    streams = Streams(app.url)
    async with httpx.AsyncClient(timeout=START_S) as client:
        tasks = [asyncio.create_task(streams.one(client, number)) for number in range(STREAMS)]
        await asyncio.wait_for(streams.all_begun.wait(), START_S)
        for process in processes(node):
            process.send_signal(signal.SIGSTOP)
        silent_at = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(streams.one_ended.wait(), SILENT_S)
        await asyncio.sleep(1)
        told = [json.loads(last.removeprefix("data: ")) for _, last in streams.ended.values()]
        after_s = [at - silent_at for at, _ in streams.ended.values()]
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        answered = await client.post(f"{app.url}/v1/chat/completions", json=body)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {"told": told, "after_s": after_s, "goes_on": STREAMS - len(told), "then": answered.status_code}


def main(checkpoint: Path) -> dict[str, Any]:
    health = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 3000, "failure_threshold": 3}
    with two_nodes(**health) as (_, other, cluster):
        app = deploy(cluster, checkpoint, "nodes", encoders=1, llms=2, others_on=OTHERS)
        stopped = processes(other)
        try:
            return asyncio.run(fall_silent(app, other))
        finally:
            for process in stopped:
                if process.is_running():
                    process.kill()


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
