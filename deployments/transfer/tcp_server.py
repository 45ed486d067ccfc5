"""Encoder's side of TCP: sends embeddings of its store to language models that cannot read its shared memory."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import psutil
import ray

from configs.schema import TcpConfig
from deployments.common.messages import EncodedImage
from deployments.transfer import tcp
from deployments.transfer.header import EMPTY_HEADER, Header
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.tcp import TcpError
from deployments.transfer.unix_socket import Listener

logger = logging.getLogger("ray.serve")

MAX_CONNECTIONS = 1024
"""Connections of one server; each has a thread."""
MAX_UNAUTHENTICATED = 64
"""Connections whose client has not proved yet that it knows the secret."""
BACKLOG = 128


class TcpServer:
    """Serves the embeddings of a store to authenticated clients, on its own threads, until `close`.

    While an embedding is sent, the server holds it: its memory is not reused.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        secret: bytes,
        config: TcpConfig,
        *,
        on_direct_read: Callable[[str], None] = lambda digest: None,
        on_tcp_error: Callable[[TcpError], None] = lambda _: None,
    ) -> None:
        """`on_direct_read`: as of `same_host.ShmServer`. `on_tcp_error` receives failed connections and transfers, on
        one of the server's threads.

        Raises OSError if no port of `config` is free, or its address is not one of this host.
        """
        self._store, self._secret = store, secret
        self._on_direct_read, self._on_tcp_error = on_direct_read, on_tcp_error
        self._unauthenticated = threading.Semaphore(MAX_UNAUTHENTICATED)
        self._listener = Listener(self._serve, name="tcp-server", listening=listen(config))
        self.address = self._listener.address
        """`HOST:PORT` for `TcpClient`."""

    @property
    def is_alive(self) -> bool:
        """False if the thread that accepts clients died; True after `close`."""
        return self._listener.is_alive

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        if self._listener.num_connections > MAX_CONNECTIONS or not self._unauthenticated.acquire(blocking=False):
            self._on_tcp_error(TcpError.LIMIT)
            return
        try:
            try:
                tcp.configure(connection)
                tcp.authenticate_client(connection, self._secret)
            finally:
                self._unauthenticated.release()
            while (request := _next_request(connection)) is not None:
                self._answer(connection, *request)
        except (OSError, ValueError) as error:
            self._on_tcp_error(tcp.error_of(error))
            logger.warning("a connection of a language model failed: %s", str(error))  # its frames hold an embedding

    def _answer(self, connection: socket.socket, digest: str, direct_read: bool) -> None:
        connection.settimeout(tcp.STALL_TIMEOUT_S)
        image = self._store.acquire(digest, offered=not direct_read)
        if image is None:
            connection.sendall(EMPTY_HEADER)
            return
        connection.sendall(Header.of(image).to_bytes())
        tcp.send(connection, _bytes_of(image), time.monotonic() + tcp.TRANSFER_TIMEOUT_S)
        if direct_read:
            self._on_direct_read(digest)


def listen(config: TcpConfig) -> tuple[socket.socket, str]:
    """Returns a listening socket, and the address `HOST:PORT` at which other hosts reach it. Raises OSError."""
    host = _resolve(config.listen_on)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = config.ports or (0, 0)
    for port in range(first, last + 1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)  # of two processes that bind a port at once, one fails here
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise OSError(error.errno, f"tcp.listen_on: cannot listen on {host}: {error.strerror}") from error
            continue
        bound = listener.getsockname()[1]
        reached = _node_address() if host in ("0.0.0.0", "::") else host
        return listener, f"{reached}:{bound}"
    raise OSError(errno.EADDRINUSE, f"tcp.ports: none of {first} to {last} is free on {host}")


def _resolve(listen_on: str | None) -> str:
    """Returns the address to listen on. `listen_on`: an address, the name of an interface, or None."""
    if listen_on is None:
        return _node_address()
    found = psutil.net_if_addrs().get(listen_on, ())
    return next((one.address for one in found if one.family is socket.AF_INET), listen_on)


def _node_address() -> str:
    return ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"


def _next_request(connection: socket.socket) -> tuple[str, bool] | None:
    """Waits for a request, and returns its digest and whether it is a direct read; None if the client has ended the
    connection. Raises ValueError for a frame that is not a request."""
    connection.settimeout(None)
    try:
        frame = tcp.receive(connection, tcp.REQUEST.size, float("inf"))
    except OSError:
        return None
    if frame[-1] > 1:
        raise ValueError(f"the last byte of a request is 0 or 1, got {frame[-1]}")
    digest, direct_read = tcp.REQUEST.unpack(frame)
    return digest.hex(), direct_read


def _bytes_of(image: EncodedImage) -> memoryview:
    return image.bits.reshape(-1).view(np.uint8).data
