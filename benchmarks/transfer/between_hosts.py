"""Transfer time between processes on two nodes, by path: `python benchmarks/transfer/between_hosts.py`.

Timed from a call to the encoder's process, where the embeddings are ready, until the other process can read all of
them. `tcp` and `nixl` read from the encoder's memory, `object_store` is Ray's, which the application does not use, and
`shared_memory` requires one host and copies nothing. By default the nodes are in two network namespaces of this
machine, which needs root; `--one-host` starts both in this one, and `--address` names a running cluster. Copies from
and to devices are not included, and no GPU is used. Needs ray, and nixl for its path. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ray
import torch
from ray.cluster_utils import Cluster

from benchmarks.record import provenance, write
from benchmarks.transfer import namespaces
from configs.schema import TcpConfig
from deployments.common.messages import EncodedImage, EncodeTimings, SharedEmbedding
from deployments.transfer.header import HEADER_BYTES, Header, embedding_view
from deployments.transfer.rdma import NotInstalledError
from deployments.transfer.rdma_process import RdmaProcess
from deployments.transfer.receive_buffer import ReceiveBuffer, ReceivedEmbedding
from deployments.transfer.remote_reader import RemoteReader
from deployments.transfer.remote_sender import RemoteSender
from deployments.transfer.same_host import Lease, ShmClient, ShmServer
from deployments.transfer.shared_memory import Arena
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.tcp_client import TcpClients
from deployments.transfer.tcp_server import TcpServer

TRANSFER_PATHS = ("shared_memory", "tcp", "object_store", "nixl")
WIDTH = 4096
ROOM_BYTES = 5 * 2**29
ROOT = str(Path(__file__).resolve().parents[2])
SECRET = b"a secret of this benchmark alone"


class Encoder:
    """Actor that has embeddings ready."""

    def __init__(self, nixl: bool) -> None:
        self._store = EmbeddingStore(ROOM_BYTES)
        self._server = ShmServer(self._store)
        self._tcp = TcpServer(self._store, SECRET, TcpConfig())
        self._remote = RemoteSender(self._store, RdmaProcess()) if nixl else None
        self._ready: list[EncodedImage] = []

    def encode(self, number: int, tokens: int, streams: int) -> list[float]:
        """Prepares embeddings and returns the sums of their values."""
        self._ready.clear()
        sums = []
        for stream in range(streams):
            room = self._store.allocate(tokens, WIDTH, torch.bfloat16)
            if room is None:
                raise RuntimeError(f"{streams} times {tokens} tokens do not fit into {ROOM_BYTES} bytes")
            room.view(torch.int16).random_(0, 1000, generator=torch.Generator().manual_seed(number))
            timings = EncodeTimings(0.0, 0.0, 0.0, time.time(), cached=False)
            self._ready.append(EncodedImage.pack(room, f"{number * 100 + stream:064x}", timings))
            sums.append(_sum(room))
        return sums

    def give(self, path: str) -> list[Any]:
        """Returns the answers for the embeddings: arrays for the object store, else a SharedEmbedding of each."""
        if path == "object_store":
            return [image.bits for image in self._ready]
        if path == "nixl":
            assert self._remote is not None
            return [image.to_shared(remote=self._remote.publish(image)) for image in self._ready]
        for image in self._ready:
            self._store.offer(image)
        return [image.to_shared(self._server.address, self._tcp.address) for image in self._ready]


class Reader:
    def __init__(self, encoder: Any, nixl: bool) -> None:  # noqa: ANN401 - an actor's handle
        self._encoder = encoder
        self._buffer = buffer = ReceiveBuffer(ROOM_BYTES)
        self._remote = RemoteReader(RdmaProcess(), buffer) if nixl else None
        self._tcp = TcpClients(SECRET, buffer)
        self._client: ShmClient | None = None

    async def read(self, path: str, expected: list[float]) -> float:
        """Returns seconds. Raises AssertionError if other bytes arrived."""
        began = time.perf_counter()
        answers = await self._encoder.give.remote(path)
        if path == "object_store":
            seconds = time.perf_counter() - began
            found = [torch.from_numpy(bits.copy()) for bits in answers]
        else:
            leases = await asyncio.gather(*[await self._start(path, image) for image in answers])
            seconds = time.perf_counter() - began
            found = [self._tokens(lease) for lease in leases]
        assert [_sum(tokens) for tokens in found] == expected, f"{path}: other bytes came"
        if path == "shared_memory":
            for lease in leases:
                lease.release()
        return seconds

    def _tokens(self, lease: Lease | ReceivedEmbedding) -> torch.Tensor:
        memory = lease.client if isinstance(lease, Lease) else self._buffer
        flat = torch.frombuffer(mmap.mmap(memory.file, memory.num_bytes), dtype=torch.uint8)
        return embedding_view(flat[lease.offset :], lease.header)

    async def _start(self, path: str, image: SharedEmbedding) -> asyncio.Future[Any]:
        if path == "nixl":
            assert self._remote is not None
            return asyncio.wrap_future(self._remote.receive(image))
        if path == "tcp":
            return asyncio.wrap_future(self._tcp.fetch(image.tcp, Header.of(image)))
        if self._client is None:
            self._client = await asyncio.to_thread(ShmClient, image.server)
        return asyncio.wrap_future(self._client.acquire(Header.of(image)))


def _sum(tokens: torch.Tensor) -> float:
    return float(tokens.view(torch.int16).sum(dtype=torch.int64))


def _measured(
    megabytes: list[float], streams: list[int], rounds: int, nodes: list[str], *, one_host: bool
) -> dict[str, dict[str, list[float]]]:
    """Returns milliseconds by path and size, in the order of measurement; the paths take turns."""
    paths = list(TRANSFER_PATHS if one_host else TRANSFER_PATHS[1:])
    try:
        with closing(RdmaProcess()) as rdma:
            rdma.start(Arena(1))
    except NotInstalledError as error:
        print(f"without NIXL: {error}", file=sys.stderr)
        paths.remove("nixl")
    has_nixl = "nixl" in paths

    def on(node: str) -> dict[str, Any]:
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        return {"scheduling_strategy": strategy, "num_cpus": 0}

    encoder: Any = ray.remote(Encoder).options(**on(nodes[0])).remote(has_nixl)
    reader: Any = ray.remote(Reader).options(**on(nodes[-1])).remote(encoder, has_nixl)
    took: dict[str, dict[str, list[float]]] = {path: {} for path in paths}
    for megabyte in megabytes:
        for at_once in streams:
            tokens = round(megabyte * 1e6 / (2 * WIDTH) / at_once)
            for number in range(rounds + 1):  # the first round connects, and faults memory in
                expected = ray.get(encoder.encode.remote(number, tokens, at_once))
                for path in paths:
                    seconds = ray.get(reader.read.remote(path, expected))
                    if number:
                        took[path].setdefault(f"{megabyte:g} MB in {at_once}", []).append(seconds * 1e3)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 70, 500])
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[1, 4], help="embeddings at once, of that size together"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--one-host", action="store_true", help="both nodes in this network namespace")
    parser.add_argument("--address", help="a running Ray cluster of two nodes or more")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    largest = max(asked.megabytes) * 1e6 + max(asked.streams) * HEADER_BYTES
    if 3 * largest > ROOM_BYTES:
        parser.error(f"--megabytes {max(asked.megabytes):g}: three of them are over {ROOM_BYTES / 1e6:g}")
    if asked.address is None and not asked.one_host:
        node = ("--num-cpus=1", f"--object-store-memory={2**31}")
        with namespaces.ray_nodes(node, node):
            address = f"{namespaces.ADDRESSES[0]}:{namespaces.PORT}"
            again = [sys.executable, __file__, *sys.argv[1:], "--address", address]
            sys.exit(subprocess.run(namespaces.command_in(0, *again), check=False).returncode)
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}}
    cluster = None
    with tempfile.TemporaryDirectory(prefix="vt", dir="/tmp") as folder:
        os.environ.setdefault("RAY_TMPDIR", folder)
        if asked.address is None:
            node_args = {"num_cpus": 1, "object_store_memory": 2 * 2**30, "include_dashboard": False}
            cluster = Cluster(initialize_head=True, head_node_args=node_args)
            cluster.add_node(num_cpus=1, object_store_memory=2 * 2**30)
        ray.init(
            address=asked.address or cluster.address if cluster else asked.address,
            log_to_driver=False,
            runtime_env=environment,
        )
        try:
            until = time.monotonic() + namespaces.START_S
            while len(nodes := [node["NodeID"] for node in ray.nodes() if node["Alive"]]) < 2:
                if time.monotonic() > until:
                    raise TimeoutError(f"{len(nodes)} nodes after {namespaces.START_S} s, two are needed")
                time.sleep(0.5)
            took = _measured(asked.megabytes, asked.streams, asked.rounds, nodes, one_host=cluster is not None)
        finally:
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()
    for path, sizes in took.items():
        for size, ms in sizes.items():
            print(f"{path:14} {size:>14}  p50 {statistics.median(ms):8.1f} ms  {min(ms):.1f} … {max(ms):.1f}")
    result = {
        **provenance(None, None),
        "nodes": len(nodes),
        "ucx_tls": os.environ.get("UCX_TLS"),
        "ms": {
            path: {size: round(statistics.median(ms), 2) for size, ms in sizes.items()} for path, sizes in took.items()
        },
        "fastest_ms": {path: {size: round(min(ms), 2) for size, ms in sizes.items()} for path, sizes in took.items()},
    }
    write(result, asked.out)


if __name__ == "__main__":
    main()
