"""Two nodes, an encoder on each, behind Serve's other proxy; a client hangs up, then a node is lost under load.

A program, since the Ray of the other tests has one node and Serve's own proxy. `test_two_nodes.py` runs it, with the
other proxy in its environment; the last line that it prints is JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster as Nodes
from ray.exceptions import RayActorError

from tests.cluster.chaos_load import Load, pictures_and_embeddings, under
from tests.cluster.served import START_S, Cluster, ServedApp, deploy
from tests.cluster.span_receiver import SpanReceiver
from tests.programs import free_port, start_ray
from tests.waiting import until

OTHERS = "head"
HAPROXY = "haproxy"


def haproxies() -> int:
    """Processes of it below this one."""
    return sum(HAPROXY in process.name() for process in psutil.Process().children(recursive=True))


def running(app: ServedApp) -> list[int]:
    """Process ids of the encoders."""
    try:
        return [state["pid"] for state in app.encoders("state")]
    except RayActorError:  # the call has found out that one is dead
        return []


def hang_up(app: ServedApp) -> None:
    """In the middle of a stream that has no end; returns when the language model has been told."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
    before = app.llm("state")["disconnects"]
    with (
        httpx.Client(timeout=START_S) as client,
        client.stream("POST", f"{app.url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200
        next(response.iter_lines())
    until(lambda: app.llm("state")["disconnects"] == before + 1, "the end of the stream")


@contextmanager
def two_nodes(**health: int) -> Iterator[tuple[Nodes, Any, Cluster]]:
    """A Ray and a Serve of two nodes, with the node that is not the head; its proxy is on the head, which alone has
    OTHERS. `health`: Ray's settings of how the head looks after nodes, without their prefix."""
    common: dict[str, Any] = {"object_store_memory": 150 * 2**20, "include_dashboard": False}
    common["_system_config"] = {f"health_check_{name}": value for name, value in health.items()}
    spans = SpanReceiver()
    head = {"num_cpus": 4, "resources": {OTHERS: 1}, **common}
    nodes = start_ray(partial(Nodes, initialize_head=True, head_node_args=head))
    try:
        other = start_ray(partial(nodes.add_node, num_cpus=2, object_store_memory=150 * 2**20))
        ray.init(address=nodes.address, log_to_driver=False)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield nodes, other, Cluster(port, 0, spans)
    finally:
        ray.shutdown()
        nodes.shutdown()
        spans.close()


def main(checkpoint: Path) -> dict[str, Any]:
    # What the head does not hear of for 3 s is lost.
    with two_nodes(initial_delay_ms=1000, period_ms=1000, failure_threshold=3) as (nodes, other, cluster):
        app = deploy(
            cluster,
            checkpoint,
            "nodes",
            encoders=2,
            others_on=OTHERS,
            patient=False,
            cache_bytes=0,
            max_queued_tokens=10_000,
        )
        proxies = haproxies()
        hang_up(app)
        load = Load(app.url, *pictures_and_embeddings(checkpoint))
        before = running(app)

        async def lose_a_node() -> None:
            await asyncio.to_thread(nodes.remove_node, other, allow_graceful=False)
            await asyncio.to_thread(until, lambda: len(set(before) & set(running(app))) == 1, "the loss of an encoder")

        asyncio.run(under(load, lose_a_node))
        return {
            "answered": load.statuses[200],
            "failures": load.failures,
            "wrong": load.wrong,
            "proxies": proxies,
            "encoders": len(before),
            "longest_s": max(load.times_s),
        }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
