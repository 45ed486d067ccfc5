"""Cache affinity with bounded load: calls go where this router sent their key last, else by rendezvous hashing.

Pure decisions over names and numbers: the same code routes in Serve and under the simulated clock of
`benchmarks/bench_affinity.py`. In rendezvous hashing (Thaler, Ravishankar), each key ranks the replicas in its own
order, so adding or removing a replica moves only the keys that rank it first. The load bound is that of
"Consistent Hashing with Bounded Loads" (Mirrokni, Thorup, Zadimoghaddam).
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

MAX_REMEMBERED_KEYS = 8192
MAX_REFUSALS = 2
"""Replicas that may refuse a call because they are too busy; the next one must take it."""
NEAR_REFUSALS = 2
"""After as many refusals, a call goes to the best replica of its key on any host: its own host is too busy."""
FREE_CALLS = 2
"""A replica takes a call if its load is at most the mean plus this many calls of the same weight, whatever the load
factor: the mean of a few calls in flight is so small that the factor alone would spill most calls."""
Names = Mapping[str, str]
Flags = npt.NDArray[np.bool_]

SENT_LAST, OTHER, AVOIDED = range(3)
"""Ranks of a replica for a call's key, best first: this router sent the key there last, any other replica, the replica
of the failed attempt."""


class Work(IntEnum):
    """Work that a call causes at its replica."""

    COMPUTE = 0
    SERVE_CACHED = 1
    """The replica probably has the result or is computing it: this router sent the key there last."""


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
    """Over 0 for a retry: the replica of the failed attempt is ranked last."""
    cost: int = 0
    """Cost of the call at a replica that does not cache the key, in the unit of the work in answers to probes. For an
    image: its visual tokens and `ImageJob.tokens_before`."""
    identity: str = ""
    """Identity that a replica must have to take the call; empty accepts all."""
    host: str = ""
    """Replicas on this host rank before others; empty prefers none."""
    replica: str = ""
    """Replica that was chosen for the call before; it ranks first, and the bound does not apply to it."""
    only_choose: bool = False
    """Whether a replica is only chosen, for a call that follows."""
    refused_by: tuple[str, ...] = ()
    """Replicas that were too busy for the call; it goes to one of them only if no other takes it."""
    refusable: bool = False
    """Whether a replica that is too busy may refuse the call, which then goes to another."""
    sticky: bool = False
    """Whether the call goes where the last call of its key went, whatever the load there, and is computed there."""
    leaving_cost: int = 0
    """Cost in addition to `cost` on another host than that of the best replica for the key, which has what the call
    needs. For a prompt: of its images of earlier turns, which would be encoded again."""

    def to_session_id(self) -> str:
        numbers = f"{self.weight}:{self.attempt}:{self.cost}:{self.leaving_cost}"
        flags = f"{self.only_choose:d}:{','.join(self.refused_by)}:{self.refusable:d}:{self.sticky:d}"
        return f"{self.key or ''}:{numbers}:{self.identity}:{self.host}:{self.replica}:{flags}"

    @classmethod
    def from_session_id(cls, session_id: str) -> Call:
        """Parses a session id. Returns a default call if it is not from `to_session_id`."""
        key, _, numbers = session_id.partition(":")
        try:
            int(key[:16] or "0", 16)
            *counts, identity, host, replica, only_choose, names, refusable, sticky = numbers.split(":")
            weight, attempt, cost, leaving_cost = map(int, counts)
            refused_by, flags = tuple(filter(None, names.split(","))), (refusable == "1", sticky == "1")
            chosen = identity, host, replica, only_choose == "1"
            return cls(key or None, weight, attempt, cost, *chosen, refused_by, *flags, leaving_cost)
        except ValueError:
            return cls()


@dataclass(frozen=True)
class _Sent:
    """The last call of a key."""

    name: str
    attempt: int
    avoided: str
    """The replica of the failed attempt before."""


class Affinity:
    """One router's state: the replicas, where it sent keys last, and its load in flight at each.

        affinity.set_replicas(names)
        name = affinity.candidates(call)[0]
        active = affinity.begin(name, call)
        ...
        affinity.end(active)

    A replica takes a call only if it has the call's identity and its load is at most `load_factor` times the mean over
    all replicas of that identity, with the call counted in the mean, or at most FREE_CALLS calls over the mean. With
    `separate_cache_hits`, cache hits and computations are bounded separately: the replica that the key was sent to last
    takes the call unless it has too many cache hits in flight, whatever its other load. A retry exceeds the bound
    rather than return to the replica that failed it, and a refused call before it returns to a replica that refused it.
    Each router applies the bound to the calls that it sent, so their sum keeps it too.
    """

    def __init__(self, *, load_factor: float = 1.25, separate_cache_hits: bool = False) -> None:
        self._load_factor = load_factor
        self._separate_cache_hits = separate_cache_hits
        self._names: list[str] = []
        self._index: dict[str, int] = {}
        self._name_hashes = np.zeros(0, np.uint64)
        self._identities = np.zeros(0, np.str_)
        self._hosts: list[str] = []
        self._loads = np.zeros((len(Work), 0), np.int64)
        self._removed_loads: dict[str, list[int]] = {}  # loads of removed replicas that still have calls in flight
        self._last_sent: LRUCache[str, _Sent] = LRUCache(MAX_REMEMBERED_KEYS)

    def set_replicas(self, names: Iterable[str], identities: Names | None = None, hosts: Names | None = None) -> None:
        """Sets the running replicas, and the identities and hosts of those that have one. Replicas that stay keep their
        loads, and those that return get back the load of their calls in flight.
        """
        loads = self._removed_loads | {name: self._loads[:, at].tolist() for name, at in self._index.items()}
        self._names = sorted(set(names))
        self._index = {name: number for number, name in enumerate(self._names)}
        self._name_hashes = np.array([_hash_name(name) for name in self._names], np.uint64)
        self._identities = np.array([(identities or {}).get(name, "") for name in self._names], np.str_)
        self._hosts = [(hosts or {}).get(name, "") for name in self._names]
        kept = [loads.get(name, [0] * len(Work)) for name in self._names]
        self._loads = np.array(kept, np.int64).reshape(-1, len(Work)).T.copy()
        self._removed_loads = {name: load for name, load in loads.items() if name not in self._index and any(load)}

    def can_serve(self, call: Call) -> bool:
        """Whether any replica has the call's identity."""
        return bool(self._matches_identity(call).any())

    def candidates(self, call: Call) -> list[str]:
        """Returns the replicas within the bound, best first; empty only if no replica has the call's identity."""
        tiers = self._tiers(call)
        as_hit, as_compute = self._within_bound(call, tiers)
        ranked = self._rank(call, tiers)
        return [self._names[at] for at in ranked[(as_hit | as_compute)[ranked]]]

    def rank(self, call: Call) -> list[str]:
        """Returns all replicas of the call's identity, best for its key first, regardless of the bound."""
        return [self._names[at] for at in self._rank(call, self._tiers(call))]

    def is_refusable(self, call: Call) -> bool:
        """Whether a busy replica may refuse the call: not too many have, and there is another one."""
        num_refused = len(call.refused_by)
        return num_refused < MAX_REFUSALS and int(self._matches_identity(call).sum()) > num_refused + 1

    def is_spill(self, name: str, call: Call) -> bool:
        """Whether the bound excludes a replica that ranks before this one."""
        tiers = self._tiers(call)
        as_hit, as_compute = self._within_bound(call, tiers)
        fits = as_hit | as_compute
        if fits.all():
            return False
        better = itertools.takewhile(lambda at: self._names[at] != name, self._rank(call, tiers).tolist())
        return any(not fits[at] for at in better)

    def begin(self, name: str, call: Call, *, bounded: bool = True) -> ActiveCall | None:
        """Adds the call to the replica's load until `end`. Returns None if the replica is gone, has another identity
        or, if `bounded`, is over the bound.
        """
        at = self._index.get(name)
        if at is None or not self._matches_identity(call)[at]:
            return None
        as_hit, as_compute = self._within_bound(call, self._tiers(call))
        if bounded and not (as_hit[at] or as_compute[at]):
            return None
        active = ActiveCall(name, call.weight, Work.SERVE_CACHED if as_hit[at] else Work.COMPUTE)
        self._loads[active.work, at] += call.weight
        if call.key is not None:
            self._last_sent[call.key] = _Sent(name, call.attempt, self._avoided(call))
        return active

    def end(self, active: ActiveCall) -> None:
        """Removes the call, successful or not, from its replica's load."""
        at = self._index.get(active.name)
        if at is not None:
            self._loads[active.work, at] -= active.weight
        elif load := self._removed_loads.get(active.name):
            load[active.work] -= active.weight
            if not any(load):
                del self._removed_loads[active.name]

    def load(self, name: str, work: Work = Work.COMPUTE) -> int:
        """Returns the sum of the weights of this router's calls in flight at the replica."""
        return int(self._loads[work, self._index[name]])

    def _within_bound(self, call: Call, tiers: npt.NDArray[np.int64]) -> tuple[Flags, Flags]:
        """Returns, for each replica, whether it may take the call as a cache hit, and whether as a computation."""
        serving = self._matches_identity(call)
        load = self._loads[:, serving].sum(1, keepdims=True)
        bound = np.maximum(self._load_factor * (load + call.weight), load + FREE_CALLS * call.weight * serving.sum())
        fits = serving & ((self._loads * serving.sum() <= bound) | (call.weight == 0))
        as_hit = (
            fits[Work.SERVE_CACHED] & (tiers == SENT_LAST)
            if self._separate_cache_hits and not call.sticky
            else np.zeros(len(self._names), bool)
        )
        as_compute = serving if serving.sum() == 1 else fits[Work.COMPUTE]
        if call.sticky:
            as_compute = as_compute | (serving & (tiers == SENT_LAST))
        if call.refused_by:
            unasked = serving & ~self._has_refused(call)
            if not ((as_hit | as_compute) & unasked).any():
                as_compute = as_compute | unasked
        # A replica that fails every call has the least load, so the bound would send its failed calls back to it.
        others = serving & (tiers != AVOIDED)
        if call.attempt and others.any() and not ((as_hit | as_compute) & others).any():
            as_compute = others
        return as_hit, as_compute | (serving & self._is_chosen(call)) if call.replica else as_compute

    def _has_refused(self, call: Call) -> Flags:
        """Returns, for each replica, whether it has refused the call."""
        return np.array([name in call.refused_by for name in self._names], np.bool_)

    def _is_chosen(self, call: Call) -> Flags:
        """Returns, for each replica, whether it was chosen for the call."""
        return np.array([name == call.replica for name in self._names], np.bool_)

    def _matches_identity(self, call: Call) -> Flags:
        """Returns, for each replica, whether it has the call's identity."""
        return self._identities == call.identity if call.identity else np.ones(len(self._names), np.bool_)

    def _tiers(self, call: Call) -> npt.NDArray[np.int64]:
        tiers = np.full(len(self._names), OTHER)
        if call.key is None:
            return tiers
        last, avoided = self._last_sent.get(call.key), self._avoided(call)
        if last is not None and last.name in self._index:
            tiers[self._index[last.name]] = SENT_LAST
        if avoided in self._index:
            tiers[self._index[avoided]] = AVOIDED
        return tiers

    def _avoided(self, call: Call) -> str:
        """Returns the replica of the failed attempt before; all calls of one key and attempt avoid the same one."""
        last = self._last_sent.get(call.key or "")
        if last is None or not call.attempt:
            return ""
        return last.name if last.attempt < call.attempt else last.avoided

    def _rank(self, call: Call, tiers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the indices of the replicas of the call's identity, best first, regardless of the bound."""
        if call.key is None:
            chance = np.array([random.random() for _ in self._names])
            keys = [chance, self._loads.sum(0)]
        else:
            keys = [~_mix(self._name_hashes ^ np.uint64(int(call.key[:16], 16))), tiers]
        if call.host and len(call.refused_by) < NEAR_REFUSALS:
            keys += [np.array([host != call.host for host in self._hosts], np.bool_), tiers == AVOIDED]
        if call.replica:
            keys.append(~self._is_chosen(call))
        order = np.lexsort([*keys, self._has_refused(call), tiers == AVOIDED] if call.refused_by else keys)
        return np.asarray(order[self._matches_identity(call)[order]])


def _hash_name(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scrambles 64-bit values by a bijection, the finalizer of splitmix64 (Steele, Lea, Flood)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
