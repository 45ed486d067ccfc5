"""Embeddings read from another host's memory: whole or not at all, bounded, and given back at both ends."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing

import pytest
import torch

from deployments.common.messages import SharedEmbedding
from deployments.transfer import remote_sender
from deployments.transfer.header import HEADER_BYTES
from deployments.transfer.receive_buffer import ReceiveBuffer, ReceivedEmbedding
from deployments.transfer.remote_reader import RemoteReader
from deployments.transfer.remote_sender import RemoteSender
from deployments.transfer.same_host import EmbeddingUnavailableError
from deployments.transfer.shared_store import EmbeddingStore
from tests.unit.deployments.transfer.fake_remote_memory import FakeMemory, FakeNetwork
from tests.unit.deployments.transfer.stored_embeddings import PATIENCE_S, encoded, eventually, read, tokens_of

SHORT_S = 0.05
OFFER_TIMEOUT_S = 600.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> EmbeddingStore:
    return EmbeddingStore(2**20, offer_timeout_s=OFFER_TIMEOUT_S, clock=clock)


@pytest.fixture
def sender(store: EmbeddingStore, network: FakeNetwork) -> Iterator[RemoteSender]:
    with closing(RemoteSender(store, FakeMemory(network))) as sender:
        yield sender


@pytest.fixture
def reader(network: FakeNetwork) -> Iterator[RemoteReader]:
    with closing(RemoteReader(FakeMemory(network), ReceiveBuffer(4 * HEADER_BYTES, timeout_s=PATIENCE_S))) as reader:
        yield reader


def published(sender: RemoteSender, store: EmbeddingStore, number: int = 1) -> SharedEmbedding:
    image = encoded(store, number)
    found = sender.publish(image)
    assert found is not None
    return image.to_shared(remote=found)


def is_free(holder: EmbeddingStore | ReceiveBuffer) -> bool:
    gc.collect()
    return holder.arena.free_bytes == holder.arena.num_bytes


def under_way(reader: RemoteReader) -> bool:
    return any(pending.read is not None for pending in reader._pending)


def test_an_embedding_arrives_bit_by_bit_and_both_ends_give_back(
    sender: RemoteSender, reader: RemoteReader, store: EmbeddingStore
) -> None:
    image = published(sender, store)
    received = reader.receive(image).result(PATIENCE_S)
    expected = tokens_of(encoded(EmbeddingStore(2**20)))
    assert torch.equal(read(received), expected)
    eventually(lambda: not sender._leases and is_free(store))
    kept = read(received)
    received.release()
    assert not is_free(reader._buffer), "vLLM may still read it"
    del kept
    eventually(lambda: is_free(reader._buffer))


def test_what_nobody_reads_is_published_for_a_bounded_time(
    sender: RemoteSender, store: EmbeddingStore, clock: Clock
) -> None:
    image = published(sender, store)
    clock.now = OFFER_TIMEOUT_S - 1
    published(sender, store, 2)
    store.expire_offers()
    assert len(sender._leases) == 2
    clock.now = OFFER_TIMEOUT_S
    store.expire_offers()
    eventually(lambda: len(sender._leases) == 1)
    assert not is_free(store)
    clock.now = 2 * OFFER_TIMEOUT_S
    store.expire_offers()
    eventually(lambda: is_free(store))
    assert image.remote is not None


def test_the_network_is_polled_slowly_once_no_reader_is_expected(
    sender: RemoteSender, store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader of one request had gone: the encoder asked the process of NIXL thousands of times a second, for ten
    minutes."""
    polls: list[int] = []
    get_notifications = sender._rdma.get_notifications

    def poll() -> list[bytes]:
        polls.append(1)
        return get_notifications()

    monkeypatch.setattr(sender._rdma, "get_notifications", poll)
    monkeypatch.setattr(remote_sender, "RECENT_S", 0.0)
    monkeypatch.setattr(remote_sender, "SLOW_POLL_S", 10 * PATIENCE_S)
    published(sender, store)
    eventually(lambda: len(polls) > 0)
    time.sleep(0.1)
    num_polls = len(polls)
    assert num_polls <= 2
    published(sender, store, 2)
    eventually(lambda: len(polls) > num_polls)


def test_what_is_not_in_the_store_is_not_published(sender: RemoteSender, store: EmbeddingStore) -> None:
    assert sender.publish(encoded(EmbeddingStore(2**20))) is None
    assert len(sender._leases) == 0


def test_another_embedding_in_its_place_is_noticed(
    sender: RemoteSender, reader: RemoteReader, store: EmbeddingStore, clock: Clock
) -> None:
    image = published(sender, store, 1)
    clock.now = OFFER_TIMEOUT_S
    store.expire_offers()
    assert is_free(store)
    published(sender, store, 2)
    with pytest.raises(EmbeddingUnavailableError, match="embedding of 000000000000"):
        reader.receive(image).result(PATIENCE_S)
    eventually(lambda: is_free(reader._buffer))


@pytest.mark.parametrize("read", [1, 2])
def test_an_embedding_that_changes_while_it_is_read_is_not_taken(
    read: int, sender: RemoteSender, reader: RemoteReader, store: EmbeddingStore, network: FakeNetwork
) -> None:
    image = published(sender, store)
    reads = []

    def replaced() -> None:
        reads.append(1)
        if len(reads) == read:
            store.arena.write(0, bytes(64))  # as when its memory is given to the next one

    network.between = replaced
    with pytest.raises(EmbeddingUnavailableError, match="no embedding"):
        reader.receive(image).result(PATIENCE_S)
    eventually(lambda: is_free(reader._buffer))


def test_an_encoder_that_is_gone_is_told_and_connected_to_anew(
    sender: RemoteSender, reader: RemoteReader, store: EmbeddingStore, network: FakeNetwork
) -> None:
    image = published(sender, store)
    assert image.remote is not None
    network.gone.add(image.remote.agent_metadata)
    with pytest.raises(EmbeddingUnavailableError, match="has gone"):
        reader.receive(image).result(PATIENCE_S)
    assert isinstance(reader._rdma, FakeMemory)
    assert reader._rdma.forgotten == [image.remote.agent_metadata]
    network.gone.clear()
    assert reader.receive(image).result(PATIENCE_S).offset == 0


def test_a_read_that_does_not_end_is_given_up_and_its_memory_kept_until_it_has(
    sender: RemoteSender, store: EmbeddingStore, network: FakeNetwork
) -> None:
    """NIXL releases a read that is under way, and goes on writing."""
    with closing(RemoteReader(FakeMemory(network), ReceiveBuffer(4 * HEADER_BYTES, timeout_s=SHORT_S))) as reader:
        network.stuck = True
        with pytest.raises(EmbeddingUnavailableError, match=r"no bytes .* in 0.05 s"):
            reader.receive(published(sender, store)).result(PATIENCE_S)
        assert not is_free(reader._buffer)
        network.stuck = False
        eventually(lambda: is_free(reader._buffer))


def test_what_is_in_flight_is_bounded_and_the_next_waits(
    sender: RemoteSender, reader: RemoteReader, store: EmbeddingStore
) -> None:
    images = [published(sender, store, number) for number in (1, 2, 3)]
    first, second, third = map(reader.receive, images)
    held = [first.result(PATIENCE_S), second.result(PATIENCE_S)]
    assert reader._buffer.arena.free_bytes == 0
    assert not third.done()
    held.pop().release()
    del first, second
    third.result(PATIENCE_S)
    assert reader._buffer.arena.free_bytes == 0


def test_without_room_in_time_it_is_given_up(sender: RemoteSender, store: EmbeddingStore, network: FakeNetwork) -> None:
    with closing(RemoteReader(FakeMemory(network), ReceiveBuffer(2 * HEADER_BYTES, timeout_s=PATIENCE_S))) as reader:
        kept = reader.receive(published(sender, store)).result(PATIENCE_S)
        reader.timeout_s = SHORT_S
        with pytest.raises(EmbeddingUnavailableError, match=r"no room for an embedding of \d+ bytes"):
            reader.receive(published(sender, store, 2)).result(PATIENCE_S)
        assert kept.offset == 0


def test_what_could_never_fit_is_refused_at_once(sender: RemoteSender, store: EmbeddingStore) -> None:
    with (
        closing(RemoteReader(FakeMemory(FakeNetwork()), ReceiveBuffer(HEADER_BYTES))) as reader,
        pytest.raises(EmbeddingUnavailableError, match=r"embedding of \d+ bytes does not fit the buffer of 4096"),
    ):
        reader.receive(published(sender, store)).result(0)


def test_who_leaves_while_it_is_read_holds_nothing(
    sender: RemoteSender, reader: RemoteReader, store: EmbeddingStore, network: FakeNetwork
) -> None:
    network.stuck = True
    coming: Future[ReceivedEmbedding] = reader.receive(published(sender, store))
    eventually(lambda: under_way(reader))
    assert coming.cancel()
    network.stuck = False
    eventually(lambda: is_free(reader._buffer))


def test_one_that_ends_fails_what_it_was_reading(
    sender: RemoteSender, reader: RemoteReader, store: EmbeddingStore, network: FakeNetwork
) -> None:
    network.stuck = True
    image = published(sender, store)
    coming = reader.receive(image)
    eventually(lambda: under_way(reader))
    reader.close()
    with pytest.raises(EmbeddingUnavailableError, match="is shutting down"):
        coming.result(PATIENCE_S)
    assert isinstance(reader._rdma, FakeMemory)
    assert image.remote is not None
    assert reader._rdma.forgotten == [image.remote.agent_metadata]


def test_an_error_of_another_kind_does_not_end_the_reading(
    sender: RemoteSender, reader: RemoteReader, store: EmbeddingStore, network: FakeNetwork
) -> None:
    def fail() -> None:
        raise TypeError("an argument that NIXL does not take")

    network.between = fail
    with pytest.raises(EmbeddingUnavailableError, match="does not take"):
        reader.receive(published(sender, store)).result(PATIENCE_S)
    network.between = lambda: None
    reader.receive(published(sender, store)).result(PATIENCE_S)
