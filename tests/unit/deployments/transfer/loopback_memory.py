"""A stand-in for NIXL within one process, and processes that do not start. Imports nothing that takes long."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from mmap import mmap
from multiprocessing.connection import Connection

from deployments.transfer.rdma import NixlMemory, NixlRead, ReadError

METADATA = b"this process"


class Loopback(NixlMemory):
    """Reads within its own arena, from an address beyond which nothing is. An empty read ends the process, one of a
    byte makes it silent."""

    def __init__(self) -> None:
        self.notified: list[bytes] = []

    def register(self, address: int, num_bytes: int) -> None:
        self.first, self.end = address, address + num_bytes

    def get_agent_metadata(self) -> bytes:
        return METADATA

    def read(self, agent_metadata: bytes, source: int, target: int, num_bytes: int, *, notify: bytes = b"") -> NixlRead:
        if agent_metadata != METADATA or not self.first <= source < self.end:
            raise ReadError("NOT_FOUND")
        if num_bytes == 0:
            os.abort()
        if num_bytes == 1:
            print(os.getpid(), flush=True)
            time.sleep(600)
        self.notified.append(notify)
        return LoopbackRead(source, target, num_bytes)

    def disconnect(self, agent_metadata: bytes) -> None:
        self.notified.append(b"disconnected")

    def get_notifications(self) -> list[bytes]:
        found, self.notified = self.notified, []
        return found


class LoopbackRead(NixlRead):
    """Is done when it is asked for the second time."""

    def __init__(self, source: int, target: int, num_bytes: int) -> None:
        self.rest, self.args = 1, (target, source, num_bytes)

    def done(self) -> bool:
        self.rest -= 1
        if self.rest < 0:
            ctypes.memmove(*self.args)
        return self.rest < 0


def not_started(pipe: Connection, arena: mmap) -> None:
    os.abort()


def silent(pipe: Connection, arena: mmap) -> None:
    time.sleep(600)


def without_nixl() -> NixlMemory:
    sys.modules["nixl._api"] = None  # type: ignore[assignment]
    return NixlMemory()
