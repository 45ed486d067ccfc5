"""Encoder's side of TCP: sends embeddings of its store to language models that cannot read its shared memory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable

import numpy as np
import ray

from configs.schema import TcpConfig
from deployments.common.messages import EncodedImage
from deployments.transfer import tcp
from deployments.transfer.header import EMPTY_HEADER, Header
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.tcp import Request, TcpError
from deployments.transfer.unix_socket import Listener, OnError

logger = logging.getLogger("ray.serve")

MAX_CONNECTIONS = 1024
"""Connections of one server; each has a thread."""
MAX_UNAUTHENTICATED = 64
"""Connections whose client has not proved yet that it knows the secret."""
BACKLOG = 128
_SIOCGIFADDR = 0x8915
"""The ioctl that returns an interface's IPv4 address: netdevice(7)."""


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
        on_error: OnError = lambda _: None,
        on_tcp_error: Callable[[TcpError], None] = lambda _: None,
    ) -> None:
        """`on_direct_read`, `on_error`: as of `same_host.ShmServer`. `on_tcp_error` receives failed connections and
        transfers. All are called on the server's threads.

        Raises OSError if no port of `config` is free, or its address is not one of this host.
        """
        self._store, self._secret = store, secret
        self._on_direct_read, self._on_tcp_error = on_direct_read, on_tcp_error
        self._unauthenticated = threading.Semaphore(MAX_UNAUTHENTICATED)
        self._listener = Listener(self._serve, name="tcp-server", on_error=on_error, listening=listen(config))
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
                self._answer(connection, request)
        except (OSError, ValueError) as error:
            self._on_tcp_error(tcp.error_of(error))
            logger.warning("a connection of a language model failed: %s", str(error))  # its frames hold an embedding

    def _answer(self, connection: socket.socket, request: Request) -> None:
        connection.settimeout(tcp.STALL_TIMEOUT_S)
        image = self._store.acquire(request.digest, offered=not request.direct_read)
        if image is None:
            connection.sendall(EMPTY_HEADER)
            return
        connection.sendall(Header.of(image).to_bytes())
        tcp.send(connection, _bytes_of(image), time.monotonic() + tcp.TRANSFER_TIMEOUT_S)
        if request.direct_read:
            self._on_direct_read(request.digest)


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
    if listen_on not in (name for _, name in socket.if_nameindex()):
        return listen_on
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", listen_on.encode()))
    return socket.inet_ntoa(found[20:24])


def _node_address() -> str:
    return ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"


def _next_request(connection: socket.socket) -> Request | None:
    """Waits for a request. Returns None if the client has ended the connection."""
    connection.settimeout(None)
    try:
        frame = tcp.receive(connection, tcp.REQUEST_BYTES, float("inf"))
    except OSError:
        return None
    return Request.from_bytes(frame)


def _bytes_of(image: EncodedImage) -> memoryview:
    return image.bits.reshape(-1).view(np.uint8).data
