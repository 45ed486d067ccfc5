"""Replicas behind HAProxy are killed under load, a kind after the other: 3 encoders, 2 language models, 2 ingresses.

A program, since the Ray of the other tests has Serve's own proxy. `test_chaos.py` runs it, with HAProxy in its
environment; the last line that it prints is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import itertools
import json
import os
import random
import signal
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve.context import _get_global_client

from tests.cluster.chaos_load import SEED, Load, pictures_and_embeddings, under
from tests.cluster.served import START_S, Cluster, ServedApp, deploy
from tests.cluster.span_receiver import SpanReceiver
from tests.programs import free_port
from tests.waiting import until

NAME = "chaos"
ENCODERS, OTHERS = 3, 2
BODY_BYTES = 900_000


def running(deployment: str) -> list[int]:
    """Process ids of the replicas that Serve holds to be running."""
    client = _get_global_client()
    assert client is not None
    replicas = client.get_serve_details()["applications"][NAME]["deployments"][deployment]["replicas"]
    return [replica["pid"] for replica in replicas if replica["state"] == "RUNNING"]


class HAProxy:
    """What its socket for administrators tells."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of its configuration, with one of each node below."""
        (self._socket,) = folder.glob("*/admin.sock")

    def servers_up(self) -> int:
        """Ingresses that it sends requests to."""
        rows = csv.DictReader(self._asked("show stat").removeprefix("# ").splitlines())
        servers = [row["status"] for row in rows if row["pxname"] == f"http-{NAME}" and "Ingress" in row["svname"]]
        return servers.count("UP")

    def _asked(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._socket))
            connection.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: connection.recv(65_536), b"")).decode()


async def kill_in_turn(load: Load, haproxy: HAProxy, kinds: Sequence[str], *, times: int, every_s: float) -> None:
    """One that works, of each kind in turn, where another of its kind works.

    Each start of an ingress restarts HAProxy; requests at the process before know one ingress only, so that the other
    one must not be killed until they have their answers.
    """
    chance = random.Random(SEED)

    def works(kind: str) -> list[int]:
        pids = running(kind)
        return sorted(pids) if len(pids) > 1 and (kind != "Ingress" or haproxy.servers_up() > 1) else []

    for kind in itertools.islice(itertools.cycle(kinds), times):
        pids = await asyncio.to_thread(until, partial(works, kind), f"two of {kind}")
        if kind == "Ingress":
            await load.wait_for_earlier()
        load.killed = kind
        os.kill(chance.choice(pids), signal.SIGKILL)
        await asyncio.sleep(every_s)


def everything_runs() -> bool:
    return [len(running(kind)) for kind in ("Encoder", "LLM", "Ingress")] == [ENCODERS, OTHERS, OTHERS]


def deployed(cluster: Cluster, checkpoint: Path, **changes: int) -> ServedApp:
    settings: dict[str, Any] = {"encoders": ENCODERS, "max_queued_tokens": 10_000, "cache_bytes": 0} | changes
    return deploy(cluster, checkpoint, NAME, replicas=OTHERS, drain_s=START_S, patient=False, **settings)


async def update(cluster: Cluster, checkpoint: Path) -> None:
    """New settings exchange every replica, one encoder fewer; then they are taken back, with one fewer again."""
    seen = set(running("Encoder"))
    for changes in ({"max_queued_tokens": 20_000, "encoders": 2}, {"encoders": 1}):
        await asyncio.to_thread(deployed, cluster, checkpoint, **changes)
        now = await asyncio.to_thread(until, lambda: running("Encoder"), "running encoders")
        assert not seen & set(now)
        seen.update(now)


def told(load: Load) -> dict[str, Any]:
    return {
        "requests": len(load.times_s),
        "answered": load.statuses[200],
        "images": load.images,
        "failures": load.failures,
        "wrong": load.wrong,
        "interrupted": load.interrupted,
        "last_bytes": load.last_bytes,
        "s_p50": round(float(np.percentile(load.times_s, 50)), 3),
        "s_p99": round(float(np.percentile(load.times_s, 99)), 3),
        "s_max": round(max(load.times_s), 3),
    }


def main(asked: argparse.Namespace) -> dict[str, Any]:
    spans = SpanReceiver()
    ray.init(address="local", num_cpus=4, object_store_memory=150 * 2**20, include_dashboard=False, log_to_driver=False)
    try:
        cluster = Cluster(free_port(), 0, spans)
        serve.start(http_options={"host": "127.0.0.1", "port": cluster.http_port})
        app = deployed(cluster, asked.checkpoint)
        known = pictures_and_embeddings(asked.checkpoint)
        haproxy = HAProxy(asked.haproxy_folder)
        until(lambda: haproxy.servers_up() == OTHERS, "both ingresses behind HAProxy")
        load = Load(app.url, *known, body_bytes=BODY_BYTES, pause_s=asked.pause_s)
        kills = kill_in_turn(load, haproxy, asked.kinds, times=asked.times, every_s=asked.every_s)
        asyncio.run(under(load, lambda: kills))
        found = told(load)
        until(everything_runs, "all replicas again")
        if asked.updates:
            load = Load(app.url, *known, body_bytes=BODY_BYTES, pause_s=asked.pause_s)
            asyncio.run(under(load, lambda: update(cluster, asked.checkpoint)))
            found["update"] = told(load)
        return found
    finally:
        ray.shutdown()
        spans.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--kinds", nargs="+", required=True, help="deployments")
    parser.add_argument("--every-s", type=float, required=True)
    parser.add_argument("--times", type=int, required=True)
    parser.add_argument("--pause-s", type=float, default=0.0, help="of each client after an answer")
    parser.add_argument("--updates", action="store_true", help="new settings under load after the kills")
    parser.add_argument("--haproxy-folder", type=Path, required=True, help="as `haproxy.environment` was given it")
    print(json.dumps(main(parser.parse_args())))
