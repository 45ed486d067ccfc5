"""An embedding receiver with the engine's side of its link and an encoder's store, for tests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from configs.schema import TcpConfig
from deployments.common.messages import EncodedImage, SharedEmbedding
from deployments.llm.embedding_receiver import EmbeddingReceiver
from deployments.llm.received import ReceivedEmbeddings
from deployments.telemetry.metrics import Counter, Counters, Histogram, Histograms
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.remote_reader import RemoteReader
from deployments.transfer.same_host import ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.tcp_server import TcpServer
from deployments.vllm.connector.link import Loaded
from deployments.vllm.connector.scheduler_link import SchedulerLink
from deployments.vllm.connector.worker_link import WorkerLink
from deployments.vllm.connector.worker_memory import WorkerMemory
from tests.unit.deployments.telemetry.added import Added
from tests.unit.deployments.transfer.fake_remote_memory import FakeMemory
from tests.unit.deployments.transfer.stored_embeddings import WIDTH, encoded

PATIENCE_S = 60.0
MIB = 2**20
SECRET = b"s" * 32


class FreeAdded(Added):
    """Any number, with or without a label; and what was observed."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: dict[Histogram, list[float]] = {}

    def add(self, counter: Counter, number: int = 1, **labels: str) -> None:
        self.added[counter, next(iter(labels.values()), None)] += number

    def observe(self, histogram: Histogram, seconds: float) -> None:
        self.observed.setdefault(histogram, []).append(seconds)


def receiver_for(
    counts: FreeAdded, *, receive_buffer: ReceiveBuffer | None = None, remote: FakeMemory | None = None, **settings: Any
) -> EmbeddingReceiver:
    """Its counters and its histograms are `counts`."""
    buffer = receive_buffer or ReceiveBuffer(MIB)
    reader = None
    if remote is not None:
        reader = RemoteReader(remote, buffer)
    times = cast(Histograms, counts)
    return EmbeddingReceiver(counts, times, receive_buffer=buffer, secret=SECRET, remote_reader=reader, **settings)


async def received_by(receiver: EmbeddingReceiver, *encodings: Any) -> ReceivedEmbeddings:
    """All of `encodings`, of six tokens each."""
    received = ReceivedEmbeddings()
    await receiver.receive(encodings, [(6, WIDTH)] * len(encodings), received)
    return received


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - threads and other processes change what is looked at
            await asyncio.sleep(0.01)


@dataclass
class Setting:
    receiver: EmbeddingReceiver
    counts: FreeAdded
    store: EmbeddingStore
    server: ShmServer
    tcp: TcpServer
    scheduler: SchedulerLink
    workers: list[WorkerLink]
    memories: list[WorkerMemory]

    def offered(self, number: int = 1, *, far: bool = False) -> SharedEmbedding:
        """`far`: by an encoder on another host."""
        image = encoded(self.store, number)
        assert self.store.offer(image)
        address = self.server.address
        return image.to_shared(f"far-{address}" if far else address, self.tcp.address)

    def loaded(self, *images: EncodedImage | SharedEmbedding) -> list[torch.Tensor]:
        """What a step of an engine loads, which then has ended the request."""
        table, found = self.scheduler.table, []
        assert table.reserve("request", [image.digest for image in images]) == len(images)
        for image in images:
            lease = table.plan_load(image.digest)
            assert lease is not None
            for memory, worker in zip(self.memories, self.workers, strict=True):
                found.append(memory.load(lease, torch.float32))
                worker.report_loaded(Loaded(lease.name, found[-1].nbytes, 0.0))
        self.scheduler.finish_request("request")
        return found

    @property
    def nothing_is_lent(self) -> bool:
        gc.collect()
        arenas = self.store.arena, self.receiver._receive_buffer.arena
        return all(arena.free_bytes == arena.num_bytes for arena in arenas)


class RaysCounts(FreeAdded):
    """Ray's counters too, which refuse numbers that are not over 0."""

    def __init__(self) -> None:
        super().__init__()
        self._rays = Counters()

    def add(self, counter: Counter, number: int = 1, **labels: str) -> None:
        self._rays.add(counter, number, **labels)
        super().add(counter, number, **labels)


@asynccontextmanager
async def setting(
    *,
    num_workers: int = 1,
    counts: FreeAdded | None = None,
    receive_buffer: ReceiveBuffer | None = None,
    remote: FakeMemory | None = None,
) -> AsyncIterator[Setting]:
    counts = counts or FreeAdded()
    receiver = receiver_for(counts, num_workers=num_workers, receive_buffer=receive_buffer, remote=remote)
    store = EmbeddingStore(2**20)
    memories = [WorkerMemory(torch.device("cpu")) for _ in range(num_workers)]
    scheduler = SchedulerLink(receiver.link.address)
    workers = [WorkerLink(receiver.link.address, memory) for memory in memories]
    assert receiver.link.wait_for_engine(timeout_s=PATIENCE_S)
    server, tcp = ShmServer(store), TcpServer(store, SECRET, TcpConfig())
    try:
        yield Setting(receiver, counts, store, server, tcp, scheduler, workers, memories)
    finally:
        receiver.shut_down()
        server.close()
        tcp.close()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 2 * PATIENCE_S))
