"""How embeddings of other hosts come: by a trial between a language model and an encoder, looked at again later."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import closing
from typing import Any

import pytest

from deployments.arrived import Way
from deployments.embedding_header import HEADER_BYTES
from deployments.embedding_shelf import EmbeddingShelf
from deployments.engine_memory import EngineMemory
from deployments.incoming import Incoming
from deployments.lending import GoneError
from deployments.metrics import Count
from deployments.nixl_memory import NotInstalledError
from deployments.remote_lending import RemoteLender, RemoteLending, TrialAnswer
from deployments.remote_memory import RemoteMemory
from deployments.remote_trial import AGAIN_S, FAILURES, Chosen, RemoteWay
from deployments.replica_errors import TransferFailedError
from deployments.wire import SharedEmbedding
from tests.unit.deployments.fake_remote_memory import FakeMemory, FakeNetwork
from tests.unit.deployments.samples import at_once
from tests.unit.deployments.test_incoming import MERGE, FreeAdded, eventually, setting
from tests.unit.deployments.test_lending import WIDTH, encoded
from tests.unit.deployments.test_remote_lending import Clock, is_free, lent

MIB = 2**20
HERE, THERE = "here", "there"


class Setting:
    """A language model here and an encoder there. Each way takes the seconds that the test says."""

    def __init__(self, *, nixl_s: float = 0.01, store_s: float = 0.02, host: str = THERE) -> None:
        self.network, self.clock, self.counts = FakeNetwork(), Clock(), FreeAdded()
        self.shelf = EmbeddingShelf(64 * MIB)
        self.lending = RemoteLending(self.shelf, lambda: FakeMemory(self.network))
        self.host, self.seconds = host, {True: nixl_s, False: store_s, None: 0.0}
        self.asked: list[bool | None] = []
        self.timer = Clock()
        self.way = RemoteWay(
            self.counts,
            self.made,
            num_bytes=32 * MIB,
            host=HERE,
            ask=lambda: self.ask,
            clock=self.clock,
            timer=self.timer,
        )

    def made(self) -> RemoteMemory:
        return FakeMemory(self.network)

    async def ask(self, lent: bool | None) -> TrialAnswer:
        self.asked.append(lent)
        self.timer.now += self.seconds[lent]
        return await self.lending.trial(self.host, lent)

    async def tried(self) -> None:
        self.way.by_the_object_store()
        assert self.way._trial is not None
        await self.way._trial

    def chosen(self) -> dict[str, int]:
        return {str(why): n for (count, why), n in self.counts.added.items() if count is Count.REMOTE_WAYS_CHOSEN}

    def close(self) -> None:
        self.way.close()
        self.lending.close()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


@pytest.mark.parametrize(("nixl_s", "chosen"), [(0.01, Chosen.FASTER), (0.03, Chosen.SLOWER)])
def test_the_faster_way_is_taken(nixl_s: float, chosen: Chosen) -> None:
    async def scenario() -> None:
        with closing(Setting(nixl_s=nixl_s)) as given:
            assert not given.way.pulls
            await given.tried()
            assert given.way.pulls == (chosen is Chosen.FASTER)
            assert given.chosen() == {chosen.value: 1}
            await eventually(lambda: is_free(given.shelf))
            assert given.way.landing is not None
            assert is_free(given.way.landing)

    run(scenario())


def test_encoders_of_this_host_are_not_measured() -> None:
    async def scenario() -> None:
        with closing(Setting(host=HERE)) as given:
            await given.tried()
            assert not given.way.pulls
            assert given.chosen() == {Chosen.ONE_HOST.value: 1}
            assert given.asked == [None]
            assert given.way.landing is None, "nothing is registered, nothing listens"

    run(scenario())


def test_without_nixl_here_or_there_it_is_the_object_store(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> RemoteMemory:
        raise NotInstalledError("the package nixl cannot be imported: pip install it")

    async def scenario() -> None:
        with closing(Setting()) as here, closing(Setting()) as there:
            here.way._make = refuse
            there.lending = RemoteLending(there.shelf, refuse)
            for given in (here, there):
                with caplog.at_level("INFO", logger="ray.serve"):
                    await given.tried()
                assert not given.way.pulls
                assert given.chosen() == {Chosen.NOT_INSTALLED.value: 1}
                assert "pip install it" in caplog.text
                caplog.clear()
                given.clock.now = AGAIN_S
                await given.tried()
                assert given.chosen() == {Chosen.NOT_INSTALLED.value: 1}, "counted and told once"
                assert caplog.text == ""

    run(scenario())


def test_where_it_is_asked_for_and_not_installed_the_start_fails() -> None:
    def refuse() -> RemoteMemory:
        raise NotInstalledError("pip install it")

    with pytest.raises(NotInstalledError):
        RemoteWay(FreeAdded(), refuse, num_bytes=MIB, always=True, host=HERE)
    with pytest.raises(NotInstalledError):
        RemoteLending(EmbeddingShelf(MIB), refuse, at_once=True)


def test_a_trial_that_comes_wrong_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        with closing(Setting()) as given:
            right = given.ask

            async def wrong(lent: bool | None) -> TrialAnswer:
                answer = await right(lent)
                if lent and given.asked.count(True) == 3:
                    assert isinstance(answer.image, SharedEmbedding)
                    assert answer.image.remote is not None
                    start = answer.image.remote.address - given.shelf.arena.address + HEADER_BYTES
                    given.shelf.arena.write(start + MIB, b"\xff\xff\xff\xff")
                return answer

            given.way._ask = lambda: wrong
            with caplog.at_level("INFO", logger="ray.serve"):
                await given.tried()
            assert "came wrong, by NIXL" in caplog.text
            assert given.chosen() == {Chosen.FAILED.value: 1}
            assert not given.way.pulls

    run(scenario())


def test_an_encoder_that_fails_the_trial_leaves_the_object_store() -> None:
    async def scenario() -> None:
        with closing(Setting()) as given:

            async def dead(lent: bool | None) -> TrialAnswer:
                raise ConnectionError("a replica was lost")

            given.way._ask = lambda: dead
            await given.tried()
            assert given.chosen() == {Chosen.FAILED.value: 1}

    run(scenario())


def test_one_trial_at_a_time_and_another_one_later() -> None:
    async def scenario() -> None:
        with closing(Setting(nixl_s=0.03)) as given:
            for _ in range(3):
                given.way.by_the_object_store()
            assert given.way._trial is not None
            await given.way._trial
            assert given.asked.count(None) == 1
            given.way.by_the_object_store()
            assert given.way._trial.done()
            given.seconds[True] = 0.001
            given.clock.now = AGAIN_S
            await given.tried()
            assert given.way.pulls
            assert given.chosen() == {Chosen.SLOWER.value: 1, Chosen.FASTER.value: 1}

    run(scenario())


def test_failures_in_a_row_take_the_choice_back() -> None:
    async def scenario() -> None:
        with closing(Setting()) as given:
            await given.tried()
            lender = RemoteLender(given.shelf, FakeMemory(given.network))
            for number in range(2 * FAILURES - 1):
                assert given.way.pulls
                image = lent(lender, given.shelf)
                assert image.remote is not None
                if number == FAILURES - 1:  # one that comes right in between
                    await given.way.fetch(image)
                    continue
                given.network.gone.add(image.remote.introduction)
                with pytest.raises(GoneError):
                    await given.way.fetch(image)
                given.network.gone.clear()
            given.network.gone.add(image.remote.introduction)
            with pytest.raises(GoneError):
                await given.way.fetch(lent(lender, given.shelf))
            lender.close()
            assert not given.way.pulls
            assert given.chosen() == {Chosen.FASTER.value: 1, Chosen.FAILED.value: 1}

    run(scenario())


@pytest.mark.parametrize("engine", [True, False])
def test_an_embedding_of_another_host_comes_to_the_engine(engine: bool) -> None:
    async def scenario() -> None:
        network, shelf = FakeNetwork(), EmbeddingShelf(MIB)
        with closing(RemoteLender(shelf, FakeMemory(network))) as lender:
            async with setting(engine=engine) as given:
                given.incoming._remote = way = RemoteWay(
                    given.counts, lambda: FakeMemory(network), num_bytes=MIB, always=True, host=HERE
                )
                image = lent(lender, shelf)
                arrived = await given.incoming.arrive(at_once(image))
                assert arrived.way is Way.NIXL
                assert arrived.read_from == (None,), "it is lent once"
                expected = encoded(EmbeddingShelf(MIB)).unpack(width=WIDTH, merge_size=MERGE)
                found = given.tensor(arrived, 0, image)
                if given.scheduler is None:
                    assert (found == expected).all()
                else:
                    assert found.shape == (6, 0)
                    table = given.scheduler.table
                    await eventually(lambda: table.available("request", [image.digest]))
                    memory: EngineMemory = given.memories[0]
                    assert (memory.load(table.load(image.digest), expected.dtype) == expected).all()
                    given.scheduler.finished("request")
                del found
                given.incoming.close(arrived)
                arrived.held.clear()
                assert way.landing is not None
                landing = way.landing
                if not engine:
                    await eventually(lambda: is_free(landing))
                await eventually(lambda: is_free(shelf))
                assert given.counts.added[Count.EMBEDDINGS_ARRIVED, Way.NIXL.value] == 1
                assert given.counts.added[Count.EMBEDDING_BYTES_ARRIVED, Way.NIXL.value] == image.num_bytes

    run(scenario())


def test_one_that_cannot_be_read_is_for_the_object_store() -> None:
    async def scenario() -> None:
        network, shelf = FakeNetwork(), EmbeddingShelf(MIB)
        with closing(RemoteLender(shelf, FakeMemory(network))) as lender:
            async with setting(engine=False) as given:
                image = lent(lender, shelf)
                with pytest.raises(TransferFailedError, match="does not read"):
                    await given.incoming.arrive(at_once(image))
                given.incoming._remote = RemoteWay(
                    given.counts, lambda: FakeMemory(network), num_bytes=MIB, always=True, host=HERE
                )
                assert image.remote is not None
                network.gone.add(image.remote.introduction)
                with pytest.raises(TransferFailedError, match="has gone"):
                    await given.incoming.arrive(at_once(image))

    run(scenario())


def test_what_came_through_the_object_store_starts_a_trial() -> None:
    async def scenario() -> None:
        with closing(Setting()) as given:
            incoming = Incoming(given.counts, num_workers=1, remote=given.way)
            image = encoded(EmbeddingShelf(MIB))
            arrived = await incoming.arrive(at_once(image))
            incoming.close(arrived)
            assert given.way._trial is not None
            await given.way._trial
            assert given.way.pulls
            incoming.shut_down()

    run(scenario())
