"""Embeddings of encoders on other hosts, read by RDMA into a buffer beside the language model."""

from __future__ import annotations

from contextlib import closing
from typing import NoReturn

import pytest

from deployments.common.replica_errors import TransferFailedError
from deployments.llm.received import TransferPath
from deployments.telemetry.metrics import Counter
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.remote_sender import RemoteSender
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.unix_socket import ListenerError
from tests.unit.deployments.llm.test_embedding_receiver import eventually, received_by, run, setting
from tests.unit.deployments.samples import at_once
from tests.unit.deployments.transfer.fake_remote_memory import FakeMemory, FakeNetwork
from tests.unit.deployments.transfer.test_remote_sender import is_free, published
from tests.unit.deployments.transfer.test_same_host import encoded

MIB = 2**20


def test_an_embedding_of_another_host_comes_to_the_engine() -> None:
    async def scenario() -> None:
        network, store = FakeNetwork(), EmbeddingStore(MIB)
        buffer = ReceiveBuffer(FakeMemory(network), MIB)
        with closing(RemoteSender(store, FakeMemory(network))) as sender:
            async with setting(receive_buffer=buffer) as given:
                image = published(sender, store)
                arrived = await received_by(given.receiver, *at_once(image))
                assert arrived.path is TransferPath.NIXL
                assert arrived.locations == (None,), "it is published once"
                expected = encoded(EmbeddingStore(MIB)).unpack()
                await eventually(lambda: len(given.scheduler.table) == 1)
                (found,) = given.loaded(image)
                assert (found == expected).all()
                given.receiver.close(arrived)
                await eventually(lambda: is_free(buffer))
                await eventually(lambda: is_free(store))
                assert given.counts.added[Counter.EMBEDDINGS_RECEIVED, TransferPath.NIXL.value] == 1
                assert given.counts.added[Counter.EMBEDDING_BYTES_RECEIVED, TransferPath.NIXL.value] == image.num_bytes

    run(scenario())


def test_one_that_cannot_be_read_is_for_the_object_store() -> None:
    async def scenario() -> None:
        network, store = FakeNetwork(), EmbeddingStore(MIB)
        with closing(RemoteSender(store, FakeMemory(network))) as sender:
            image = published(sender, store)
            async with setting() as given:
                with pytest.raises(TransferFailedError, match="does not read"):
                    await received_by(given.receiver, *at_once(image))
            async with setting(receive_buffer=ReceiveBuffer(FakeMemory(network), MIB)) as given:
                assert image.remote is not None
                network.gone.add(image.remote.agent_metadata)
                with pytest.raises(TransferFailedError, match="has gone"):
                    await received_by(given.receiver, *at_once(image))

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
            async with setting(receive_buffer=ReceiveBuffer(Blocking(network), MIB, timeout_s=0.05)) as given:
                with pytest.raises(TransferFailedError, match="timed out"):
                    await received_by(given.receiver, *at_once(published(sender, store)))
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
            buffer = ReceiveBuffer(Stubborn(network), MIB, on_error=survived.append)
            async with setting(receive_buffer=buffer) as given:
                gone, there = published(sender, store), published(sender, store)
                assert gone.remote is not None
                network.gone.add(gone.remote.agent_metadata)
                with pytest.raises(TransferFailedError, match="NIXL refused"):
                    await received_by(given.receiver, *at_once(gone))
                network.gone.clear()
                given.receiver.close(await received_by(given.receiver, *at_once(there)))
                given.receiver.check()
                assert survived == [ListenerError.MESSAGE]
                buffer.close()
                with pytest.raises(RuntimeError, match="reads from other hosts"):
                    given.receiver.check()

    run(scenario())
