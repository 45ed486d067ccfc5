"""An encoder and a language model on two hosts: Ray nodes in network namespaces of their own.

A program, since Ray's processes and those that use it must be in the namespaces. `test_two_hosts.py` runs it; the last
line that it prints is JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve

from benchmarks.transfer import namespaces
from tests.cluster.served import Cluster, deploy
from tests.cluster.span_receiver import SpanReceiver
from tests.cluster.two_hosts import ask, body
from tests.programs import free_port

NEAR, FAR = "near", "far"
REQUESTS = 200
INSIDE = "--inside"


def inside(checkpoint: Path) -> dict[str, Any]:
    """In the namespace of the head."""
    ray.init(address=f"{namespaces.ADDRESSES[0]}:{namespaces.PORT}", log_to_driver=False)
    port, spans = free_port(), SpanReceiver()
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        app = deploy(
            Cluster(port, 0, spans), checkpoint, "apart", others_on=NEAR, encoders_on=FAR, max_queued_tokens=10_000
        )
        statuses = asyncio.run(ask(app, [body(number, number // 2, 1) for number in range(REQUESTS)]))
        state = app.llm("state")
        return {
            "statuses": statuses,
            "received": state["received"],
            "hosts": len({state["host"].split("-")[-1], app.encoder("state")["host"].split("-")[-1]}),
            "network": len({state["host"].split("/")[1], app.encoder("state")["host"].split("/")[1]}),
        }
    finally:
        ray.shutdown()
        spans.close()


def main(checkpoint: str) -> dict[str, Any]:
    def options(resource: str) -> tuple[str, ...]:
        resources = json.dumps({resource: 1})
        return "--num-cpus=2", f"--resources={resources}", f"--object-store-memory={150 * 2**20}"

    with namespaces.ray_nodes(options(NEAR), options(FAR)):
        program = [sys.executable, "-m", "tests.cluster.two_namespaces", checkpoint, INSIDE]
        done = subprocess.run(namespaces.command_in(0, *program), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(inside(Path(sys.argv[1])) if INSIDE in sys.argv else main(sys.argv[1])))
