"""Cache affinity with bounded load: calls go to a replica that caches their key, else by rendezvous hashing.

Pure decisions over names and numbers: the same code routes in Serve and under the simulated clock of
`benchmarks/bench_affinity.py`. In rendezvous hashing (Thaler, Ravishankar), each key ranks the replicas in its own
order, so adding or removing a replica moves only the keys that rank it first. The load bound is that of
"Consistent Hashing with Bounded Loads" (Mirrokni, Thorup, Zadimoghaddam).
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

PREFIX_BYTES = 4
"""Bytes of each digest that replicas publish. A collision sends a call to a replica that does not cache its key."""
MAX_PUBLISHED = 1024
"""Most digests that a replica publishes, the newest ones: Serve sends them to every router every few seconds."""
HELD = "held_digests"
"""Key of the result of `published` in a replica's routing stats."""
REMEMBERED_KEYS = 8192
Flags = npt.NDArray[np.bool_]

SAYS_SO, SENT_LAST, OTHER, AVOIDED = range(4)
"""Ranks of a replica for a call's key, best first: it published the key, this router sent the key there last, any other
replica, the replica of the failed attempt."""


class Work(IntEnum):
    """Work that a call causes at its replica."""

    COMPUTE = 0
    SERVE_CACHED = 1
    """The replica has cached the result, or is computing it."""


@dataclass(frozen=True)
class ActiveCall:
    """A call in flight."""

    name: str
    weight: int
    work: Work


@dataclass(frozen=True)
class Call:
    """Routing attributes of a call, which Serve carries as a session id."""

    key: str | None = None
    """At least 16 hex characters, evenly distributed, such as a digest. None: the call has no affinity."""
    weight: int = 1
    """Load that the call adds to its replica until it ends."""
    attempt: int = 0
    """Over 0 for a retry: the replica of the failed attempt is ranked last, unless it published the key and
    `separate_cache_hits` is set."""
    cost: int = 0
    """Cost of the call at a replica that does not cache the key, in the unit of the work that replicas report."""
    identity: str = ""
    """Identity that a replica must have to take the call; empty accepts all."""

    def to_session_id(self) -> str:
        return f"{self.key or ''}:{self.weight}:{self.attempt}:{self.cost}:{self.identity}"

    @classmethod
    def from_session_id(cls, session_id: str) -> Call:
        """Parses a session id. Returns a default call if it is not from `to_session_id`."""
        key, _, numbers = session_id.partition(":")
        try:
            int(key[:16] or "0", 16)
            weight, attempt, cost, identity = numbers.split(":")
            return cls(key or None, int(weight), int(attempt), int(cost), identity)
        except ValueError:
            return cls()


def published(digests: Iterable[str], limit: int = MAX_PUBLISHED) -> bytes:
    """Returns the prefixes of the last `limit` digests, concatenated. `digests` are ordered from oldest to newest."""
    newest = list(digests)[-limit:] if limit else []
    return b"".join(bytes.fromhex(digest[: 2 * PREFIX_BYTES]) for digest in newest)


class Affinity:
    """One router's state: the replicas, the keys that they published, and this router's load in flight at each.

        affinity.set_replicas(names)
        name = affinity.order(call)[0]
        active = affinity.begin(name, call)
        ...
        affinity.end(active)

    A replica takes a call only if it has the call's identity and its load is at most `load_factor` times the mean over
    all replicas of that identity, with the call counted in the mean. With `separate_cache_hits`, cache hits and
    computations are bounded separately: a replica that caches the key takes the call unless it has too many cache hits
    in flight, whatever its other load. A retry exceeds the bound rather than return to the replica that failed it. Each
    router applies the bound to the calls that it sent, so their sum keeps it too.

    Raises ValueError for a `load_factor` under 1, which could exclude every replica.
    """

    def __init__(self, *, load_factor: float = 1.25, separate_cache_hits: bool = False) -> None:
        if not load_factor >= 1:
            raise ValueError(f"load_factor is {load_factor}; it must be at least 1")
        self._load_factor = load_factor
        self._separate_cache_hits = separate_cache_hits
        self._names: list[str] = []
        self._index: dict[str, int] = {}
        self._points = np.zeros(0, np.uint64)
        self._identities = np.zeros(0, np.str_)
        self._loads = np.zeros((len(Work), 0), np.int64)
        self._away: dict[str, list[int]] = {}  # loads of removed replicas that still have calls in flight
        self._held: dict[str, frozenset[int]] = {}
        self._holders: dict[int, set[str]] = {}
        self._reports: defaultdict[str, int] = defaultdict(int)  # number of reports of each replica
        # Replica that a key was sent to last, and its number of reports then: affinity before the next report.
        self._sent: LRUCache[str, tuple[str, int]] = LRUCache(REMEMBERED_KEYS)

    def set_replicas(self, names: Iterable[str], identities: Mapping[str, str] | None = None) -> None:
        """Sets the running replicas and the identities of those that have one. Replicas that stay keep their loads, and
        those that return get back the load of their calls in flight.
        """
        loads = self._away | {name: self._loads[:, at].tolist() for name, at in self._index.items()}
        self._names = sorted(set(names))
        self._index = {name: number for number, name in enumerate(self._names)}
        self._points = np.array([_point_of(name) for name in self._names], np.uint64)
        self._identities = np.array([(identities or {}).get(name, "") for name in self._names], np.str_)
        kept = [loads.get(name, [0] * len(Work)) for name in self._names]
        self._loads = np.array(kept, np.int64).reshape(-1, len(Work)).T.copy()
        self._away = {name: load for name, load in loads.items() if name not in self._index and any(load)}
        for gone in self._held.keys() - self._index.keys():
            self.publish(gone, b"")
            del self._held[gone], self._reports[gone]

    def publish(self, name: str, held: bytes) -> None:
        """Replaces the replica's cached keys by `held`, a result of `published`. Raises ValueError if its length is
        not a multiple of PREFIX_BYTES.
        """
        if len(held) % PREFIX_BYTES:
            raise ValueError(f"{len(held)} bytes are published; they must be a multiple of {PREFIX_BYTES}")
        before, now = self._held.get(name, frozenset()), frozenset(np.frombuffer(held, ">u4").tolist())
        for prefix in before - now:
            self._holders[prefix].discard(name)
            if not self._holders[prefix]:
                del self._holders[prefix]
        for prefix in now - before:
            self._holders.setdefault(prefix, set()).add(name)
        self._held[name] = now
        self._reports[name] += 1

    def serves(self, call: Call) -> bool:
        """Whether any replica has the call's identity."""
        return bool(self._serving(call).any())

    def order(self, call: Call) -> list[str]:
        """Returns the replicas within the bound, best first; empty only if no replica has the call's identity."""
        tiers = self._tiers(call)
        gives, does = self._room(call, tiers)
        ranked = self._ranked(call, tiers)
        return [self._names[at] for at in ranked[(gives | does)[ranked]]]

    def ranked(self, call: Call) -> list[str]:
        """Returns all replicas of the call's identity, best for its key first, regardless of the bound."""
        return [self._names[at] for at in self._ranked(call, self._tiers(call))]

    def passes_by(self, name: str, call: Call) -> bool:
        """Whether the bound excludes a replica that ranks before this one."""
        tiers = self._tiers(call)
        gives, does = self._room(call, tiers)
        takes = gives | does
        if takes.all():
            return False
        better = itertools.takewhile(lambda at: self._names[at] != name, self._ranked(call, tiers).tolist())
        return any(not takes[at] for at in better)

    def begin(self, name: str, call: Call, *, bounded: bool = True) -> ActiveCall | None:
        """Adds the call to the replica's load until `end`. Returns None if the replica is gone, has another identity
        or, if `bounded`, is over the bound.
        """
        at = self._index.get(name)
        if at is None or not self._serving(call)[at]:
            return None
        gives, does = self._room(call, self._tiers(call))
        if bounded and not (gives[at] or does[at]):
            return None
        begun = ActiveCall(name, call.weight, Work.SERVE_CACHED if gives[at] else Work.COMPUTE)
        self._loads[begun.work, at] += call.weight
        if call.key is not None:
            self._sent[call.key] = (name, self._reports.get(name, 0))
        return begun

    def end(self, begun: ActiveCall) -> None:
        """Removes the call, successful or not, from its replica's load."""
        at = self._index.get(begun.name)
        if at is not None:
            self._loads[begun.work, at] -= begun.weight
        elif load := self._away.get(begun.name):
            load[begun.work] -= begun.weight
            if not any(load):
                del self._away[begun.name]

    def load(self, name: str, work: Work = Work.COMPUTE) -> int:
        """Returns the sum of the weights of this router's calls in flight at the replica."""
        return int(self._loads[work, self._index[name]])

    def _room(self, call: Call, tiers: npt.NDArray[np.int64]) -> tuple[Flags, Flags]:
        """Returns, for each replica, whether it may take the call as a cache hit, and whether as a computation."""
        serving = self._serving(call)
        load = self._loads[:, serving].sum(1, keepdims=True)
        fits = serving & (self._loads * serving.sum() <= self._load_factor * (load + call.weight))
        gives = (
            fits[Work.SERVE_CACHED] & (tiers <= SENT_LAST)
            if self._separate_cache_hits
            else np.zeros(len(self._names), bool)
        )
        does = serving if serving.sum() == 1 else fits[Work.COMPUTE]
        # A replica that fails every call has the least load, so the bound would send its failed calls back to it.
        others = serving & (tiers != AVOIDED)
        if call.attempt and others.any() and not ((gives | does) & others).any():
            does = others
        return gives, does

    def _serving(self, call: Call) -> Flags:
        """Returns, for each replica, whether it has the call's identity."""
        return self._identities == call.identity if call.identity else np.ones(len(self._names), np.bool_)

    def _tiers(self, call: Call) -> npt.NDArray[np.int64]:
        tiers = np.full(len(self._names), OTHER)
        if call.key is None:
            return tiers
        last, reports = self._sent.get(call.key, ("", 0))
        if last in self._index and (call.attempt or self._may_hold_still(last, reports)):
            tiers[self._index[last]] = AVOIDED if call.attempt else SENT_LAST
        for name in self._holders.get(int(call.key[: 2 * PREFIX_BYTES], 16), ()):
            if name != last or not call.attempt or self._separate_cache_hits:
                tiers[self._index[name]] = SAYS_SO
        return tiers

    def _may_hold_still(self, name: str, reports: int) -> bool:
        """Whether the replica may cache a key that was sent there after `reports` reports, though no report has it.

        The next report may be older than the call, and a full report may omit the key.
        """
        return self._reports.get(name, 0) - reports < 2 or len(self._held[name]) >= MAX_PUBLISHED

    def _ranked(self, call: Call, tiers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the indices of the replicas of the call's identity, best first, regardless of the bound."""
        if call.key is None:
            chance = np.array([random.random() for _ in self._names])
            order = np.lexsort((chance, self._loads.sum(0)))
        else:
            order = np.lexsort((~_mixed(self._points ^ np.uint64(int(call.key[:16], 16))), tiers))
        return np.asarray(order[self._serving(call)[order]])


def _point_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scrambles 64-bit values by a bijection, the finalizer of splitmix64 (Steele, Lea, Flood)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
