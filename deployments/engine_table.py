"""Which embeddings an engine may load and where they lie, beside vLLM's scheduler.

A lease is one request's right to one embedding. It is given by the language model replica, which takes it back when
its request has ended; it ends when no request that the scheduler has seen needs it any more, so that an engine in the
middle of a prompt never finds an embedding gone. It must not know of vLLM, sockets or tensors.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from deployments.embedding_header import Header


@dataclass(frozen=True)
class Place:
    """Where an embedding lies."""

    lease: str
    lender: str
    start: int
    header: Header
    ready_at_s: float
    """When it was computed, seconds since the epoch."""


@dataclass(frozen=True)
class Ended:
    """A lease that nothing is going to be loaded by any more."""

    lease: str
    num_loads: int
    """How often each worker was told to load by it. What it was told last it may not have done yet."""


@dataclass
class _Entry:
    leases: dict[str, Place] = field(default_factory=dict)
    num_loads: Counter[str] = field(default_factory=Counter)
    withdrawn: set[str] = field(default_factory=set)
    used_by: set[str] = field(default_factory=set)


class EngineTable:
    """Leases come and are withdrawn on one thread, the scheduler asks on another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._digest_of: dict[str, str] = {}
        self._needs: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._digest_of)

    def give(self, place: Place) -> None:
        with self._lock:
            self._entries.setdefault(place.header.digest, _Entry()).leases[place.lease] = place
            self._digest_of[place.lease] = place.header.digest

    def withdraw(self, lease: str) -> list[Ended]:
        """The request has ended; the leases that have ended by that."""
        with self._lock:
            digest = self._digest_of.get(lease)
            if digest is None:
                return []
            self._entries[digest].withdrawn.add(lease)
            return self._ended(digest)

    def available(self, request: str, digests: Sequence[str]) -> int:
        """How many of them, from the first on, can be loaded. From then on these stay until `finished(request)`."""
        with self._lock:
            there = list(takewhile(self._entries.__contains__, digests))
            for digest in there:
                self._entries[digest].used_by.add(request)
                self._needs.setdefault(request, set()).add(digest)
            return len(there)

    def has(self, digest: str) -> bool:
        with self._lock:
            return digest in self._entries

    def load(self, digest: str) -> Place:
        """From where the workers are to load it: by any lease, each names the same embedding. Raises KeyError."""
        with self._lock:
            entry = self._entries[digest]
            place = next(reversed(entry.leases.values()))
            entry.num_loads[place.lease] += 1
            return place

    def finished(self, request: str) -> list[Ended]:
        """The scheduler is done with the request; the leases that have ended by that."""
        with self._lock:
            ended: list[Ended] = []
            for digest in self._needs.pop(request, ()):
                self._entries[digest].used_by.discard(request)
                ended += self._ended(digest)
            return ended

    def _ended(self, digest: str) -> list[Ended]:
        """Withdrawn leases: all of them where nobody uses the embedding, or where a lease stays that serves all."""
        entry = self._entries[digest]
        if entry.used_by and len(entry.withdrawn) == len(entry.leases):
            return []
        ended = [Ended(lease, entry.num_loads.pop(lease, 0)) for lease in sorted(entry.withdrawn)]
        for each in ended:
            del entry.leases[each.lease], self._digest_of[each.lease]
        entry.withdrawn.clear()
        if not entry.leases:
            del self._entries[digest]
        return ended
