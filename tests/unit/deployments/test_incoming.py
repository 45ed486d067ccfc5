"""Embeddings on their way into an engine whose scheduler and workers are the application's own, without vLLM's."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from deployments.arrived import Way
from deployments.embedding_shelf import EmbeddingShelf
from deployments.engine_link import Loaded, SchedulerEnd, WorkerEnd
from deployments.engine_memory import EngineMemory
from deployments.incoming import Incoming
from deployments.lending import Lender
from deployments.metrics import Count
from deployments.replica_errors import TransferFailedError
from deployments.wire import EncodedImage, ImageRefused, SharedEmbedding, WireError
from tests.unit.deployments.samples import at_once
from tests.unit.deployments.test_lending import TIMINGS, WIDTH, digest, encoded
from tests.unit.deployments.test_metrics import Added

MERGE = 2
PATIENCE_S = 60.0


class FreeAdded(Added):
    """Any count, with or without a reason."""

    def add(self, count: Count, number: int = 1, *, reason: str | None = None) -> None:
        self.added[count, reason] += number


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - threads and other processes change what is looked at
            await asyncio.sleep(0.01)


@dataclass
class Setting:
    incoming: Incoming
    counts: FreeAdded
    shelf: EmbeddingShelf
    lender: Lender
    scheduler: SchedulerEnd | None
    workers: list[WorkerEnd]
    memories: list[EngineMemory]

    def offered(self, number: int = 1) -> SharedEmbedding:
        image = encoded(self.shelf, number)
        assert self.shelf.offer(image)
        return image.lent_by(self.lender.address)

    def tensor(self, arrived: Any, number: int, image: SharedEmbedding | EncodedImage) -> torch.Tensor:
        tensor: torch.Tensor = arrived.tensor(number, image, width=WIDTH, merge_size=MERGE)
        return tensor

    @property
    def nothing_is_lent(self) -> bool:
        gc.collect()
        return self.shelf.arena.free_bytes == self.shelf.arena.num_bytes


@asynccontextmanager
async def setting(*, num_workers: int = 1, engine: bool = True) -> AsyncIterator[Setting]:
    counts = FreeAdded()
    incoming = Incoming(counts, num_workers=num_workers)
    shelf = EmbeddingShelf(2**20)
    memories = [EngineMemory(torch.device("cpu")) for _ in range(num_workers if engine else 0)]
    scheduler = SchedulerEnd(incoming.link.address) if engine else None
    workers = [WorkerEnd(incoming.link.address, memory) for memory in memories]
    if engine:
        assert incoming.engine_started(timeout_s=PATIENCE_S)
    lender = Lender(shelf)
    try:
        yield Setting(incoming, counts, shelf, lender, scheduler, workers, memories)
    finally:
        incoming.shut_down()
        lender.close()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 2 * PATIENCE_S))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_engine_loads_by_itself(num_workers: int) -> None:
    async def scenario() -> None:
        async with setting(num_workers=num_workers) as given:
            images = [given.offered(1), given.offered(2)]
            arrived = await given.incoming.arrive(at_once(*images))
            assert [tuple(given.tensor(arrived, n, image).shape) for n, image in enumerate(images)] == [(6, 0)] * 2
            assert given.scheduler is not None
            table = given.scheduler.table
            await eventually(lambda: len(table) == 2)
            assert table.available("request", [image.digest for image in images])
            for image, expected in zip(images, (encoded(EmbeddingShelf(2**20), n) for n in (1, 2)), strict=True):
                place = table.load(image.digest)
                for memory, worker in zip(given.memories, given.workers, strict=True):
                    loaded = memory.load(place, torch.float32)
                    assert torch.equal(loaded, expected.unpack(width=WIDTH, merge_size=MERGE).float())
                    worker.loaded(Loaded(place.lease, loaded.nbytes, 0.005))
            given.incoming.close(arrived)
            await eventually(lambda: given.incoming.num_loaded == 2 * num_workers)
            assert len(given.incoming) == 2, "the request runs still"
            given.scheduler.finished("request")
            await eventually(lambda: len(given.incoming) == 0 and given.nothing_is_lent)
            assert given.counts.added[Count.EMBEDDINGS_ARRIVED, Way.ENGINE.value] == 2
            assert given.counts.added[Count.EMBEDDING_BYTES_LOADED, None] == num_workers * 2 * 6 * WIDTH * 4
            assert given.counts.added[Count.LOAD_MS, None] == num_workers * 2 * 5

    run(scenario())


def test_a_lease_ends_when_the_last_worker_has_loaded_what_it_was_told_to() -> None:
    """A step may be scheduled and not yet run when its request is aborted: its bytes must stay until then."""

    async def scenario() -> None:
        async with setting(num_workers=2) as given:
            image = given.offered()
            arrived = await given.incoming.arrive(at_once(image))
            assert given.scheduler is not None
            table = given.scheduler.table
            await eventually(lambda: table.available("request", [image.digest]))
            place = table.load(image.digest)
            given.incoming.close(arrived)
            given.scheduler.finished("request")
            await eventually(lambda: len(table) == 0 or not table.has(image.digest))
            given.workers[0].loaded(Loaded(place.lease, 1, 0.0))
            await eventually(lambda: given.incoming.num_loaded == 1)
            assert len(given.incoming) == 1
            assert not given.nothing_is_lent
            given.workers[1].loaded(Loaded(place.lease, 0, 0.0))  # it had the embedding already
            await eventually(lambda: given.nothing_is_lent)

    run(scenario())


def test_without_an_engine_that_loads_they_go_with_the_request() -> None:
    async def scenario() -> None:
        async with setting(engine=False) as given:
            image = given.offered()
            arrived = await given.incoming.arrive(at_once(image))
            expected = encoded(EmbeddingShelf(2**20)).unpack(width=WIDTH, merge_size=MERGE)
            assert torch.equal(given.tensor(arrived, 0, image), expected)
            given.incoming.close(arrived)
            await eventually(lambda: given.nothing_is_lent)
            assert given.counts.added[Count.EMBEDDINGS_ARRIVED, Way.REQUEST.value] == 1
            assert given.counts.added[Count.EMBEDDING_BYTES_ARRIVED, Way.REQUEST.value] == image.num_bytes

    run(scenario())


def test_one_embedding_from_the_object_store_takes_the_others_along() -> None:
    """vLLM joins the embeddings of a request: those without columns do not fit to those with."""

    async def scenario() -> None:
        async with setting() as given:
            shared = given.offered()
            other = EncodedImage.pack(torch.ones(6, WIDTH), (1, 4, 6), digest(2), TIMINGS)
            arrived = await given.incoming.arrive(at_once(shared, other, ImageRefused("truncated")))
            shapes = [tuple(given.tensor(arrived, n, image).shape) for n, image in enumerate((shared, other))]
            assert shapes == [(6, WIDTH)] * 2
            given.incoming.close(arrived)
            ways = {reason for (count, reason) in given.counts.added if count is Count.EMBEDDINGS_ARRIVED}
            assert ways == {Way.REQUEST.value, Way.OBJECT_STORE.value}

    run(scenario())


def test_an_embedding_that_is_gone_fails_the_request_and_gives_the_others_back() -> None:
    async def scenario() -> None:
        async with setting() as given:
            there, gone = given.offered(1), given.offered(2)
            given.shelf._offers.clear()  # nobody refers to the second one now
            given.shelf.offer(encoded(given.shelf, 1))
            with pytest.raises(TransferFailedError):
                await given.incoming.arrive(at_once(there, gone))
            await eventually(lambda: given.nothing_is_lent)

    run(scenario())


def test_an_encoder_that_is_gone_fails_the_request_and_is_forgotten() -> None:
    async def scenario() -> None:
        async with setting() as given:
            image = given.offered()
            arrived = await given.incoming.arrive(at_once(image))
            given.lender.close()
            given.incoming.forget_the_lost()
            assert given.memories[0]._mapped, "a lease is open"
            given.incoming.close(arrived)
            await eventually(lambda: len(given.incoming) == 0)
            with pytest.raises(TransferFailedError):
                await given.incoming.arrive(at_once(image))

            def forgotten() -> bool:
                given.incoming.forget_the_lost()
                return not given.memories[0]._mapped

            await eventually(forgotten)
            with pytest.raises(TransferFailedError, match="no lender"):
                await given.incoming.arrive(at_once(image))

    run(scenario())


def test_an_engine_that_has_gone_holds_nothing() -> None:
    async def scenario() -> None:
        async with setting() as given:
            arrived = await given.incoming.arrive(at_once(given.offered()))
            assert given.scheduler is not None
            given.scheduler.close()
            await eventually(lambda: given.incoming.link._scheduler is None)
            given.incoming.close(arrived)
            await eventually(lambda: given.nothing_is_lent)
            with pytest.raises(TransferFailedError):
                await given.incoming.arrive(at_once(given.offered(2)))
            await eventually(lambda: given.nothing_is_lent)

    run(scenario())


def test_memory_that_the_engine_cannot_map_goes_with_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA refused to pin it")

    monkeypatch.setattr(EngineMemory, "map", refuse)

    async def scenario() -> None:
        async with setting() as given:
            image = given.offered()
            arrived = await given.incoming.arrive(at_once(image))
            assert given.tensor(arrived, 0, image).shape == (6, WIDTH)
            given.incoming.close(arrived)

    run(scenario())


def test_who_leaves_while_it_is_borrowed_holds_nothing() -> None:
    async def scenario() -> None:
        async with setting() as given:
            for pause in range(6):  # event loop turns until the client leaves
                image = given.offered()
                borrowing = asyncio.create_task(given.incoming.arrive(at_once(image)))
                for _ in range(pause):
                    await asyncio.sleep(0)
                borrowing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await borrowing
                given.shelf._offers.clear()
                await eventually(lambda: given.nothing_is_lent)

    run(scenario())


def test_what_does_not_fit_the_model_is_told_before_it_is_read() -> None:
    async def scenario() -> None:
        async with setting() as given:
            image = given.offered()
            arrived = await given.incoming.arrive(at_once(image))
            with pytest.raises(WireError, match="shape"):
                arrived.tensor(0, image, width=WIDTH + 1, merge_size=MERGE)
            given.incoming.close(arrived)

    run(scenario())
