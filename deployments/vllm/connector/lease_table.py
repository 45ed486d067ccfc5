"""Lease table in vLLM's scheduler process: which embeddings the engine may load, and where they are stored.

A lease is a request's right to load an embedding. The LLM replica grants it and releases it when the request has ended.
The lease ends when no request that the scheduler has seen needs it any more, so that an embedding is never freed while
the engine is in the middle of a prompt.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from deployments.transfer.header import Header


@dataclass(frozen=True)
class EngineLease:
    name: str
    server: str
    """Address of the server whose memory, mapped by workers, holds the embedding."""
    offset: int
    """Offset of the header in bytes."""
    header: Header
    ready_at_s: float
    """When the embedding was ready, in seconds since the epoch by the encoder's clock."""


@dataclass(frozen=True)
class EndedLease:
    """A lease by which nothing more will be loaded."""

    name: str
    num_planned: int
    """Number of loads by it that were planned for each worker. The last of them may still be in flight."""


@dataclass
class _Entry:
    leases: dict[str, EngineLease] = field(default_factory=dict)
    num_planned: Counter[str] = field(default_factory=Counter)
    released: set[str] = field(default_factory=set)
    users: set[str] = field(default_factory=set)


class LeaseTable:
    """Granted leases by digest. One thread grants and releases, the scheduler's thread queries."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._digest_by_lease: dict[str, str] = {}
        self._digests_by_request: dict[str, set[str]] = {}
        self._pinned: set[str] = set()

    def grant(self, lease: EngineLease) -> None:
        with self._lock:
            self._entries.setdefault(lease.header.digest, _Entry()).leases[lease.name] = lease
            self._digest_by_lease[lease.name] = lease.header.digest

    def release(self, lease: str) -> list[EndedLease]:
        """Marks a lease whose request has ended as released. Returns the leases that end by that."""
        with self._lock:
            digest = self._digest_by_lease.get(lease)
            if digest is None:
                return []
            self._entries[digest].released.add(lease)
            return self._pop_ended(digest)

    def reserve(self, request: str, digests: Sequence[str]) -> int:
        """Returns how many embeddings, from the first on, can be loaded, and keeps these until `finish_request`."""
        with self._lock:
            found = list(takewhile(self._entries.__contains__, digests))
            for digest in found:
                self._entries[digest].users.add(request)
                self._digests_by_request.setdefault(request, set()).add(digest)
            return len(found)

    def has(self, digest: str) -> bool:
        with self._lock:
            return digest in self._entries

    def pin(self, digest: str) -> bool:
        """Whether the embedding can be loaded; keeps it until `end_step`, so that the same step may load it."""
        with self._lock:
            if digest in self._entries:
                self._pinned.add(digest)
            return digest in self._entries

    def end_step(self) -> list[EndedLease]:
        """Unpins all embeddings once the loads of a step are planned. Returns the leases that end by that."""
        with self._lock:
            pinned, self._pinned = self._pinned, set()
            return [ended for digest in sorted(pinned) for ended in self._pop_ended(digest)]

    def plan_load(self, digest: str) -> EngineLease | None:
        """Plans a load. Returns its lease: any will do, as all are for the same embedding. None if none is left."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                return None
            lease = next(reversed(entry.leases.values()))
            entry.num_planned[lease.name] += 1
            return lease

    def finish_request(self, request: str) -> list[EndedLease]:
        """Ends the scheduler's use of a request's embeddings. Returns the leases that end by that."""
        with self._lock:
            ended: list[EndedLease] = []
            for digest in self._digests_by_request.pop(request, ()):
                self._entries[digest].users.discard(request)
                ended += self._pop_ended(digest)
            return ended

    def _pop_ended(self, digest: str) -> list[EndedLease]:
        """Removes and returns released leases, if the embedding is unused or another lease remains for its users."""
        entry = self._entries[digest]
        if (entry.users or digest in self._pinned) and len(entry.released) == len(entry.leases):
            return []
        ended = [EndedLease(lease, entry.num_planned.pop(lease, 0)) for lease in sorted(entry.released)]
        for each in ended:
            del entry.leases[each.name], self._digest_by_lease[each.name]
        entry.released.clear()
        if not entry.leases:
            del self._entries[digest]
        return ended
