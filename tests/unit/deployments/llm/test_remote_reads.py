"""Embeddings of encoders on other hosts, read by RDMA into a buffer beside the language model."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import NoReturn

import pytest

from deployments.common.replica_errors import TransferFailedError
from deployments.llm.received import TransferPath
from deployments.telemetry.metrics import Counter
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.remote_sender import RemoteSender
from deployments.transfer.shared_store import EmbeddingStore
from tests.unit.deployments.llm.receivers import eventually, received_by, run, setting
from tests.unit.deployments.samples import at_once
from tests.unit.deployments.transfer.fake_remote_memory import FakeMemory, FakeNetwork
from tests.unit.deployments.transfer.stored_embeddings import encoded, tokens_of
from tests.unit.deployments.transfer.test_remote_sender import is_free, published

MIB = 2**20


def test_an_embedding_of_another_host_comes_to_the_engine() -> None:
    async def scenario() -> None:
        network, store = FakeNetwork(), EmbeddingStore(MIB)
        buffer = ReceiveBuffer(MIB)
        with closing(RemoteSender(store, FakeMemory(network))) as sender:
            async with setting(receive_buffer=buffer, remote=FakeMemory(network)) as given:
                image = published(sender, store)
                arrived = await received_by(given.receiver, *at_once(image))
                assert arrived.path is TransferPath.NIXL
                assert arrived.locations == (None,), "it is published once"
                expected = tokens_of(encoded(EmbeddingStore(MIB)))
                await eventually(lambda: len(given.scheduler.table._digest_by_lease) == 1)
                (found,) = given.loaded(image)
                assert (found == expected).all()
                given.receiver.close(arrived)
                await eventually(lambda: is_free(buffer))
                await eventually(lambda: is_free(store))
                assert given.counts.added[Counter.EMBEDDINGS_RECEIVED, TransferPath.NIXL.value] == 1
                assert given.counts.added[Counter.EMBEDDING_BYTES_RECEIVED, TransferPath.NIXL.value] == image.num_bytes

    run(scenario())


def test_one_that_cannot_be_read_by_rdma_is_read_by_tcp() -> None:
    async def scenario() -> None:
        network = FakeNetwork()
        async with setting(remote=FakeMemory(network)) as given:
            with closing(RemoteSender(given.store, FakeMemory(network))) as sender:
                image = encoded(given.store)
                location = sender.publish(image)
                assert location is not None
                network.gone.add(location.agent_metadata)
                ticket = image.to_shared(given.server.address, given.tcp.address, location)
                arrived = await received_by(given.receiver, *at_once(ticket))
                assert arrived.path is TransferPath.TCP
                assert given.counts.added[Counter.RDMA_FALLBACKS, None] == 1
                (known,) = arrived.locations
                assert known is not None
                assert known.remote is None, "each repeat of the image tried RDMA again"
                given.receiver.close(arrived)
                with pytest.raises(TransferFailedError, match="no TCP address"):
                    await received_by(given.receiver, *at_once(dataclasses.replace(ticket, tcp="")))

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
            async with setting(receive_buffer=ReceiveBuffer(MIB, timeout_s=0.05), remote=Blocking(network)) as given:
                with pytest.raises(TransferFailedError, match="no TCP address"):
                    await received_by(given.receiver, *at_once(published(sender, store)))
                network.unblocked.set()

    network = FakeNetwork()
    run(scenario())


def test_a_connection_that_cannot_be_ended_does_not_end_the_thread_that_reads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every later read waited for its timeout, and nobody heard that the thread had ended."""

    class Stubborn(FakeMemory):
        def disconnect(self, agent_metadata: bytes) -> None:
            raise RuntimeError("NIXL refused")

    async def scenario() -> None:
        network, store = FakeNetwork(), EmbeddingStore(MIB)
        with closing(RemoteSender(store, FakeMemory(network))) as sender:
            async with setting(remote=Stubborn(network)) as given:
                gone, there = published(sender, store), published(sender, store)
                assert gone.remote is not None
                network.gone.add(gone.remote.agent_metadata)
                with pytest.raises(TransferFailedError, match="no TCP address"):
                    await received_by(given.receiver, *at_once(gone))
                network.gone.clear()
                given.receiver.close(await received_by(given.receiver, *at_once(there)))
                given.receiver.check()
                assert caplog.messages.count("an embedding could not be received") == 1
                assert given.receiver._remote_reader is not None
                given.receiver._remote_reader.close()
                with pytest.raises(RuntimeError, match="reads embeddings by RDMA"):
                    given.receiver.check()

    run(scenario())
