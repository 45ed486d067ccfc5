"""Embeddings lent through shared memory: whole, for as long as they are held, and gone with whoever held them."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
from concurrent.futures import Future
from contextlib import closing
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from deployments.common.messages import EncodedImage
from deployments.encoder_replica.deployment import EncoderReplica
from deployments.encoder_replica.embedding_cache import EmbeddingCache
from deployments.transfer import unix_socket
from deployments.transfer.header import HEADER_BYTES, Header, WrongEmbeddingError, verify_header
from deployments.transfer.same_host import (
    PROTOCOL,
    EmbeddingUnavailableError,
    Hello,
    Lease,
    ShmClient,
    ShmServer,
)
from deployments.transfer.shared_memory import PAGE_BYTES
from deployments.transfer.shared_store import EmbeddingStore
from tests.unit.deployments.transfer.stored_embeddings import (
    PATIENCE_S,
    TIMINGS,
    WIDTH,
    barrier,
    digest,
    encoded,
    eventually,
    header,
    hold,
    read,
    tokens_of,
)

MANY = 10_000
"""Many times the messages that a socket has room for."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_embedding_arrives_bit_by_bit_and_uncopied(
    dtype: torch.dtype, store: EmbeddingStore, client: ShmClient
) -> None:
    image = encoded(store, dtype=dtype)
    assert store.offer(image)
    found = read(hold(client, image))
    assert found.dtype == dtype
    assert torch.equal(found, tokens_of(image))
    image.bits[0, 0] += 1
    assert torch.equal(found, tokens_of(image)), "it is the same memory"


def test_what_is_held_stays_and_what_is_released_makes_room(store: EmbeddingStore, client: ShmClient) -> None:
    whole = store.arena.free_bytes
    image = encoded(store)
    store.offer(image)
    held = hold(client, image)
    wanted, expected = Header.of(image), tokens_of(image).clone()
    del image
    gc.collect()
    assert store.arena.free_bytes < whole
    assert torch.equal(read(held), expected)
    held.release()
    eventually(lambda: store.arena.free_bytes == whole)
    with pytest.raises(EmbeddingUnavailableError):
        client.acquire(wanted).result(PATIENCE_S)


def test_each_answer_is_for_one_reader(store: EmbeddingStore, client: ShmClient) -> None:
    """The first reader's coming ended the offer to the second, whose embedding went with the first one's release."""
    image = encoded(store)
    for _ in range(2):  # two requests, and the encoder's cache drops the embedding
        store.offer(image)
    wanted = Header.of(image)
    del image
    client.acquire(wanted, direct_read=True).result(PATIENCE_S).release()  # one that it was not offered to
    client.acquire(wanted).result(PATIENCE_S).release()
    barrier(client)
    held = client.acquire(wanted).result(PATIENCE_S)
    assert torch.equal(read(held), tokens_of(encoded(EmbeddingStore(2**20))))
    held.release()
    barrier(client)
    assert store.arena.free_bytes == store.arena.num_bytes


def test_every_holder_counts(store: EmbeddingStore, client: ShmClient, server: ShmServer) -> None:
    whole = store.arena.free_bytes
    image = encoded(store)
    store.offer(image)
    first, second = hold(client, image), hold(client, image)
    with closing(ShmClient(server.address)) as other:
        third = hold(other, image)
        del image
        first.release()
        third.release()
        third.release()  # once too often: it is nobody else's
        with pytest.raises(EmbeddingUnavailableError):
            other.acquire(header(2)).result(PATIENCE_S)  # answers come in order: what was released before has been
        assert store.arena.free_bytes < whole
        second.release()
        eventually(lambda: store.arena.free_bytes == whole)


def test_a_release_is_of_the_copy_that_was_held(store: EmbeddingStore, client: ShmClient) -> None:
    """Of two copies of one digest the newer one was freed, whichever reader released its own: the next image was
    encoded into memory that the second reader was reading."""
    copies = []
    for seed in (1, 2):  # the first has left the encoder's cache when the image comes again
        image = encoded(store, 1, seed=seed)
        store.offer(image)
        copies.append(hold(client, image))
        del image
    first, second = copies
    assert first.offset != second.offset
    expected = read(second).clone()
    first.release()
    barrier(client)
    other = encoded(store, 2)
    assert store.offset_of(other) == first.offset
    assert torch.equal(read(second), expected)


def test_a_second_release_is_of_no_effect(store: EmbeddingStore, client: ShmClient) -> None:
    image = encoded(store)
    store.offer(image)
    first, second = hold(client, image), hold(client, image)
    del image
    first.release()
    first.release()
    barrier(client)
    assert store.arena.free_bytes < store.arena.num_bytes
    second.release()
    barrier(client)
    assert store.arena.free_bytes == store.arena.num_bytes


def test_a_hold_that_nobody_waits_for_any_more_is_released(
    store: EmbeddingStore, server: ShmServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled, lend = threading.Event(), store.acquire

    def lend_later(*arguments: Any, **others: Any) -> Any:
        assert cancelled.wait(PATIENCE_S)
        return lend(*arguments, **others)

    monkeypatch.setattr(store, "acquire", lend_later)
    with closing(ShmClient(server.address)) as client:
        store.offer(encoded(store))
        there, gone = client.acquire(header(1)), client.acquire(header(2))
        assert there.cancel()
        assert gone.cancel()
        cancelled.set()
        barrier(client)  # by then the borrower has had the answers
        barrier(client)  # and the server the release
        assert store.arena.free_bytes == store.arena.num_bytes
        assert not caplog.messages


def test_many_holds_are_acquired_and_released_at_once(store: EmbeddingStore, client: ShmClient) -> None:
    """Releases came from the thread that reads the server's answers and wanted the lock under which another thread was
    sending: with both sockets full, borrower and server waited for each other for ever."""
    store.offer(encoded(store))
    released = SimpleQueue[None]()

    def release(done: Future[Lease]) -> None:
        done.result().release()
        released.put(None)

    def acquire() -> None:
        for _ in range(MANY):
            client.acquire(header(1), direct_read=True).add_done_callback(release)

    threading.Thread(target=acquire, daemon=True).start()
    for _ in range(MANY):
        released.get(timeout=PATIENCE_S)
    store.acquire(digest(1))  # the offer has ended by that
    barrier(client)
    assert store.arena.free_bytes == store.arena.num_bytes


def test_a_server_answers_and_goes_on_after_an_error(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception ended the borrower's connection, and with it everything that it held."""
    lend = store.acquire

    def fail_for_the_second(found: str, *, offered: bool) -> Any:
        if found == digest(2):
            raise RuntimeError("of the second")
        return lend(found, offered=offered)

    def fail(_: str) -> None:
        raise RuntimeError("of whoever is told")

    monkeypatch.setattr(store, "acquire", fail_for_the_second)
    image = encoded(store)
    store.offer(image)
    with (
        closing(ShmServer(store, on_direct_read=fail)) as server,
        closing(ShmClient(server.address)) as client,
    ):
        held = hold(client, image)
        with pytest.raises(EmbeddingUnavailableError):
            client.acquire(header(2)).result(PATIENCE_S)
        client.acquire(header(1), direct_read=True).result(PATIENCE_S)
        client._sender.send({"neither": 1})
        barrier(client)
        assert caplog.messages == ["the handling of a message failed"] * 2 + ["a message could not be read"]
        assert torch.equal(read(held), tokens_of(image))


def test_a_client_goes_on_after_an_error(
    store: EmbeddingStore, server: ShmServer, caplog: pytest.LogCaptureFixture
) -> None:
    image = encoded(store)
    store.offer(image)
    with closing(ShmClient(server.address)) as client:
        (connection,) = server._listener._connections
        unix_socket.send(connection, {"lease": 1_000_000, "start": 0})
        hold(client, image)
        assert caplog.messages == ["the handling of a message failed"]
        assert client.is_alive


def test_a_server_accepts_clients_after_it_was_out_of_file_descriptors(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accepting thread ended at its first error; everybody who came later waited 5 s, and was refused."""
    accept = unix_socket.accept
    failed: list[socket.socket] = []

    def accept_the_second(listening: socket.socket) -> socket.socket:
        if not failed:
            failed.append(listening)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(unix_socket, "accept", accept_the_second)
    image = encoded(store)
    store.offer(image)
    with (
        closing(ShmServer(store)) as server,
        closing(ShmClient(server.address)) as client,
    ):
        hold(client, image)
        assert server.is_alive


def test_a_server_of_another_version_is_not_read_from(server: ShmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShmServer, "_hello", lambda self: Hello(self.store.arena.num_bytes))
    with pytest.raises(EmbeddingUnavailableError, match=f"protocol is None, the client's {PROTOCOL}"):
        ShmClient(server.address)


def test_an_embedding_of_private_memory_is_not_leased(store: EmbeddingStore, client: ShmClient) -> None:
    image = EncodedImage.pack(torch.zeros(6, WIDTH), digest(1), TIMINGS)
    assert store.offer(image)
    with pytest.raises(EmbeddingUnavailableError):
        client.acquire(Header.of(image)).result(PATIENCE_S)


def test_another_embedding_in_its_place_is_told_from_it(store: EmbeddingStore, client: ShmClient) -> None:
    image = encoded(store)
    store.offer(image)
    held = hold(client, image)
    store.offer(EncodedImage(digest(2), image.dtype, image.bits, TIMINGS))
    with pytest.raises(WrongEmbeddingError, match="or another"):
        read(held)


def test_memory_that_is_being_written_holds_nothing(store: EmbeddingStore, client: ShmClient) -> None:
    """Its last embedding's header does not outlive it."""
    image = encoded(store)
    store.offer(image)
    held = hold(client, image)
    start = held.offset
    del image
    held.release()
    eventually(lambda: store.arena.free_bytes == store.arena.num_bytes)
    kept = store.allocate(6, WIDTH, torch.bfloat16)
    assert kept is not None
    assert held.offset == start
    with pytest.raises(WrongEmbeddingError, match="no embedding"):
        read(held)


@pytest.mark.parametrize(
    "other",
    [
        Header(digest(2), "bfloat16", (6, 64)),
        Header(digest(1), "float32", (6, 64)),
        Header(digest(1), "bfloat16", (3, 128)),
    ],
)
def test_every_field_of_a_header_counts(other: Header) -> None:
    written = Header(digest(1), "bfloat16", (6, 64)).to_bytes()
    verify_header(written, Header(digest(1), "bfloat16", (6, 64)))
    with pytest.raises(WrongEmbeddingError):
        verify_header(written, other)


def test_a_torn_header_is_none() -> None:
    expected = Header(digest(1), "bfloat16", (6, 64))
    written = bytearray(expected.to_bytes())
    written[20] ^= 1
    with pytest.raises(WrongEmbeddingError, match="no embedding"):
        verify_header(bytes(written), expected)
    with pytest.raises(WrongEmbeddingError, match="no embedding"):
        verify_header(expected.to_bytes()[:10], expected)


def test_nobody_listens() -> None:
    with pytest.raises(EmbeddingUnavailableError):
        ShmClient(f"{unix_socket.host_id()}/vitray-nobody")


def test_a_server_that_closes_answers_those_who_wait_and_keeps_what_is_held(
    store: EmbeddingStore, server: ShmServer, client: ShmClient
) -> None:
    image = encoded(store)
    store.offer(image)
    held = hold(client, image)
    expected = read(held).clone()
    server.close()
    eventually(lambda: not client.is_alive)
    with pytest.raises(EmbeddingUnavailableError):
        client.acquire(Header.of(image)).result(PATIENCE_S)
    held.release()  # of no effect, and no error
    assert torch.equal(read(held), expected)


def test_another_user_is_not_served(monkeypatch: pytest.MonkeyPatch, store: EmbeddingStore, server: ShmServer) -> None:
    own, host = os.getuid(), unix_socket.host_id()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    monkeypatch.setattr(unix_socket, "host_id", lambda: host)
    with pytest.raises(EmbeddingUnavailableError):
        ShmClient(server.address)


def test_what_is_awaited_goes_before_what_is_cached() -> None:
    """An embedding that nobody but the cache refers to gives way; one that a reader holds stays where it is."""
    store = EmbeddingStore(4 * PAGE_BYTES)
    replica = EncoderReplica.__new__(EncoderReplica)
    replica._cache = EmbeddingCache(1 << 30)
    cache = replica._cache
    tokens = (PAGE_BYTES - HEADER_BYTES + PAGE_BYTES) // (2 * WIDTH)  # two pages with its header
    held = encoded(store, 1, tokens=tokens)
    cache.put(digest(1), held, held.num_bytes)
    other = encoded(store, 2, tokens=tokens)
    cache.put(digest(2), other, other.num_bytes)
    cache.get(digest(1))
    del other
    assert store.allocate(tokens, WIDTH, torch.bfloat16) is None
    first = replica._allocate(store, tokens, WIDTH, torch.bfloat16)
    assert first is not None
    assert digest(1) in cache
    assert digest(2) not in cache
    assert replica._allocate(store, tokens, WIDTH, torch.bfloat16) is None, "all of it is in use"
    assert digest(1) in cache, "its eviction would free nothing"
    assert store.offer(held), "what is held has not moved"
