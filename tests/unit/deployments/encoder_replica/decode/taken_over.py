"""A decoder process that a file has taken over. It imports nothing that takes long."""

from __future__ import annotations

import os
import struct
import time
from multiprocessing.connection import Connection


def length(number: int) -> bytes:
    """How a message of `number` bytes begins."""
    return struct.pack("!i", number)


def message(content: bytes) -> bytes:
    return length(len(content)) + content


def serve(connection: Connection, sent: bytes, drips: bool) -> None:
    """Takes a task and sends `sent`, then nothing, or with `drips` a byte now and then, until it is killed."""
    connection.send_bytes(b"ready")
    connection.recv()
    connection.send_bytes(b"started")
    os.write(connection.fileno(), sent)
    while True:
        time.sleep(0.2)
        if drips:
            os.write(connection.fileno(), b"\1")
