"""TCP connections on which language models read embeddings of encoders on other hosts: authentication and frames.

Both ends prove that they know the application's secret, by HMAC-SHA256 over nonces of both, before any other byte is
sent. The bytes that follow are neither encrypted nor signed.

A client sends requests, packed by REQUEST, one at a time. The server answers each with the embedding's header and the
embedding, or with EMPTY_HEADER if it does not have it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from enum import Enum
from pathlib import Path

from configs.schema import TcpConfig
from deployments.common import ray_private

HANDSHAKE_TIMEOUT_S = 5.0
"""Time limit of a connect, and of an authentication."""
STALL_TIMEOUT_S = 3.0
"""Time limit of PIECE_BYTES of a transfer, and of its unacknowledged bytes."""
TRANSFER_TIMEOUT_S = 30.0
"""Time limit of a transfer, including the wait for room at the reader."""
PIECE_BYTES = 2**20
MIN_SECRET_BYTES = 32
SECRET_NAME = "vitray-tcp-secret"
REQUEST = struct.Struct("<32s?")
"""The digest of the embedding, and whether it is read directly, as in `same_host.Acquire`."""

_MAGIC = b"vitray-tcp-1"
_NONCE_BYTES = _PROOF_BYTES = 32


class AuthenticationError(ConnectionError):
    """The peer does not know the secret, or does not speak this protocol."""


class TcpError(Enum):
    """Why a transfer or a connection failed; the label `reason`."""

    AUTHENTICATION = "authentication"
    """A peer did not prove that it knows the secret."""
    TIMEOUT = "timeout"
    """A peer was too slow."""
    CONNECTION = "connection"
    """A peer could not be reached, or a connection ended in the middle of a transfer."""
    LIMIT = "limit"
    """A connection over the limit was closed."""
    MISMATCH = "mismatch"
    """Another embedding than the requested one, or a request that is not one."""


def error_of(error: Exception) -> TcpError:
    """Returns the label of an error of a transfer."""
    if isinstance(error, AuthenticationError):
        return TcpError.AUTHENTICATION
    if isinstance(error, TimeoutError):
        return TcpError.TIMEOUT
    return TcpError.CONNECTION if isinstance(error, OSError) else TcpError.MISMATCH


def get_secret(config: TcpConfig, application: str) -> bytes:
    """Returns the secret of `tcp.secret_file`, or that of the application, which its first process creates in Ray's
    internal key-value store. Outside Ray, no other process could connect, and the secret is a new one.

    Raises OSError if the file cannot be read, ValueError if it is too short.
    """
    if config.secret_file is None:
        new = secrets.token_bytes(MIN_SECRET_BYTES)
        return ray_private.get_or_store(f"{SECRET_NAME}/{application}", new)
    secret = Path(config.secret_file).read_bytes().strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"tcp.secret_file holds {len(secret)} bytes, the least are {MIN_SECRET_BYTES}")
    return secret


def configure(connection: socket.socket) -> None:
    """Sets the options of a connection: a lost peer is detected within STALL_TIMEOUT_S while bytes are sent, else by
    keep-alive probes within some seconds."""
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_TIMEOUT_S * 1e3)),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ):
        connection.setsockopt(level, option, value)


def authenticate_client(connection: socket.socket, secret: bytes) -> None:
    """Authenticates both ends of a connection that was accepted. Raises AuthenticationError or OSError."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(HANDSHAKE_TIMEOUT_S)
    connection.sendall(_MAGIC + ours)
    answer = receive(connection, _NONCE_BYTES + _PROOF_BYTES, deadline)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _prove(secret, b"client", ours, theirs)):
        raise AuthenticationError("a client does not know the secret")
    connection.sendall(_prove(secret, b"server", ours, theirs))


def authenticate_server(connection: socket.socket, secret: bytes) -> None:
    """Authenticates both ends of a connection that this process opened. Raises AuthenticationError or OSError."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    connection.settimeout(HANDSHAKE_TIMEOUT_S)
    greeting = receive(connection, len(_MAGIC) + _NONCE_BYTES, deadline)
    if not greeting.startswith(_MAGIC):
        raise AuthenticationError("the server speaks another protocol")
    theirs, ours = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(ours + _prove(secret, b"client", theirs, ours))
    try:
        proof = receive(connection, _PROOF_BYTES, deadline)
    except ConnectionError as error:
        raise AuthenticationError("the server refused this process: another secret?") from error
    if not hmac.compare_digest(proof, _prove(secret, b"server", theirs, ours)):
        raise AuthenticationError("the server does not know the secret")


def _prove(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """`role` keeps a peer from returning a proof that it was sent."""
    return hmac.digest(secret, _MAGIC + role + server_nonce + client_nonce, "sha256")


def receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Returns exactly `num_bytes`. Raises OSError as `receive_into`."""
    received = bytearray(num_bytes)
    receive_into(connection, memoryview(received), deadline)
    return bytes(received)


def receive_into(connection: socket.socket, target: memoryview, deadline: float) -> None:
    """Fills `target`, of bytes.

    Raises ConnectionError if the stream ends before, TimeoutError if no byte arrives for the timeout of the connection
    or the deadline, by `time.monotonic`, has passed.
    """
    while target:
        num_bytes = connection.recv_into(target)
        if not num_bytes:
            raise ConnectionAbortedError(f"the connection ended {len(target)} bytes early")
        target = target[num_bytes:]
        if target and time.monotonic() > deadline:
            raise TimeoutError(f"{len(target)} bytes are missing at the deadline")


def send(connection: socket.socket, content: memoryview, deadline: float) -> None:
    """Sends all of `content`, of bytes. Raises TimeoutError if a piece takes longer than the timeout of the connection,
    or the deadline, by `time.monotonic`, has passed."""
    for start in range(0, len(content), PIECE_BYTES):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(content) - start} bytes are not sent at the deadline")
        connection.sendall(content[start : start + PIECE_BYTES])
