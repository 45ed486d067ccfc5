"""Embeddings of encoders on other hosts, read by RDMA into a buffer beside the language model."""

from __future__ import annotations

from contextlib import closing
from typing import NoReturn

import pytest

from deployments.common.replica_errors import TransferFailedError
from deployments.llm.received import TransferPath
from deployments.telemetry.metrics import Counter
from deployments.transfer.remote_receiver import ReceiveBuffer
from deployments.transfer.remote_sender import RemoteSender
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.unix_socket import ListenerError
from deployments.vllm.connector.worker_memory import WorkerMemory
from tests.unit.deployments.llm.test_embedding_receiver import MERGE, eventually, run, setting
from tests.unit.deployments.samples import at_once
from tests.unit.deployments.transfer.fake_remote_memory import FakeMemory, FakeNetwork
from tests.unit.deployments.transfer.test_remote_sender import is_free, published
from tests.unit.deployments.transfer.test_same_host import WIDTH, encoded

MIB = 2**20


@pytest.mark.parametrize("engine", [True, False])
def test_an_embedding_of_another_host_comes_to_the_engine(engine: bool) -> None:
    async def scenario() -> None:
        network, store = FakeNetwork(), EmbeddingStore(MIB)
        with closing(RemoteSender(store, FakeMemory(network))) as sender:
            async with setting(engine=engine) as given:
                given.receiver._receive_buffer = buffer = ReceiveBuffer(FakeMemory(network), MIB)
                image = published(sender, store)
                arrived = await given.receiver.receive(at_once(image))
                assert arrived.path is TransferPath.NIXL
                assert arrived.locations == (None,), "it is published once"
                expected = encoded(EmbeddingStore(MIB)).unpack(width=WIDTH, merge_size=MERGE)
                found = given.tensor(arrived, 0)
                if given.scheduler is None:
                    assert (found == expected).all()
                else:
                    assert found.shape == (6, 0)
                    table = given.scheduler.table
                    await eventually(lambda: table.reserve("request", [image.digest]) == 1)
                    memory: WorkerMemory = given.memories[0]
                    assert (memory.load(table.plan_load(image.digest), expected.dtype) == expected).all()
                    given.scheduler.finish_request("request")
                del found
                given.receiver.close(arrived)
                if not engine:
                    await eventually(lambda: is_free(buffer))
                await eventually(lambda: is_free(store))
                assert given.counts.added[Counter.EMBEDDINGS_RECEIVED, TransferPath.NIXL.value] == 1
                assert given.counts.added[Counter.EMBEDDING_BYTES_RECEIVED, TransferPath.NIXL.value] == image.num_bytes

    run(scenario())


def test_one_that_cannot_be_read_is_for_the_object_store() -> None:
    async def scenario() -> None:
        network, store = FakeNetwork(), EmbeddingStore(MIB)
        with closing(RemoteSender(store, FakeMemory(network))) as sender:
            async with setting(engine=False) as given:
                image = published(sender, store)
                with pytest.raises(TransferFailedError, match="does not read"):
                    await given.receiver.receive(at_once(image))
                given.receiver._receive_buffer = ReceiveBuffer(FakeMemory(network), MIB)
                assert image.remote is not None
                network.gone.add(image.remote.agent_metadata)
                with pytest.raises(TransferFailedError, match="has gone"):
                    await given.receiver.receive(at_once(image))

    run(scenario())


def test_a_read_that_blocks_its_thread_fails_in_time() -> None:
    """NIXL may block the thread that polls, and with it the buffer's own timeout."""

    class Blocking(FakeMemory):
        def read(self, *_: object, **__: object) -> NoReturn:
            network.unblocked.wait()
            raise RuntimeError("NIXL returned")

    async def scenario() -> None:
        store = EmbeddingStore(MIB)
        with closing(RemoteSender(store, FakeMemory(network))) as sender:
            async with setting(engine=False) as given:
                given.receiver._receive_buffer = ReceiveBuffer(Blocking(network), MIB, timeout_s=0.05)
                with pytest.raises(TransferFailedError, match="timed out"):
                    await given.receiver.receive(at_once(published(sender, store)))
                network.unblocked.set()

    network = FakeNetwork()
    run(scenario())


def test_a_connection_that_cannot_be_ended_does_not_end_the_thread_that_reads() -> None:
    """Every later read waited for its timeout, and nobody heard that the thread had ended."""

    survived: list[ListenerError] = []

    class Stubborn(FakeMemory):
        def disconnect(self, agent_metadata: bytes) -> None:
            raise RuntimeError("NIXL refused")

    async def scenario() -> None:
        network, store = FakeNetwork(), EmbeddingStore(MIB)
        with closing(RemoteSender(store, FakeMemory(network))) as sender:
            async with setting(engine=False) as given:
                given.receiver._receive_buffer = buffer = ReceiveBuffer(
                    Stubborn(network), MIB, on_error=survived.append
                )
                gone, there = published(sender, store), published(sender, store)
                assert gone.remote is not None
                network.gone.add(gone.remote.agent_metadata)
                with pytest.raises(TransferFailedError, match="NIXL refused"):
                    await given.receiver.receive(at_once(gone))
                network.gone.clear()
                given.receiver.close(await given.receiver.receive(at_once(there)))
                given.receiver.check()
                assert survived == [ListenerError.MESSAGE]
                buffer.close()
                with pytest.raises(RuntimeError, match="reads from other hosts"):
                    given.receiver.check()

    run(scenario())
