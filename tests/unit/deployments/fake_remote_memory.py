"""Other hosts' memory, all of it in this process; reads take as long as a test wants, and end as it wants."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.remote_memory import ReadError

_names = itertools.count()


@dataclass
class FakeNetwork:
    """What all processes are joined by."""

    told: dict[bytes, list[bytes]] = field(default_factory=dict)
    gone: set[bytes] = field(default_factory=set)
    stuck: bool = False
    """Reads do not end for now."""
    between: Callable[[], None] = lambda: None
    """Called before each read."""


class FakeMemory:
    def __init__(self, network: FakeNetwork) -> None:
        self.network = network
        self.name = f"process {next(_names)}".encode()
        self.registered: list[tuple[int, int]] = []
        self.forgotten: list[bytes] = []
        network.told[self.name] = []

    def register(self, address: int, num_bytes: int) -> None:
        self.registered.append((address, num_bytes))

    def introduction(self) -> bytes:
        return self.name

    def read(self, introduction: bytes, source: int, target: int, num_bytes: int, *, told: bytes = b"") -> FakeReading:
        if introduction in self.network.gone:
            raise ReadError("the process has gone")
        assert any(start <= target and target + num_bytes <= start + length for start, length in self.registered)
        return FakeReading(self.network, introduction, source, target, num_bytes, told)

    def forget(self, introduction: bytes) -> None:
        self.forgotten.append(introduction)

    def heard(self) -> list[bytes]:
        heard, self.network.told[self.name] = self.network.told[self.name], []
        return heard


@dataclass
class FakeReading:
    network: FakeNetwork
    introduction: bytes
    source: int
    target: int
    num_bytes: int
    told: bytes

    def ended(self) -> bool:
        if self.introduction in self.network.gone:
            raise ReadError("the process has gone")
        if self.network.stuck:
            return False
        self.network.between()
        ctypes.memmove(self.target, self.source, self.num_bytes)
        if self.told:
            self.network.told[self.introduction].append(self.told)
        return True
