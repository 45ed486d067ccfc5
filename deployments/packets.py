"""Small messages between processes of one host: JSON objects over a socket without a name in the file system, and with
them an open file where one is to be shared.

Whoever connects must be the same user. A connection ends with either process, however it died, which the other one sees
at once. It must not know what the messages say.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import Any

Packet = dict[str, Any]

MAX_PACKET_BYTES = 65_536
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def host_name() -> str:
    """Of what can be reached by such sockets: this boot of this machine, and the container's network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}/{os.getuid()}"


def listen() -> tuple[socket.socket, str]:
    """A socket that listens, and its address."""
    address = f"vitray-{secrets.token_hex(16)}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind("\0" + address)
    listening.listen()
    return listening, address


def accept(listening: socket.socket) -> socket.socket:
    """The next connection of the same user; others are closed. Raises OSError once `listening` is shut down."""
    while True:
        connection, _ = listening.accept()
        given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(given)[1] == os.getuid():
            return connection
        connection.close()


def connect(address: str, *, timeout_s: float) -> socket.socket:
    """Raises OSError where nobody of this user listens. `timeout_s` holds for every later call too."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect("\0" + address)
        given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(given)[1] != os.getuid():
            raise ConnectionRefusedError("another user listens there")
    except BaseException:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, packet: Packet, file: int | None = None) -> None:
    """Raises OSError where the other side has gone, ValueError for a packet over MAX_PACKET_BYTES."""
    written = json.dumps(packet).encode()
    if len(written) > MAX_PACKET_BYTES:
        raise ValueError(f"a packet of {len(written)} bytes is over the limit of {MAX_PACKET_BYTES}")
    if file is None:
        connection.send(written)
    else:
        socket.send_fds(connection, [written], [file])


def receive(connection: socket.socket) -> tuple[Packet, int | None] | None:
    """The next packet and the file that came with it, which is the caller's to close; None where the other side has
    gone. Raises OSError, TimeoutError among them."""
    written, files, _, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, 1)
    if not written:
        return None
    return json.loads(written), files[0] if files else None


def close(connection: socket.socket) -> None:
    """Ends it for both sides, and for threads of this process that wait at it."""
    with contextlib.suppress(OSError):  # the other side was first
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
