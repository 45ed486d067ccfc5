"""Other hosts' memory, all of it in this process; reads take as long as a test wants, and end as it wants."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.transfer.rdma import ReadError
from deployments.transfer.rdma_process import Endpoint, RdmaProcess, Read
from deployments.transfer.shared_memory import Arena

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


class FakeMemory(RdmaProcess):
    def __init__(self, network: FakeNetwork) -> None:
        self.network = network
        self.name = f"process {next(_names)}".encode()
        self.forgotten: list[bytes] = []
        network.notified[self.name] = []

    def start(self, arena: Arena) -> None:
        self.arena = arena

    def endpoint(self) -> Endpoint:
        return Endpoint(self.name, self.arena.address)

    def read(self, agent_metadata: bytes, source: int, offset: int, num_bytes: int, *, notify: bytes = b"") -> Read:
        if agent_metadata in self.network.gone:
            raise ReadError("the process has gone")
        assert 0 <= offset <= self.arena.num_bytes - num_bytes
        target = self.arena.address + offset

        def is_done() -> bool:
            if agent_metadata in self.network.gone:
                raise ReadError("the process has gone")
            if self.network.stuck:
                return False
            self.network.between()
            ctypes.memmove(target, source, num_bytes)
            if notify:
                self.network.notified[agent_metadata].append(notify)
            return True

        return is_done

    def disconnect(self, agent_metadata: bytes) -> None:
        self.forgotten.append(agent_metadata)

    def get_notifications(self) -> list[bytes]:
        received, self.network.notified[self.name] = self.network.notified[self.name], []
        return received

    def close(self) -> None: ...
