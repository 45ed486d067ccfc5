"""Two hosts under load, with an encoder and a language model on each: one is killed, falls silent, and its encoder is
taken away. Hosts are Ray nodes in network namespaces of their own.

A program, since Ray's processes and those that use it must be in the namespaces. `test_two_nodes.py` runs it; the last
line that it prints is JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError

from benchmarks.transfer import namespaces
from tests.cluster.chaos_load import Load, Seen, pictures_and_embeddings, under
from tests.cluster.served import START_S, Cluster, ServedApp, deploy
from tests.cluster.span_receiver import SpanReceiver
from tests.programs import free_port
from tests.waiting import until

HEAD, FAR = range(2)
NEAR = "near"
REQUESTS = 2000
BEFORE = 300
"""Of these, before a loss."""
ANSWERED_S = 600.0
RESTORED_S = 180.0
INSIDE = "--inside"
HEALTH = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 3000, "failure_threshold": 3}


class Hosts:
    """The application on two hosts, and the Ray node of the second, which losses need again and again."""

    def __init__(self, checkpoint: Path, cluster: Cluster) -> None:
        self._checkpoint, self._cluster = checkpoint, cluster
        self._files: tuple[list[bytes], list[Seen]] = pictures_and_embeddings(checkpoint)
        self.app = self._deploy(encoders=2)

    def _deploy(self, *, encoders: int) -> ServedApp:
        return deploy(
            self._cluster,
            self._checkpoint,
            "losses",
            encoders=encoders,
            llms=2,
            others_on=NEAR,
            patient=False,
            max_queued_tokens=10_000,
        )

    def hosts(self, kind: Callable[[str], list[Any]]) -> set[str]:
        try:
            return {state["host"] for state in kind("state")}
        except RayActorError:
            return set()

    def is_whole(self) -> bool:
        return len(self.hosts(self.app.encoders)) == len(self.hosts(self.app.llms)) == 2

    def lose(self, happens: Callable[[], object]) -> dict[str, Any]:
        """What became of REQUESTS, when this has happened among them."""
        until(self.is_whole, "an encoder and a language model on each host", RESTORED_S)
        load = Load(self.app.url, *self._files)

        async def scenario() -> None:
            await asyncio.to_thread(until, lambda: len(load.times_s) >= BEFORE, "requests before", ANSWERED_S)
            await asyncio.to_thread(happens)
            await asyncio.to_thread(until, lambda: len(load.times_s) >= REQUESTS, "requests after", ANSWERED_S)

        asyncio.run(under(load, scenario))
        return {
            "answered": load.statuses[200],
            "failures": load.failures[:5],
            "wrong": load.wrong[:5],
            "interrupted": sum(load.interrupted.values()),
            "ended": sorted({last.rpartition("data: ")[2][:200] for last in load.last_bytes})[:5],
            "longest_s": round(max(load.times_s), 1),
        }

    def kill(self) -> None:
        namespaces.kill(FAR)

    def silence(self) -> None:
        namespaces.kill(FAR, silent=True)

    def scale_down(self) -> None:
        self.app = self._deploy(encoders=1)
        until(lambda: len(self.hosts(self.app.encoders)) == 1, "one encoder", START_S)

    def restore(self) -> None:
        """Starts a node on the second host, after what is left of the one before has gone."""
        namespaces.kill(FAR)
        namespaces.start_node(FAR, node_options())


def node_options(resource: str | None = None) -> tuple[str, ...]:
    resources = json.dumps({resource: 1} if resource else {})
    return "--num-cpus=3", f"--resources={resources}", f"--object-store-memory={150 * 2**20}"


def inside(checkpoint: Path) -> dict[str, Any]:
    """In the namespace of the head."""
    ray.init(address=f"{namespaces.ADDRESSES[0]}:{namespaces.PORT}", log_to_driver=False)
    port, spans = free_port(), SpanReceiver()
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        hosts, found = Hosts(checkpoint, Cluster(port, 0, spans)), {}
        for name, happens in (("killed", hosts.kill), ("silent", hosts.silence), ("scaled down", hosts.scale_down)):
            found[name] = hosts.lose(happens)
            print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
            if name != "scaled down":
                hosts.restore()
        return found
    finally:
        ray.shutdown()
        spans.close()


def main(checkpoint: str) -> dict[str, Any]:
    health = json.dumps({f"health_check_{name}": value for name, value in HEALTH.items()})
    with namespaces.ray_nodes((*node_options(NEAR), f"--system-config={health}"), node_options()):
        program = [sys.executable, "-m", "tests.cluster.host_losses", checkpoint, INSIDE]
        done = subprocess.run(namespaces.command_in(HEAD, *program), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the program in the namespace ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(inside(Path(sys.argv[1])) if INSIDE in sys.argv else main(sys.argv[1])))
