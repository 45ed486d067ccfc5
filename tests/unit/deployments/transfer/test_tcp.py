"""Embeddings read by TCP, over real sockets: frames, room, and peers that are slow, wrong or gone.

One file, since each test is a loss or a limit of the same transfer between one server and one client.
"""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import TcpConfig
from deployments.common.messages import EncodedImage
from deployments.transfer import shared_store, tcp, tcp_client, tcp_server
from deployments.transfer.header import EMPTY_HEADER, HEADER_BYTES, Header
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.same_host import EmbeddingUnavailableError
from deployments.transfer.shared_memory import PAGE_BYTES
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.tcp import REQUEST, TcpError
from deployments.transfer.tcp_client import MAX_STREAMS, TcpClient, TcpClients
from deployments.transfer.tcp_server import TcpServer
from deployments.transfer.unix_socket import shut_down
from tests.unit.deployments.transfer.stored_embeddings import (
    PATIENCE_S,
    WIDTH,
    digest,
    encoded,
    eventually,
    header,
    read,
    tokens_of,
)
from tests.unit.deployments.transfer.tcp_peers import (
    LOCAL,
    MIB,
    SECRET,
    Play,
    connected,
    fetched,
    is_free,
    plays,
)


@pytest.fixture
def server(store: EmbeddingStore) -> Iterator[TcpServer]:
    with closing(TcpServer(store, SECRET, LOCAL)) as server:
        yield server


@pytest.fixture
def client(server: TcpServer, buffer: ReceiveBuffer, errors: Counter[TcpError]) -> Iterator[TcpClient]:
    with closing(TcpClient(server.address, SECRET, buffer, on_error=lambda error: errors.update([error]))) as client:
        yield client


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 6, 700])
def test_an_embedding_arrives_as_it_is(
    store: EmbeddingStore, client: TcpClient, buffer: ReceiveBuffer, tokens: int, dtype: torch.dtype
) -> None:
    image = encoded(store, tokens=tokens, dtype=dtype)
    store.offer(image)
    received = client.fetch(Header.of(image)).result(PATIENCE_S)
    assert torch.equal(read(received), tokens_of(image))
    assert received.header == Header.of(image)
    assert not store.is_offered(image.digest)
    received.release()
    del received
    eventually(lambda: is_free(buffer))


def test_one_in_private_memory_arrives_too(store: EmbeddingStore, client: TcpClient) -> None:
    image = EncodedImage.pack(torch.randn(6, WIDTH), digest(1), encoded(store).timings)
    assert store.offset_of(image) is None
    assert store.offer(image)
    assert torch.equal(fetched(client, image), tokens_of(image))


def test_private_memory_of_offers_is_bounded(store: EmbeddingStore) -> None:
    timings = encoded(store).timings
    half = [EncodedImage.pack(torch.zeros(MIB // 2 // 4 // WIDTH, WIDTH), digest(n), timings) for n in range(3)]
    assert [store.offer(image) for image in half] == [True, True, False]
    store.acquire(digest(0))
    assert store.offer(half[2])


def test_private_memory_that_is_offered_twice_is_taken_once(store: EmbeddingStore) -> None:
    """The second reader of an embedding of more than half of the limit was turned away, and its request refused."""
    image = EncodedImage.pack(torch.zeros(MIB * 3 // 5 // 4 // WIDTH, WIDTH), digest(1), encoded(store).timings)
    assert [store.offer(image, reader=reader) for reader in (None, None, "other")] == [True] * 3


def test_what_is_sent_is_held_until_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its offer has ended, and the cache may have dropped it: its memory must not be reused meanwhile."""
    monkeypatch.setattr(tcp, "STALL_TIMEOUT_S", PATIENCE_S)
    store = EmbeddingStore(64 * MIB)
    with closing(TcpServer(store, SECRET, LOCAL)) as server, connected(server) as reader:
        image = encoded(store, tokens=32 * MIB // WIDTH // 2)
        wanted = Header.of(image)
        expected = tokens_of(image).clone()
        store.offer(image)
        del image
        reader.sendall(REQUEST.pack(bytes.fromhex(wanted.digest), False))
        assert tcp.receive(reader, len(EMPTY_HEADER), time.monotonic() + PATIENCE_S) == wanted.to_bytes()
        gc.collect()
        others = []
        while (room := store.allocate(16_384, WIDTH, torch.bfloat16)) is not None:
            others.append(room.fill_(7.0))
        content = tcp.receive(reader, wanted.num_bytes, time.monotonic() + PATIENCE_S)
        assert torch.equal(torch.frombuffer(bytearray(content), dtype=torch.bfloat16).view(expected.shape), expected)
        others.clear()
        gc.collect()
        eventually(lambda: store.arena.free_bytes == store.arena.num_bytes)


def test_what_was_freed_is_told_at_once_and_is_no_error(
    store: EmbeddingStore, client: TcpClient, errors: Counter[TcpError]
) -> None:
    for _ in range(3):
        with pytest.raises(EmbeddingUnavailableError, match="has freed"):
            client.fetch(header(1)).result(PATIENCE_S)
    assert not errors
    assert len(client._connections) == 1, "it is used again"


def test_an_offer_that_has_expired_is_gone(client: TcpClient, server: TcpServer) -> None:
    now = 0.0
    expiring = EmbeddingStore(MIB, offer_timeout_s=10.0, clock=lambda: now)
    server._store = expiring
    expiring.offer(encoded(expiring))
    now = 11.0
    expiring.expire_offers()
    with pytest.raises(EmbeddingUnavailableError, match="has freed"):
        client.fetch(header(1)).result(PATIENCE_S)


def test_a_direct_read_leaves_offers_to_their_readers_and_is_reported(
    store: EmbeddingStore, buffer: ReceiveBuffer
) -> None:
    direct: list[str] = []
    image = encoded(store)
    store.offer(image)
    with (
        closing(TcpServer(store, SECRET, LOCAL, on_direct_read=direct.append)) as server,
        closing(TcpClient(server.address, SECRET, buffer)) as client,
    ):
        fetched(client, image, direct_read=True)
        assert store.is_offered(image.digest)
        eventually(lambda: direct == [image.digest])


@pytest.mark.parametrize("readers", [1, 3])
def test_many_readers_get_what_they_asked_for(store: EmbeddingStore, server: TcpServer, readers: int) -> None:
    images = [encoded(store, number) for number in range(1, 17)]
    for image in images:
        store.publish(image)
    buffers = [ReceiveBuffer(MIB) for _ in range(readers)]
    clients = [TcpClient(server.address, SECRET, buffer) for buffer in buffers]
    futures = [(image, client.fetch(Header.of(image), direct_read=True)) for image in images for client in clients] * 2
    for image, future in futures:
        assert torch.equal(read(future.result(PATIENCE_S)), tokens_of(image))
    for client in clients:
        assert len(client._connections) <= tcp_client.MAX_STREAMS
        client.close()


def serving(answer: Play) -> Play:
    def play(connection: socket.socket) -> None:
        tcp.authenticate_client(connection, SECRET)
        tcp.receive(connection, REQUEST.size, time.monotonic() + PATIENCE_S)
        answer(connection)

    return play


def truncated(connection: socket.socket) -> None:
    connection.sendall(header(1).to_bytes() + bytes(10))


def in_the_header(connection: socket.socket) -> None:
    connection.sendall(header(1).to_bytes()[:10])


def another(connection: socket.socket) -> None:
    connection.sendall(header(2).to_bytes() + bytes(header(2).num_bytes))


def larger(connection: socket.socket) -> None:
    connection.sendall(header(1, tokens=7).to_bytes() + bytes(header(1, tokens=7).num_bytes))


def silent(connection: socket.socket) -> None:
    connection.sendall(header(1).to_bytes() + bytes(10))
    connection.recv(1)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (truncated, TcpError.CONNECTION),
        (in_the_header, TcpError.CONNECTION),
        (another, TcpError.MISMATCH),
        (larger, TcpError.MISMATCH),
        (silent, TcpError.TIMEOUT),
    ],
)
def test_a_bad_answer_fails_the_read_and_frees_its_memory(
    buffer: ReceiveBuffer,
    errors: Counter[TcpError],
    monkeypatch: pytest.MonkeyPatch,
    answer: Play,
    reason: TcpError,
) -> None:
    monkeypatch.setattr(tcp, "STALL_TIMEOUT_S", 0.2 if answer is silent else PATIENCE_S)
    address, thread = plays(serving(answer))
    with closing(TcpClient(address, SECRET, buffer, on_error=lambda error: errors.update([error]))) as client:
        with pytest.raises(EmbeddingUnavailableError):
            client.fetch(header(1)).result(PATIENCE_S)
        assert errors == {reason: 1}
        assert len(client._connections) == 0
    thread.join(PATIENCE_S)
    eventually(lambda: is_free(buffer))


def test_a_peer_that_sends_drop_by_drop_is_given_up_at_the_deadline(
    buffer: ReceiveBuffer, errors: Counter[TcpError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dripping(connection: socket.socket) -> None:
        connection.sendall(header(1).to_bytes())
        for _drop in range(header(1).num_bytes):
            connection.sendall(b"x")
            time.sleep(0.02)

    def play(connection: socket.socket) -> None:
        try:
            serving(dripping)(connection)
        except OSError:
            ended.set()

    ended = threading.Event()
    monkeypatch.setattr(tcp, "TRANSFER_TIMEOUT_S", 0.3)
    address, thread = plays(play)
    with (
        closing(TcpClient(address, SECRET, buffer, on_error=lambda error: errors.update([error]))) as client,
        pytest.raises(EmbeddingUnavailableError, match="missing at the deadline"),
    ):
        client.fetch(header(1)).result(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert ended.is_set()
    assert errors == {TcpError.TIMEOUT: 1}


def test_a_reader_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept the embedding's memory for as long as it was connected."""
    monkeypatch.setattr(tcp, "STALL_TIMEOUT_S", 0.2)
    store = EmbeddingStore(64 * MIB)
    image = encoded(store, tokens=48 * MIB // WIDTH // 2)
    store.offer(image)
    seen: Counter[TcpError] = Counter()
    with closing(TcpServer(store, SECRET, LOCAL, on_tcp_error=lambda error: seen.update([error]))) as server:
        with connected(server) as reader:
            reader.sendall(REQUEST.pack(bytes.fromhex(image.digest), False))
            del image
            eventually(lambda: seen == {TcpError.TIMEOUT: 1})
        gc.collect()
        eventually(lambda: store.arena.free_bytes == store.arena.num_bytes)


def test_a_full_buffer_makes_transfers_wait_for_room(
    store: EmbeddingStore, server: TcpServer, errors: Counter[TcpError]
) -> None:
    buffer = ReceiveBuffer(HEADER_BYTES + PAGE_BYTES, timeout_s=PATIENCE_S)
    images = [encoded(store, 1), encoded(store, 2)]
    for image in images:
        store.offer(image)
    with closing(TcpClient(server.address, SECRET, buffer)) as client:
        first = client.fetch(Header.of(images[0])).result(PATIENCE_S)
        second = client.fetch(Header.of(images[1]))
        time.sleep(0.05)
        assert not second.done()
        assert store.is_offered(digest(2)), "it is requested when there is room"
        first.release()
        assert torch.equal(read(second.result(PATIENCE_S)), tokens_of(images[1]))


def test_a_buffer_that_stays_full_fails_the_transfer(
    store: EmbeddingStore, server: TcpServer, client: TcpClient, buffer: ReceiveBuffer
) -> None:
    image = encoded(store)
    store.offer(image)
    fetched(client, image)
    (connection,) = client._idle
    held = buffer.allocate(MIB)
    with pytest.raises(EmbeddingUnavailableError, match=r"no room for an embedding of \d+ bytes in 0.2 s"):
        fetched(client, image)
    del held
    assert list(client._idle) == [connection], "nothing was sent by it: it is as good as before"
    store.offer(image)
    fetched(client, image)
    with pytest.raises(EmbeddingUnavailableError, match="does not fit the buffer"):
        client.fetch(header(1, tokens=MIB)).result(PATIENCE_S)


def test_the_first_that_waits_for_room_gets_it() -> None:
    """A large embedding waited until the small ones that came after it left room for it."""
    buffer = ReceiveBuffer(4 * PAGE_BYTES, timeout_s=PATIENCE_S)
    held, order = [buffer.allocate(PAGE_BYTES) for _ in range(4)], []

    def wait(pages: int) -> None:
        memory = buffer.allocate(pages * PAGE_BYTES)
        order.append(pages)
        del memory

    threads = []
    for pages in (3, 1):
        threads.append(threading.Thread(target=wait, args=(pages,)))
        threads[-1].start()
        time.sleep(0.05)
    held.pop()
    time.sleep(0.05)
    assert order == [], "room for the small one, which is not the first"
    held.clear()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert order == [3, 1]


def test_a_server_that_restarted_at_its_address_is_connected_anew(
    store: EmbeddingStore, buffer: ReceiveBuffer, errors: Counter[TcpError]
) -> None:
    image = encoded(store)
    store.publish(image)
    first = TcpServer(store, SECRET, LOCAL)
    port = int(first.address.rpartition(":")[2])
    with closing(TcpClient(first.address, SECRET, buffer, on_error=lambda error: errors.update([error]))) as client:
        fetched(client, image, direct_read=True)
        first.close()
        with pytest.raises(EmbeddingUnavailableError, match="refused"):
            fetched(client, image, direct_read=True)
        assert errors == {TcpError.CONNECTION: 1}
        eventually(lambda: first._listener.num_connections == 0)
        with closing(TcpServer(store, SECRET, TcpConfig(listen_on="127.0.0.1", ports=(port, port)))):
            fetched(client, image, direct_read=True)
    assert errors == {TcpError.CONNECTION: 1}


def test_a_connection_that_the_server_ended_meanwhile_costs_nothing(
    store: EmbeddingStore, server: TcpServer, client: TcpClient, errors: Counter[TcpError]
) -> None:
    image = encoded(store)
    store.publish(image)
    fetched(client, image, direct_read=True)
    for connection in list(server._listener._connections):
        shut_down(connection)
    eventually(lambda: server._listener.num_connections == 0)
    fetched(client, image, direct_read=True)
    assert not errors


class Idle(socket.socket):
    """A connection whose next use fails."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def sendall(self, *_: object) -> None:
        raise self.error


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ECONNRESET])
def test_idle_connections_that_an_outage_ended_cost_nothing(
    store: EmbeddingStore, client: TcpClient, errors: Counter[TcpError], number: int
) -> None:
    """Keep-alive ends them by ETIMEDOUT, which cost one attempt for each of them."""
    image = encoded(store)
    store.publish(image)
    client._idle.append(Idle(OSError(number, os.strerror(number))))
    assert torch.equal(fetched(client, image, direct_read=True), tokens_of(image))
    assert not errors


def test_a_transfer_that_takes_too_long_is_not_tried_again(client: TcpClient, errors: Counter[TcpError]) -> None:
    client._idle.append(Idle(TimeoutError("timed out")))
    with pytest.raises(EmbeddingUnavailableError, match="timed out"):
        client.fetch(header(1)).result(PATIENCE_S)
    assert errors == {TcpError.TIMEOUT: 1}


def test_transfers_that_wait_behind_others_end_in_time(
    client: TcpClient, errors: Counter[TcpError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each took the time of a connection to a host that is silent, one after the other."""
    connects: list[float] = []
    is_late, now_s = threading.Event(), [0.0]

    def connect() -> NoReturn:
        connects.append(now_s[0])
        assert is_late.wait(PATIENCE_S)
        raise TimeoutError("silent")

    monkeypatch.setattr(client, "_connect", connect)
    monkeypatch.setattr(tcp_client, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    futures = [client.fetch(header(1)) for _ in range(5 * MAX_STREAMS)]
    eventually(lambda: len(connects) == MAX_STREAMS)
    now_s[0] = tcp.TRANSFER_TIMEOUT_S
    is_late.set()
    for future in futures:
        with pytest.raises(EmbeddingUnavailableError):
            future.result(PATIENCE_S)
    assert len(connects) == MAX_STREAMS
    assert errors == {TcpError.TIMEOUT: len(futures)}


def test_transfers_that_wait_fail_when_the_client_is_closed(
    client: TcpClient, errors: Counter[TcpError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were cancelled, which the request took for its own cancellation, and then for success."""
    closed = threading.Event()

    def connect() -> NoReturn:
        assert closed.wait(PATIENCE_S)
        raise ConnectionAbortedError("closed")

    monkeypatch.setattr(client, "_connect", connect)
    futures = [client.fetch(header(1)) for _ in range(2 * MAX_STREAMS)]
    client.close()
    closed.set()
    for future in futures:
        with pytest.raises(EmbeddingUnavailableError, match="closed"):
            future.result(PATIENCE_S)
    assert errors == {TcpError.CONNECTION: len(futures)}


def test_closing_ends_transfers_in_flight(buffer: ReceiveBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(connection: socket.socket) -> None:
        requested.set()
        connection.recv(1)

    requested = threading.Event()
    address, _ = plays(serving(hang))
    client = TcpClient(address, SECRET, buffer)
    future = client.fetch(header(1))
    assert requested.wait(PATIENCE_S)
    (connection,) = client._connections
    close, closed_by = socket.socket.close, []

    def record(closed: socket.socket) -> None:
        if closed is connection:
            closed_by.append(threading.current_thread().name)
        close(closed)

    monkeypatch.setattr(socket.socket, "close", record)
    client.close()
    eventually(future.done)
    assert set(closed_by) == {"tcp-client_0"}, "no other thread closes what a thread reads"
    with pytest.raises(EmbeddingUnavailableError):
        future.result(PATIENCE_S)
    eventually(lambda: is_free(buffer))


def test_clients_without_transfers_are_closed(
    store: EmbeddingStore, server: TcpServer, buffer: ReceiveBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = encoded(store)
    store.publish(image)
    clients = TcpClients(SECRET, buffer)
    clients.fetch(server.address, Header.of(image), direct_read=True).result(PATIENCE_S)
    clients.close_unused()
    assert len(clients._clients) == 1
    monkeypatch.setattr(tcp_client, "UNUSED_S", -1.0)
    clients.close_unused()
    assert len(clients._clients) == 0
    eventually(lambda: server._listener.num_connections == 0)
    with pytest.raises(EmbeddingUnavailableError, match="no TCP address"):
        clients.fetch("", Header.of(image))


def test_a_bad_request_of_an_authenticated_client_is_counted_and_ends_its_connection_alone(
    store: EmbeddingStore, buffer: ReceiveBuffer
) -> None:
    seen: Counter[TcpError] = Counter()
    image = encoded(store)
    store.publish(image)
    with closing(TcpServer(store, SECRET, LOCAL, on_tcp_error=lambda error: seen.update([error]))) as server:
        with connected(server) as bad:
            bad.sendall(b"\xff" * REQUEST.size)
            assert bad.recv(1) == b""
        eventually(lambda: seen == {TcpError.MISMATCH: 1})
        with closing(TcpClient(server.address, SECRET, buffer)) as client:
            fetched(client, image, direct_read=True)


def test_an_error_of_the_store_is_logged_and_the_next_client_is_served(
    store: EmbeddingStore,
    buffer: ReceiveBuffer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    image = encoded(store)
    store.offer(image)
    with (
        closing(TcpServer(store, SECRET, LOCAL)) as server,
        closing(TcpClient(server.address, SECRET, buffer)) as client,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(shared_store.EmbeddingStore, "acquire", lambda *_, **__: 1 / 0)
            with pytest.raises(EmbeddingUnavailableError):
                fetched(client, image)
        fetched(client, image)
        assert caplog.messages == ["a connection could not be served"]
        assert server.is_alive


def test_ports_are_taken_from_the_range(store: EmbeddingStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        config = local_ports(first, first + 3)
        with closing(TcpServer(store, SECRET, config)) as server:
            assert first < int(server.address.rpartition(":")[2]) <= first + 3
        with pytest.raises(OSError, match=rf"none of {first} to {first} is free on 127.0.0.1"):
            tcp_server.listen(local_ports(first, first))


def local_ports(first: int, last: int) -> TcpConfig:
    return TcpConfig(listen_on="127.0.0.1", ports=(first, last))


def test_an_interface_is_listened_on_by_its_address() -> None:
    for listen_on in ("lo", "127.0.0.1", None):
        listener, address = tcp_server.listen(TcpConfig(listen_on=listen_on))
        with listener:
            assert address.startswith("127.0.0.1:")
    listener, address = tcp_server.listen(TcpConfig(listen_on="0.0.0.0"))
    with listener:
        assert address.startswith("127.0.0.1:"), "that of the node"
    with pytest.raises(OSError, match=r"tcp.listen_on: cannot listen on 192.0.2.1"):
        tcp_server.listen(TcpConfig(listen_on="192.0.2.1"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_accepting_thread_is_noticed(store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(socket.socket, "accept", die)
    with closing(TcpServer(store, SECRET, LOCAL)) as server:
        server._listener._thread.join(PATIENCE_S)
        assert not server.is_alive
    assert server.is_alive, "it was closed"


@given(st.binary(min_size=32, max_size=32), st.booleans(), st.lists(st.integers(1, 9), min_size=1))
@settings(deadline=None)
def test_frames_arrive_in_any_pieces(content: bytes, direct_read: bool, pieces: list[int]) -> None:
    frame, sizes = REQUEST.pack(content, direct_read), pieces * REQUEST.size
    ours, theirs = socket.socketpair()
    with ours, theirs:
        while frame:
            piece, frame = frame[: sizes[0]], frame[sizes.pop(0) :]
            ours.sendall(piece)
        assert tcp_server._next_request(theirs) == (content.hex(), direct_read)


@given(st.binary(max_size=2 * REQUEST.size))
@settings(deadline=None)
def test_any_bytes_are_a_request_or_refused(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        shut_down(ours)
        frame = sent[: REQUEST.size]
        try:
            request = tcp_server._next_request(theirs)
        except ValueError:
            assert frame[-1] > 1
        else:
            if request is None:
                assert len(frame) < REQUEST.size
            else:
                assert REQUEST.pack(bytes.fromhex(request[0]), request[1]) == frame
