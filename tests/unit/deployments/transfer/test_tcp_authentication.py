"""Who may speak at all: both ends of a TCP connection prove that they know the secret, and strangers are bounded."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.schema import TcpConfig
from deployments.transfer import tcp, tcp_server
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.same_host import EmbeddingUnavailableError
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.tcp import REQUEST, AuthenticationError, TcpError
from deployments.transfer.tcp_client import TcpClient
from deployments.transfer.tcp_server import TcpServer
from tests.unit.deployments.transfer.stored_embeddings import (
    PATIENCE_S,
    encoded,
    eventually,
    header,
)
from tests.unit.deployments.transfer.tcp_peers import (
    LOCAL,
    OTHER,
    SECRET,
    connected,
    fetched,
    plays,
)


@pytest.mark.parametrize(("ours", "theirs"), [(OTHER, SECRET), (SECRET, OTHER), (b"", SECRET)])
def test_a_wrong_secret_is_refused_at_both_ends(
    store: EmbeddingStore, buffer: ReceiveBuffer, errors: Counter[TcpError], ours: bytes, theirs: bytes
) -> None:
    image = encoded(store)
    store.offer(image)
    seen: Counter[TcpError] = Counter()
    with (
        closing(TcpServer(store, theirs, LOCAL, on_tcp_error=lambda error: seen.update([error]))) as server,
        closing(TcpClient(server.address, ours, buffer, on_error=lambda error: errors.update([error]))) as client,
    ):
        with pytest.raises(EmbeddingUnavailableError, match="refused this process"):
            fetched(client, image)
        assert errors == {TcpError.AUTHENTICATION: 1}
        eventually(lambda: seen == {TcpError.AUTHENTICATION: 1})
        assert store.is_offered(image.digest), "nothing was sent"
        assert not client._connections


def test_a_server_that_does_not_know_the_secret_gets_no_request(
    buffer: ReceiveBuffer, errors: Counter[TcpError]
) -> None:
    """It accepts any client: one that listens at an address that an encoder had before."""
    got: list[bytes] = []

    def impostor(connection: socket.socket) -> None:
        connection.sendall(b"vitray-tcp-1" + bytes(32))
        tcp.receive(connection, 64, time.monotonic() + PATIENCE_S)
        connection.sendall(bytes(32))
        got.append(connection.recv(REQUEST.size))

    address, thread = plays(impostor)
    with (
        closing(TcpClient(address, SECRET, buffer, on_error=lambda error: errors.update([error]))) as client,
        pytest.raises(EmbeddingUnavailableError, match="server does not know"),
    ):
        client.fetch(header(1)).result(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert got == [b""]
    assert errors == {TcpError.AUTHENTICATION: 1}


def test_a_proof_cannot_be_returned_to_its_sender(store: EmbeddingStore) -> None:
    """A reflection: the server's own nonce and proof, from one connection, prove nothing on another."""
    with (
        closing(TcpServer(store, SECRET, LOCAL)) as server,
        connected(server, None) as first,
        connected(server, None) as second,
    ):
        nonce = tcp.receive(first, 44, time.monotonic() + PATIENCE_S)[-32:]
        tcp.receive(second, 44, time.monotonic() + PATIENCE_S)
        first.sendall(nonce + bytes(32))
        second.sendall(nonce + tcp._prove(SECRET, b"server", nonce, nonce))
        assert first.recv(1) == b""
        assert second.recv(1) == b""


def test_a_client_of_another_protocol_or_that_sends_nothing_is_ended(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT_S", 0.1)
    seen: Counter[TcpError] = Counter()
    with closing(TcpServer(store, SECRET, LOCAL, on_tcp_error=lambda error: seen.update([error]))) as server:
        with connected(server, None) as silent:
            assert len(tcp.receive(silent, 44, time.monotonic() + PATIENCE_S)) == 44
            assert silent.recv(1) == b""
        with connected(server, None) as http:
            http.sendall(b"GET / HTTP/1.1\r\nhost: encoder\r\nuser-agent: curious/1.0\r\n\r\n".ljust(64))
            tcp.receive(http, 44, time.monotonic() + PATIENCE_S)
            assert http.recv(1) == b""
        eventually(lambda: seen == {TcpError.TIMEOUT: 1, TcpError.AUTHENTICATION: 1})


def test_connections_are_bounded(store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "MAX_CONNECTIONS", 2)
    seen: Counter[TcpError] = Counter()
    with closing(TcpServer(store, SECRET, LOCAL, on_tcp_error=lambda error: seen.update([error]))) as server:
        held = [connected(server), connected(server)]
        with connected(server, None) as third:
            assert third.recv(1) == b""
        eventually(lambda: seen == {TcpError.LIMIT: 1})
        held.pop().close()
        eventually(lambda: server._listener.num_connections == 1)
        connected(server).close()
        held.pop().close()


def test_those_that_do_not_authenticate_keep_out_no_more_than_their_bound(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "MAX_UNAUTHENTICATED", 1)
    with closing(TcpServer(store, SECRET, LOCAL)) as server:
        with connected(server, None) as silent:
            tcp.receive(silent, 44, time.monotonic() + PATIENCE_S)
            with connected(server, None) as second:
                assert second.recv(1) == b""
        eventually(lambda: server._listener.num_connections == 0)
        connected(server).close()


def test_the_secret_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    assert tcp.get_secret(TcpConfig(secret_file=str(file)), "app") == SECRET
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"tcp.secret_file holds 5 bytes, the least are 32"):
        tcp.get_secret(TcpConfig(secret_file=str(file)), "app")


def test_a_secret_outside_ray_is_nobodys() -> None:
    assert tcp.get_secret(TcpConfig(), "app") != tcp.get_secret(TcpConfig(), "app")


@given(*2 * [st.binary(min_size=tcp.MIN_SECRET_BYTES, max_size=tcp.MIN_SECRET_BYTES)])
@example(SECRET, SECRET)
@settings(deadline=None, max_examples=50)
def test_only_equal_secrets_authenticate(ours: bytes, theirs: bytes) -> None:
    def serve() -> None:
        try:
            tcp.authenticate_client(there, theirs)
        except ConnectionError as error:
            failed.append(error)
        finally:
            there.close()

    failed: list[Exception] = []
    here, there = socket.socketpair()
    thread = threading.Thread(target=serve)
    thread.start()
    with here:
        try:
            tcp.authenticate_server(here, ours)
        except AuthenticationError as error:
            failed.append(error)
    thread.join(PATIENCE_S)
    assert bool(failed) == (ours != theirs)
