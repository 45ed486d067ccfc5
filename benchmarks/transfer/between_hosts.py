"""Transfer time between processes on two nodes, by path: `python benchmarks/transfer/between_hosts.py`.

Timed from a call to the encoder's process, where the embedding is ready, until the other process can read all of it.
`object_store` is Ray's, `nixl` reads from the encoder's memory, `shared_memory` requires one host and copies nothing.
Without `--address`, two Ray nodes are started on this machine, whose traffic uses the loopback device instead of a
network; UCX_TLS=tcp restricts NIXL to it too. Copies from and to devices are not included, and no GPU is used. Needs
ray, and nixl for its path. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ray
import torch
from ray.cluster_utils import Cluster

from benchmarks.record import provenance, write
from deployments.common.messages import EncodedImage, EncodeTimings, SharedEmbedding
from deployments.transfer.header import HEADER_BYTES, Header
from deployments.transfer.rdma import NixlMemory, NotInstalledError
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.remote_sender import RemoteSender
from deployments.transfer.same_host import ShmClient, ShmServer
from deployments.transfer.shared_store import EmbeddingStore

TRANSFER_PATHS = ("shared_memory", "object_store", "nixl")
WIDTH = 4096
ROOM_BYTES = 3 * 2**29
ROOT = str(Path(__file__).resolve().parents[2])


class Encoder:
    """Actor that has an embedding of each size ready."""

    def __init__(self, nixl: bool) -> None:
        self._store = EmbeddingStore(ROOM_BYTES)
        self._server = ShmServer(self._store)
        self._remote = RemoteSender(self._store, NixlMemory()) if nixl else None
        self._ready: dict[int, EncodedImage] = {}

    def encode(self, number: int, tokens: int) -> float:
        """Prepares an embedding and returns the sum of its values."""
        room = self._store.allocate(tokens, WIDTH, torch.bfloat16)
        if room is None:
            raise RuntimeError(f"{tokens} tokens do not fit into {ROOM_BYTES} bytes")
        room.view(torch.int16).random_(0, 1000, generator=torch.Generator().manual_seed(number))
        timings = EncodeTimings(0.0, 0.0, 0.0, time.time(), cached=False)
        self._ready = {number: EncodedImage.pack(room, f"{number:064x}", timings)}
        return _sum(room)

    def give(self, number: int, way: str) -> EncodedImage | SharedEmbedding | None:
        image = self._ready[number]
        if way == "object_store":
            return image
        if way == "shared_memory":
            self._store.offer(image)
            return image.to_shared(self._server.address)
        return None if self._remote is None else self._remote.publish(image)


class Reader:
    def __init__(self, encoder: Any, nixl: bool) -> None:  # noqa: ANN401 - an actor's handle
        self._encoder = encoder
        self._buffer = ReceiveBuffer(NixlMemory(), ROOM_BYTES) if nixl else None
        self._client: ShmClient | None = None

    async def read(self, number: int, way: str, expected: float) -> float:
        """Returns seconds. Raises AssertionError if other bytes arrived."""
        began = time.perf_counter()
        image = await self._encoder.give.remote(number, way)
        if isinstance(image, EncodedImage):
            found = image.unpack()
            seconds = time.perf_counter() - began
        elif image.remote is None:
            if self._client is None:
                self._client = await asyncio.to_thread(ShmClient, image.server)
            lease = await asyncio.wrap_future(self._client.acquire(Header.of(image)))
            found = lease.tensor()
            seconds = time.perf_counter() - began
            lease.release()
        else:
            assert self._buffer is not None
            received = await asyncio.wrap_future(self._buffer.receive(image))
            found = received.tensor()
            seconds = time.perf_counter() - began
        assert _sum(found) == expected, f"{way}: other bytes came"
        return seconds


def _sum(tokens: torch.Tensor) -> float:
    return float(tokens.view(torch.int16).sum(dtype=torch.int64))


def _measured(megabytes: list[float], rounds: int, nodes: list[str]) -> dict[str, dict[str, list[float]]]:
    """Returns milliseconds by path and size, in the order of measurement; the paths take turns."""
    try:
        NixlMemory()
        ways: tuple[str, ...] = TRANSFER_PATHS
    except NotInstalledError as error:
        print(f"without NIXL: {error}", file=sys.stderr)
        ways = TRANSFER_PATHS[:2]
    has_nixl = "nixl" in ways

    def on(node: str) -> dict[str, Any]:
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        return {"scheduling_strategy": strategy, "num_cpus": 0}

    encoder: Any = ray.remote(Encoder).options(**on(nodes[0])).remote(has_nixl)
    reader: Any = ray.remote(Reader).options(**on(nodes[-1])).remote(encoder, has_nixl)
    took: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    for megabyte in megabytes:
        tokens = round(megabyte * 1e6 / (2 * WIDTH))
        for number in range(rounds + 1):  # the first round connects, and faults memory in
            expected = ray.get(encoder.encode.remote(number, tokens))
            for way in ways:
                seconds = ray.get(reader.read.remote(number, way, expected))
                if number:
                    took[way].setdefault(f"{megabyte:g}", []).append(seconds * 1e3)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 70, 500])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--address", help="a running Ray cluster of two nodes or more")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    largest = max(asked.megabytes) * 1e6 + HEADER_BYTES
    if 2 * largest > ROOM_BYTES:
        parser.error(f"--megabytes {max(asked.megabytes):g}: two of them are over {ROOM_BYTES / 1e6:g}")
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}}
    cluster = None
    with tempfile.TemporaryDirectory(prefix="vt", dir="/tmp") as folder:
        os.environ.setdefault("RAY_TMPDIR", folder)
        if asked.address is None:
            node = {"num_cpus": 1, "object_store_memory": 2 * 2**30, "include_dashboard": False}
            cluster = Cluster(initialize_head=True, head_node_args=node)
            cluster.add_node(num_cpus=1, object_store_memory=2 * 2**30)
        ray.init(
            address=asked.address or cluster.address if cluster else asked.address,
            log_to_driver=False,
            runtime_env=environment,
        )
        try:
            nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
            took = _measured(asked.megabytes, asked.rounds, nodes)
        finally:
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()
    for way, sizes in took.items():
        for megabyte, ms in sizes.items():
            print(f"{way:14} {megabyte:>5} MB  p50 {statistics.median(ms):8.1f} ms  {min(ms):.1f} … {max(ms):.1f}")
    result = {
        **provenance(None, None),
        "nodes": len(nodes),
        "ucx_tls": os.environ.get("UCX_TLS"),
        "ms": {
            way: {size: round(statistics.median(ms), 2) for size, ms in sizes.items()} for way, sizes in took.items()
        },
    }
    write(result, asked.out)


if __name__ == "__main__":
    main()
