"""Embedding transfer through shared memory of one host: `ShmServer` in the encoder, `ShmClient` in the LLM replica.

A client receives the file descriptor of the whole memory once, then the offset of each embedding that it acquires. An
acquired embedding stays in place until the client releases the lease or its process ends.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from msgspec import Struct, field
from msgspec.json import Decoder

from deployments.common.messages import EncodedImage
from deployments.transfer import unix_socket
from deployments.transfer.header import Header
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.unix_socket import Listener, Sender

logger = logging.getLogger("ray.serve")

TIMEOUT_S = 5.0
PROTOCOL = 3
"""Version of the messages below: during a rolling update, server and client may run different versions."""


class Hello(Struct, frozen=True):
    """First message of a server, which carries the file descriptor of its memory."""

    num_bytes: int
    protocol: int | None = None


class Acquire(Struct, frozen=True, tag=True):
    lease: int
    """Lease number, chosen by the client and unique within its connection."""
    digest: str
    direct_read: bool


class Release(Struct, frozen=True, tag=True):
    lease: int


class Acquired(Struct, frozen=True):
    """Answer of a server to `Acquire`."""

    lease: int
    offset: int | None = field(name="start")  # the name on the wire: see PROTOCOL
    """Offset of the header in bytes; None if the embedding is not available."""


HELLO = Decoder(Hello)
REQUEST: Decoder[Acquire | Release] = Decoder(Acquire | Release)
ANSWER = Decoder(Acquired)


class EmbeddingUnavailableError(RuntimeError):
    """The embedding is not available at its stated location; calling the encoder again may help."""


class ShmServer:
    """Serves the embeddings of a store to clients on this host, on its own threads, until `close`."""

    def __init__(self, store: EmbeddingStore, *, on_direct_read: Callable[[str], None] = lambda digest: None) -> None:
        """`on_direct_read` receives, on one of the server's threads, the digest of each embedding that was acquired
        without a call of the encoder."""
        self.store, self._on_direct_read = store, on_direct_read
        self._listener = Listener(self._serve, name="shm-server")
        self.address = self._listener.address

    @property
    def is_alive(self) -> bool:
        """False if the thread that accepts clients died; True after `close`."""
        return self._listener.is_alive

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        leased: dict[int, EncodedImage] = {}
        unix_socket.send(connection, self._hello(), self.store.arena.file)
        unix_socket.handle_messages(connection, REQUEST, lambda request, _: self._handle(request, connection, leased))

    def _hello(self) -> Hello:
        return Hello(self.store.arena.num_bytes, PROTOCOL)

    def _handle(self, request: Acquire | Release, connection: socket.socket, leased: dict[int, EncodedImage]) -> None:
        if isinstance(request, Release):
            leased.pop(request.lease, None)
            return
        offset = None
        try:
            image = self.store.acquire(request.digest, offered=not request.direct_read)
            offset = None if image is None else self.store.offset_of(image)
            if image is not None and offset is not None:
                leased[request.lease] = image
        finally:  # the client waits for an answer, even after an exception
            with contextlib.suppress(OSError):  # it disconnected, which the next `receive` reports
                unix_socket.send(connection, Acquired(request.lease, offset))
        if offset is not None and request.direct_read:
            self._on_direct_read(request.digest)


class ShmClient:
    """Client of one server, whose memory is `num_bytes` of `file`, which the engine maps. An acquired embedding is
    at `offset` of its lease, and stays there after the server has ended.

    client = ShmClient(image.server)
    lease = client.acquire(Header.of(image)).result()
    …  # the engine reads the embedding at lease.offset
    lease.release()
    """

    def __init__(self, address: str) -> None:
        """Raises EmbeddingUnavailableError if no server answers, as on another host, or if its protocol version
        differs."""
        self.address = address
        try:
            self._connection = unix_socket.connect(address, timeout_s=TIMEOUT_S)
            received = unix_socket.receive(self._connection, HELLO)
            if received is None or received[1] is None:
                raise ConnectionError("the server closed the connection")
        except OSError as error:
            raise EmbeddingUnavailableError(f"cannot connect to the encoder's embedding server: {error}") from error
        hello, self.file = received[0], received[1]
        weakref.finalize(self, os.close, self.file)
        if hello.protocol != PROTOCOL:
            self._connection.close()
            raise EmbeddingUnavailableError(f"the server's protocol is {hello.protocol}, the client's {PROTOCOL}")
        self.num_bytes = hello.num_bytes
        self._sender = Sender(self._connection)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[Header, Future[Lease]]] = {}
        self.is_alive = True
        threading.Thread(target=self._listen, name="shm-client", daemon=True).start()

    def acquire(self, header: Header, *, direct_read: bool = False) -> Future[Lease]:
        """Requests a lease. The future raises EmbeddingUnavailableError; cancelling it cancels or releases the lease.

        `direct_read`: the embedding's location is known from an earlier request, and no encoder was called for it.
        """
        acquired: Future[Lease] = Future()
        lease = next(self._ids)
        with self._lock:
            is_alive = self.is_alive
            if is_alive:
                self._pending[lease] = header, acquired
        if is_alive:
            self._send(Acquire(lease, header.digest, direct_read))
        else:
            acquired.set_exception(EmbeddingUnavailableError("the server has ended"))
        return acquired

    def release(self, lease: int) -> None:
        """Releases a lease; no effect if it was released before."""
        self._send(Release(lease))

    def close(self) -> None:
        """Closes the connection, which releases all leases."""
        self._sender.close()

    def _send(self, request: Acquire | Release) -> None:
        try:
            self._sender.send(request)
        except OSError:
            logger.debug("the server has gone", exc_info=True)  # `_listen` detects it too and fails pending requests

    def _listen(self) -> None:
        try:
            unix_socket.handle_messages(self._connection, ANSWER, self._handle)
        finally:
            with self._lock:
                self.is_alive = False
            for _, acquired in self._pending.values():
                if acquired.set_running_or_notify_cancel():
                    acquired.set_exception(EmbeddingUnavailableError("the server has ended"))
            self._pending.clear()
            self._sender.close()
            self._connection.close()

    def _handle(self, answer: Acquired, _: int | None) -> None:
        header, acquired = self._pending.pop(answer.lease)
        is_awaited = acquired.set_running_or_notify_cancel()
        if answer.offset is None:
            if is_awaited:
                acquired.set_exception(EmbeddingUnavailableError("the encoder has freed the embedding"))
        elif is_awaited:
            acquired.set_result(Lease(self, answer.lease, answer.offset, header))
        else:
            self.release(answer.lease)


@dataclass(frozen=True)
class Lease:
    """A reader's right to one copy of an embedding in memory of a server on this host, which stays in place until
    `release`."""

    client: ShmClient
    id: int
    offset: int
    """Offset of the header in bytes."""
    header: Header

    def release(self) -> None:
        self.client.release(self.id)
