"""Language model's side of TCP: reads embeddings of one encoder into the receive buffer."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from deployments.transfer import tcp
from deployments.transfer.header import EMPTY_HEADER, HEADER_BYTES, Header, WrongEmbeddingError, verify_header
from deployments.transfer.receive_buffer import ReceiveBuffer, ReceivedEmbedding
from deployments.transfer.same_host import EmbeddingUnavailableError
from deployments.transfer.shared_memory import Allocation
from deployments.transfer.tcp import TcpError
from deployments.transfer.unix_socket import shut_down

UNUSED_S = 60.0
"""Time after which connections to a server without transfers are closed."""
MAX_STREAMS = 4
"""Connections to one server, each with a thread; further transfers wait."""


class TcpClient:
    """Client of one server. Thread-safe.

    client = TcpClient(image.tcp, secret, buffer)
    received = client.fetch(Header.of(image)).result()
    received.release()
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        buffer: ReceiveBuffer,
        *,
        on_error: Callable[[TcpError], None] = lambda _: None,
    ) -> None:
        """`address`: `HOST:PORT`. `on_error` receives failed transfers, on a thread of this client. Connects when an
        embedding is fetched."""
        host, _, port = address.rpartition(":")
        self._address, self._secret, self._buffer, self._on_error = (host, int(port)), secret, buffer, on_error
        self._threads = ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="tcp-client")
        self._idle: deque[socket.socket] = deque()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        self.last_used_s = time.monotonic()

    def fetch(self, header: Header, *, direct_read: bool = False) -> Future[ReceivedEmbedding]:
        """Reads an embedding. The future raises EmbeddingUnavailableError. `direct_read`: as of `ShmClient.acquire`."""
        self.last_used_s = now = time.monotonic()
        return self._threads.submit(self._fetch, header, direct_read, now + tcp.TRANSFER_TIMEOUT_S)

    def close(self) -> None:
        """Closes the connections; transfers in flight and those that wait fail."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                shut_down(connection)  # a thread that uses it closes it
        with suppress(IndexError):  # threads take some of them
            while True:
                self._end(self._idle.pop())
        self._threads.shutdown(wait=False)

    def _fetch(self, header: Header, direct_read: bool, deadline: float) -> ReceivedEmbedding:
        try:
            if self._closed:
                raise ConnectionAbortedError("its client was closed")
            if time.monotonic() >= deadline:
                raise TimeoutError("the transfers before it took too long")
            try:
                return self._fetch_over(self._idle.pop(), header, direct_read, deadline)
            except IndexError:
                pass
            except OSError as error:  # the server may have restarted since the last transfer, or the network failed
                if isinstance(error, TimeoutError) and error.errno is None:  # the time limit of this transfer
                    raise
            return self._fetch_over(self._connect(), header, direct_read, deadline)
        except (OSError, WrongEmbeddingError) as error:
            failed, reason = tcp.error_of(error), str(error)
        # Not chained: the frames of the first error hold memory of the buffer.
        self._on_error(failed)
        host, port = self._address
        raise EmbeddingUnavailableError(f"no embedding from the encoder at {host}:{port}: {reason}")

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, tcp.HANDSHAKE_TIMEOUT_S)
        with self._lock:
            self._connections.add(connection)
            closed = self._closed
        try:
            if closed:
                raise ConnectionAbortedError("the language model replica is shutting down")
            tcp.configure(connection)
            tcp.authenticate_server(connection, self._secret)
            connection.settimeout(tcp.STALL_TIMEOUT_S)
        except BaseException:
            self._end(connection)
            raise
        return connection

    def _fetch_over(
        self, connection: socket.socket, header: Header, direct_read: bool, deadline: float
    ) -> ReceivedEmbedding:
        is_reusable = True
        try:
            # Before the request: a server must not wait for this buffer in the middle of a transfer.
            memory = self._buffer.allocate(HEADER_BYTES + header.num_bytes)
            is_reusable = False
            connection.sendall(tcp.REQUEST.pack(bytes.fromhex(header.digest), direct_read))
            found = tcp.receive(connection, len(EMPTY_HEADER), deadline)
            if found != EMPTY_HEADER:
                verify_header(found, header)
                tcp.receive_into(connection, _content(memory, header), deadline)
            is_reusable = True
        finally:
            with self._lock:
                is_kept = is_reusable and not self._closed
                if is_kept:
                    self._idle.append(connection)
            if not is_kept:
                self._end(connection)
        if found == EMPTY_HEADER:
            del memory  # the error holds this frame
            raise EmbeddingUnavailableError("the encoder has freed the embedding")
        return self._buffer.complete(memory, header)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
            connection.close()


class TcpClients:
    """Clients of all servers. `fetch` and `close_unused` are called on one thread.

    clients = TcpClients(secret, buffer)
    received = clients.fetch(image.tcp, Header.of(image)).result()
    """

    def __init__(
        self, secret: bytes, buffer: ReceiveBuffer, *, on_error: Callable[[TcpError], None] = lambda _: None
    ) -> None:
        """As of `TcpClient`."""
        self._secret, self._buffer, self._on_error = secret, buffer, on_error
        self._clients: dict[str, TcpClient] = {}

    def fetch(self, address: str, header: Header, *, direct_read: bool = False) -> Future[ReceivedEmbedding]:
        """As `TcpClient.fetch`. Raises EmbeddingUnavailableError without an address."""
        if not address:
            raise EmbeddingUnavailableError("the embedding has no TCP address")
        if address not in self._clients:
            self._clients[address] = TcpClient(address, self._secret, self._buffer, on_error=self._on_error)
        return self._clients[address].fetch(header, direct_read=direct_read)

    def close_unused(self) -> None:
        """Closes clients that were not used for UNUSED_S, which is longer than any transfer."""
        for address, client in list(self._clients.items()):
            if time.monotonic() - client.last_used_s > UNUSED_S:
                self._clients.pop(address).close()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def _content(memory: Allocation, header: Header) -> memoryview:
    """Returns the bytes of the embedding in `memory`, after its header."""
    return memory.array((HEADER_BYTES + header.num_bytes,)).data[HEADER_BYTES:]
