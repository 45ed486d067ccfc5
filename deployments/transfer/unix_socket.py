"""Messages between processes of one host: JSON over abstract Unix sockets, with an optional file descriptor.

Both ends must run as the same user. A connection ends with either process, even a killed one, and the other process
detects it at once. Messages are msgspec structs; the receiver's decoder defines those that it accepts.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.json import Decoder

logger = logging.getLogger("ray.serve")

T = TypeVar("T")

MAX_PACKET_BYTES = 65_536
MAX_BACKLOG = 100_000
"""Limit of the packets queued for one peer; those that are sent per embedding have some hundred bytes each."""
ACCEPT_RETRY_S = 0.1
"""Pause after a failed accept: without free file descriptors the next attempt would fail at once."""
CLOSE_TIMEOUT_S = 1.0
"""Time for the accepting thread to end."""
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def host_id() -> str:
    """Identifies the scope of these sockets: this boot of this machine, the container's network, and the user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}/{os.getuid()}"


def host_of(address: str) -> str:
    """Returns the `host_id` of a process that listens on this address."""
    return address.rpartition("/")[0]


def listen() -> tuple[socket.socket, str]:
    """Returns a listening socket and its address, which names the host."""
    address = f"{host_id()}/vitray-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + address)
    listener.listen()
    return listener, address


def accept(listener: socket.socket) -> socket.socket:
    """Returns the next connection of the same user; closes others. Raises OSError once `listener` is shut down."""
    while True:
        connection, _ = listener.accept()
        if _is_same_user(connection):
            return connection
        connection.close()


def connect(address: str, *, timeout_s: float) -> socket.socket:
    """Raises OSError if no process of this user listens there. `timeout_s` applies to later calls on the socket too."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect("\0" + address)
        if not _is_same_user(connection):
            raise ConnectionRefusedError("another user listens there")
    except BaseException:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, message: object, file: int | None = None) -> None:
    """Sends a message; blocks while the socket's buffer is full. A thread that the peer may wait for, and any holder of
    a lock that such a thread takes, must use a `Sender` instead.

    Raises OSError if the peer has ended, ValueError for a packet over MAX_PACKET_BYTES.
    """
    _transmit(connection, _encode(message), file)


def receive(connection: socket.socket, decoder: Decoder[T]) -> tuple[T, int | None] | None:
    """Returns the next message and its file descriptor, which the caller closes; None if the peer has ended.

    Raises OSError, TimeoutError among them, and ValueError for a message that `decoder` does not accept.
    """
    packet, files, _, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, 1)
    if not packet:
        return None
    try:
        return decoder.decode(packet), files[0] if files else None
    except Exception:
        for file in files:
            os.close(file)
        raise


def shut_down(connection: socket.socket) -> None:
    """Ends the connection for both sides, and for threads of this process that wait on it.

    Of several threads that use a connection, the reader closes the descriptor, under a lock that the others hold while
    they shut it down. Otherwise a thread that is about to read might read from another connection, which has got the
    number of the closed descriptor.
    """
    with contextlib.suppress(OSError):  # the peer closed it first
        connection.shutdown(socket.SHUT_RDWR)


class Sender:
    """Sends packets over one connection, in order and from any thread, without ever waiting for the peer.

    Packets that do not fit the socket's buffer are queued, and a thread sends them as the peer reads. A peer that does
    not read until the queue is full counts as dead: the connection is shut down.

        sender = Sender(connection)
        sender.send(Release(7))
        sender.close()
    """

    def __init__(self, connection: socket.socket) -> None:
        """Removes the timeout of `connection`, which its reader closes: the sender has a descriptor of its own."""
        connection.settimeout(None)
        self._connection = connection.dup()
        self._lock = threading.Lock()  # never held while blocking
        self._backlog: deque[tuple[bytes, int | None]] = deque()  # while not empty, one thread sends its head
        self._ended = self._closed = False

    def close(self) -> None:
        """Ends the connection, which its reader detects. Queued packets are lost."""
        with self._lock:
            self._ended = self._closed = True
            shut_down(self._connection)
            if not self._backlog:
                self._connection.close()

    def send(self, message: object, file: int | None = None) -> None:
        """Sends or queues a message, which is lost if the peer ends first. The caller may close `file` afterwards.

        Raises:
            OSError: the connection has ended; its reader sees the end too.
            ValueError: the packet is over MAX_PACKET_BYTES.
        """
        encoded = _encode(message)
        with self._lock:
            if self._ended:
                raise ConnectionAbortedError("the connection has ended")
            try:
                self._send(encoded, file)
            except (OSError, RuntimeError) as error:  # RuntimeError: a thread cannot be started
                self._ended = True
                shut_down(self._connection)
                raise ConnectionAbortedError(f"a packet could not be sent: {error}") from error

    def _send(self, encoded: bytes, file: int | None) -> None:
        if not self._backlog:
            with contextlib.suppress(BlockingIOError):
                _transmit(self._connection, encoded, file, socket.MSG_DONTWAIT)
                return
        if len(self._backlog) >= MAX_BACKLOG:
            logger.warning("disconnected from a process that does not read its messages: %d are queued", MAX_BACKLOG)
            raise ConnectionAbortedError(f"{MAX_BACKLOG} packets are queued for the peer, which is the limit")
        if not self._backlog:
            threading.Thread(target=self._send_backlog, name="packets", daemon=True).start()
        self._backlog.append((encoded, None if file is None else os.dup(file)))

    def _send_backlog(self) -> None:
        with self._lock:
            first = self._backlog[0] if self._backlog else None
        while first is not None:
            ended = False
            try:
                _transmit(self._connection, *first)
            except OSError:
                logger.debug("the peer has gone", exc_info=True)
                ended = True
            with self._lock:
                self._ended |= ended
                for _ in range(len(self._backlog) if self._ended else 1):
                    self._drop_first()
                first = self._backlog[0] if self._backlog else None
                if self._closed:
                    self._connection.close()

    def _drop_first(self) -> None:
        _, file = self._backlog.popleft()
        if file is not None:
            os.close(file)


class Listener:
    """Accepts connections and serves each on its own thread, until `close`: of this user, or those of a socket that is
    given.

    listener = Listener(serve, name="shm-server")  # serve(connection) returns when the connection has ended
    Sender(connect(listener.address, timeout_s=5.0))
    """

    def __init__(
        self,
        serve: Callable[[socket.socket], None],
        *,
        name: str,
        listening: tuple[socket.socket, str] | None = None,
    ) -> None:
        """`name` is the name of the threads. `listening`: another socket than an abstract Unix socket, and its
        address."""
        self._serve, self._name = serve, name
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()  # while a descriptor is closed, or shut down by another thread than its reader
        self._closed = threading.Event()
        self._is_unix = listening is None
        self._listener_socket, self.address = listening or listen()
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False if the accepting thread died; True after `close`."""
        return self._closed.is_set() or self._thread.is_alive()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        """Stops accepting and ends all connections. Their threads close the descriptors."""
        self._closed.set()
        with self._lock:
            for connection in (self._listener_socket, *self._connections):
                shut_down(connection)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)  # its port is free then

    def _accept(self) -> None:
        try:
            self._accept_until_closed()
        finally:
            with self._lock:
                self._listener_socket.close()

    def _accept_until_closed(self) -> None:
        while not self._closed.is_set():
            try:
                connection = accept(self._listener_socket) if self._is_unix else self._listener_socket.accept()[0]
            except Exception as error:
                if not self._closed.is_set():
                    self._report_accept_error(error)
                continue
            with self._lock:
                self._connections.add(connection)
            try:
                threading.Thread(target=self._run, args=(connection,), name=self._name, daemon=True).start()
            except RuntimeError as error:
                self._end(connection)
                self._report_accept_error(error)

    def _report_accept_error(self, error: Exception) -> None:
        logger.error("a connection of another process could not be accepted: %s", error)
        self._closed.wait(ACCEPT_RETRY_S)

    def _run(self, connection: socket.socket) -> None:
        try:
            if not self._closed.is_set():
                self._serve(connection)
        except OSError:
            logger.debug("a peer has gone", exc_info=True)
        except Exception:
            logger.exception("a connection could not be served")
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
            connection.close()


def handle_messages(connection: socket.socket, decoder: Decoder[T], handle: Callable[[T, int | None], None]) -> None:
    """Calls `handle` with each message and its file descriptor, which `handle` closes, until the connection ends. An
    error in one message is logged; the next message is handled."""
    while True:
        try:
            received = receive(connection, decoder)
        except OSError:
            logger.debug("a peer has gone", exc_info=True)
            return
        except Exception:
            logger.exception("a message could not be read")
            continue
        if received is None:
            return
        try:
            handle(*received)
        except Exception:
            logger.exception("the handling of a message failed")


def _is_same_user(connection: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.getuid())


def _encode(message: object) -> bytes:
    encoded = msgspec.json.encode(message)
    if len(encoded) > MAX_PACKET_BYTES:
        raise ValueError(f"a packet of {len(encoded)} bytes is over the limit of {MAX_PACKET_BYTES}")
    return encoded


def _transmit(connection: socket.socket, encoded: bytes, file: int | None, flags: int = 0) -> None:
    if file is None:
        connection.send(encoded, flags)
    else:  # socket.send_fds ignores flags
        connection.sendmsg([encoded], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))], flags)
