"""Which replica a call goes to: where its key is held, else by rendezvous hashing; never where too much is under way.

Pure decisions over names and numbers: the same code routes in Serve and under the clock of
`benchmarks/bench_affinity.py`. It must not know of Ray, nor what keys and weights stand for; `affinity_router.py` joins
it to Serve. Rendezvous hashing is Thaler's and Ravishankar's: each key ranks the replicas in an order of its own, so a
replica that comes or goes moves the keys that rank it first and no others. The bound is that of "Consistent Hashing
with Bounded Loads" (Mirrokni, Thorup, Zadimoghaddam).
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

PREFIX_BYTES = 4
"""Of a digest, in what replicas publish. Another key with the same prefix costs a call to a replica without it."""
MAX_PUBLISHED = 1024
"""Digests that a replica publishes, those stored last: Serve sends all replicas' to every router, again and again."""
HELD = "held_digests"
"""The entry of a replica's routing stats that holds what `published` makes."""
REMEMBERED_KEYS = 8192
Flags = npt.NDArray[np.bool_]

SAYS_SO, SENT_LAST, OTHER, AVOIDED = range(4)
"""What a replica is to a call's key, the best first."""


class Work(IntEnum):
    """What a call is to its replica."""

    DO = 0
    GIVE = 1
    """The replica has what is asked for, or is about to."""


@dataclass(frozen=True)
class Begun:
    """A call that is under way."""

    name: str
    weight: int
    work: Work


@dataclass(frozen=True)
class Call:
    """What decides where a call goes. Serve carries it as a text."""

    key: str | None = None
    """At least 16 hex characters, evenly distributed, such as a digest. None: any replica does."""
    weight: int = 1
    """What it adds to its replica's load until it ends."""
    attempt: int = 0
    """Over 0: tried before, and the replica it went to is the last to try, unless it only has to give what it says that
    it holds."""
    cost: int = 0
    """What it costs a replica that does not hold the key, in the unit in which replicas tell what they have to do."""

    def label(self) -> str:
        return f"{self.key or ''}:{self.weight}:{self.attempt}:{self.cost}"

    @classmethod
    def from_label(cls, label: str) -> Call:
        """The call of a label; one without a key for what is no label."""
        key, _, numbers = label.partition(":")
        try:
            int(key[:16] or "0", 16)
            weight, attempt, cost = map(int, numbers.split(":"))
            return cls(key or None, weight, attempt, cost)
        except ValueError:
            return cls()


def published(digests: Iterable[str], limit: int = MAX_PUBLISHED) -> bytes:
    """What a replica tells of the digests it holds, oldest first: the prefixes of the last `limit` of them."""
    newest = list(digests)[-limit:] if limit else []
    return b"".join(bytes.fromhex(digest[: 2 * PREFIX_BYTES]) for digest in newest)


class Affinity:
    """One router's view: the replicas there are, what they hold, and what this router has under way at each.

    A replica takes a call only if what it has under way is at most `load_bound` times the mean over all replicas, the
    call itself counted in the mean. With `giving_apart`, work is of two kinds, each bounded by itself: a replica that
    holds what a call asks for only gives it, and takes the call unless it has too much to give, whatever else it has to
    do. A call that one replica has failed passes the bound rather than go back there. Each router keeps the bound over
    what it has sent itself, and so their sum keeps it.

    Raises ValueError for a `load_bound` under 1, with which there could be no replica left.
    """

    def __init__(self, *, load_bound: float = 1.25, giving_apart: bool = False) -> None:
        if not load_bound >= 1:
            raise ValueError(f"load_bound is {load_bound}; it must be at least 1")
        self._load_bound = load_bound
        self._giving_apart = giving_apart
        self._names: list[str] = []
        self._index: dict[str, int] = {}
        self._points = np.zeros(0, np.uint64)
        self._loads = np.zeros((len(Work), 0), np.int64)
        self._held: dict[str, frozenset[int]] = {}
        self._holders: dict[int, set[str]] = {}
        self._reports: defaultdict[str, int] = defaultdict(int)  # how often each has published
        # Where a key went last and how often that replica had published: news before it is told.
        self._sent: LRUCache[str, tuple[str, int]] = LRUCache(REMEMBERED_KEYS)

    def set_replicas(self, names: Iterable[str]) -> None:
        """The replicas that there are now. Those that stay keep their loads."""
        loads = {name: self._loads[:, at].tolist() for name, at in self._index.items()}
        self._names = sorted(set(names))
        self._index = {name: number for number, name in enumerate(self._names)}
        self._points = np.array([_point_of(name) for name in self._names], np.uint64)
        kept = [loads.get(name, [0] * len(Work)) for name in self._names]
        self._loads = np.array(kept, np.int64).reshape(-1, len(Work)).T.copy()
        for gone in self._held.keys() - self._index.keys():
            self.publish(gone, b"")
            del self._held[gone], self._reports[gone]

    def publish(self, name: str, held: bytes) -> None:
        """What the replica holds now, as `published` tells it. Raises ValueError for half a prefix."""
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

    def order(self, call: Call) -> list[str]:
        """The replicas that may take the call, the best first; empty only where there is no replica."""
        if len(self._names) < 2:
            return list(self._names)
        tiers = self._tiers(call)
        gives, does = self._room(call, tiers)
        ranked = self._ranked(call, tiers)
        return [self._names[at] for at in ranked[(gives | does)[ranked]]]

    def ranked(self, call: Call) -> list[str]:
        """All replicas, the best for the call's key first, whatever they have under way."""
        return [self._names[at] for at in self._ranked(call, self._tiers(call))]

    def passes_by(self, name: str, call: Call) -> bool:
        """Whether the bound keeps the call from a replica that would be better than this one."""
        tiers = self._tiers(call)
        gives, does = self._room(call, tiers)
        takes = gives | does
        if takes.all():
            return False
        better = itertools.takewhile(lambda at: self._names[at] != name, self._ranked(call, tiers).tolist())
        return any(not takes[at] for at in better)

    def begin(self, name: str, call: Call, *, bounded: bool = True) -> Begun | None:
        """The call goes there, until `end`; None where the replica is gone or, if `bounded`, may not take it, as
        `order` says.
        """
        at = self._index.get(name)
        if at is None:
            return None
        gives, does = self._room(call, self._tiers(call))
        if bounded and len(self._names) > 1 and not (gives[at] or does[at]):
            return None
        begun = Begun(name, call.weight, Work.GIVE if gives[at] else Work.DO)
        self._loads[begun.work, at] += call.weight
        if call.key is not None:
            self._sent[call.key] = (name, self._reports.get(name, 0))
        return begun

    def end(self, begun: Begun) -> None:
        """The call is over, however it went; of no effect for a replica that is gone."""
        at = self._index.get(begun.name)
        if at is not None:
            self._loads[begun.work, at] -= begun.weight

    def load(self, name: str, work: Work = Work.DO) -> int:
        """The weights under way there, of this router's."""
        return int(self._loads[work, self._index[name]])

    def _room(self, call: Call, tiers: npt.NDArray[np.int64]) -> tuple[Flags, Flags]:
        """For each replica, whether it can give what the call asks for, and whether it can do the work."""
        fits = self._loads * len(self._names) <= self._load_bound * (self._loads.sum(1, keepdims=True) + call.weight)
        gives = fits[Work.GIVE] & (tiers <= SENT_LAST) if self._giving_apart else np.zeros(len(self._names), bool)
        does = fits[Work.DO]
        # A replica that fails whatever it gets has always least to do: the bound would send what it failed back to it.
        others = tiers != AVOIDED
        if call.attempt and others.any() and not ((gives | does) & others).any():
            does = others
        return gives, does

    def _tiers(self, call: Call) -> npt.NDArray[np.int64]:
        tiers = np.full(len(self._names), OTHER)
        if call.key is None:
            return tiers
        last, reports = self._sent.get(call.key, ("", 0))
        if last in self._index and (call.attempt or self._may_hold_still(last, reports)):
            tiers[self._index[last]] = AVOIDED if call.attempt else SENT_LAST
        for name in self._holders.get(int(call.key[: 2 * PREFIX_BYTES], 16), ()):
            if name != last or not call.attempt or self._giving_apart:
                tiers[self._index[name]] = SAYS_SO
        return tiers

    def _may_hold_still(self, name: str, reports: int) -> bool:
        """Whether what was sent there after so many reports may be there, though it is in none.

        The next report may be from before it was there; one that is full may leave it out.
        """
        return self._reports.get(name, 0) - reports < 2 or len(self._held[name]) >= MAX_PUBLISHED

    def _ranked(self, call: Call, tiers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """All replicas, the best first, whatever they have under way."""
        if call.key is None:
            chance = np.array([random.random() for _ in self._names])
            return np.asarray(np.lexsort((chance, self._loads.sum(0))))
        scores = _mixed(self._points ^ np.uint64(int(call.key[:16], 16)))
        return np.asarray(np.lexsort((~scores, tiers)))


def _point_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection that makes neighbours strangers: the finish of splitmix64 (Steele, Lea, Flood)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
