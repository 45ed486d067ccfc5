"""Other hosts' memory, all of it in this process; reads take as long as a test wants, and end as it wants."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.transfer.rdma import NixlMemory, NixlRead, ReadError

_names = itertools.count()


@dataclass
class FakeNetwork:
    """What all processes are joined by."""

    notified: dict[bytes, list[bytes]] = field(default_factory=dict)
    gone: set[bytes] = field(default_factory=set)
    stuck: bool = False
    """Reads do not end for now."""
    unblocked: threading.Event = field(default_factory=threading.Event)
    between: Callable[[], None] = lambda: None
    """Called before each read."""


class FakeMemory(NixlMemory):
    def __init__(self, network: FakeNetwork) -> None:
        self.network = network
        self.name = f"process {next(_names)}".encode()
        self.registered: list[tuple[int, int]] = []
        self.forgotten: list[bytes] = []
        network.notified[self.name] = []

    def register(self, address: int, num_bytes: int) -> None:
        self.registered.append((address, num_bytes))

    def get_agent_metadata(self) -> bytes:
        return self.name

    def read(self, agent_metadata: bytes, source: int, target: int, num_bytes: int, *, notify: bytes = b"") -> FakeRead:
        if agent_metadata in self.network.gone:
            raise ReadError("the process has gone")
        assert any(start <= target and target + num_bytes <= start + length for start, length in self.registered)
        return FakeRead(self.network, agent_metadata, source, target, num_bytes, notify)

    def disconnect(self, agent_metadata: bytes) -> None:
        self.forgotten.append(agent_metadata)

    def get_notifications(self) -> list[bytes]:
        received, self.network.notified[self.name] = self.network.notified[self.name], []
        return received


@dataclass
class FakeRead(NixlRead):
    network: FakeNetwork
    agent_metadata: bytes
    source: int
    target: int
    num_bytes: int
    notify: bytes

    def done(self) -> bool:
        if self.agent_metadata in self.network.gone:
            raise ReadError("the process has gone")
        if self.network.stuck:
            return False
        self.network.between()
        ctypes.memmove(self.target, self.source, self.num_bytes)
        if self.notify:
            self.network.notified[self.agent_metadata].append(self.notify)
        return True
