"""Which replica a call goes to: where its key is held, else by rendezvous hashing; never where too much is under way.

Pure decisions over names and numbers: the same code routes in Serve and under the clock of
`benchmarks/bench_affinity.py`. It must not know of Ray, nor what keys and weights stand for; `affinity_router.py` joins
it to Serve. Rendezvous hashing is Thaler's and Ravishankar's: each key ranks the replicas in an order of its own, so a
replica that comes or goes moves the keys that rank it first and no others. The bound is that of "Consistent Hashing
with Bounded Loads" (Mirrokni, Thorup, Zadimoghaddam).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

PREFIX_BYTES = 4
"""Of a digest, in what replicas publish. Another key with the same prefix costs a call to a replica without it."""
MAX_PUBLISHED = 1024
"""Digests that a replica publishes, those stored last: Serve sends all replicas' to every router, again and again."""
REMEMBERED_KEYS = 8192


@dataclass(frozen=True)
class Call:
    """What decides where a call goes. Serve carries it as a text."""

    key: str | None = None
    """At least 16 hex characters, evenly distributed, such as a digest. None: any replica does."""
    weight: int = 1
    """What it adds to its replica's load until it ends."""
    attempt: int = 0
    """Over 0: tried before, and the replica it went to is the last to try, unless it says that it holds the key."""

    def label(self) -> str:
        return f"{self.key or ''}:{self.weight}:{self.attempt}"

    @classmethod
    def from_label(cls, label: str) -> Call:
        """The call of a label; one without a key for what is no label."""
        key, _, numbers = label.partition(":")
        weight, _, attempt = numbers.partition(":")
        try:
            int(key[:16] or "0", 16)
            return cls(key or None, int(weight), int(attempt))
        except ValueError:
            return cls()


def published(digests: Collection[str], limit: int = MAX_PUBLISHED) -> bytes:
    """What a replica tells of the digests it holds, oldest first: the prefixes of the last `limit` of them."""
    newest = list(digests)[-limit:] if limit else []
    return b"".join(bytes.fromhex(digest[: 2 * PREFIX_BYTES]) for digest in newest)


class Affinity:
    """One router's view: the replicas there are, what they hold, and what this router has under way at each.

    A replica takes a call only if what it has under way is at most `load_bound` times the mean over all replicas, the
    call itself counted in the mean. Each router keeps the bound over what it has sent itself, and so their sum keeps
    it. Raises ValueError for a `load_bound` under 1, with which there could be no replica left.
    """

    def __init__(self, *, load_bound: float = 1.25) -> None:
        if not load_bound >= 1:
            raise ValueError(f"load_bound is {load_bound}; it must be at least 1")
        self._load_bound = load_bound
        self._names: list[str] = []
        self._index: dict[str, int] = {}
        self._points = np.zeros(0, np.uint64)
        self._loads = np.zeros(0, np.int64)
        self._total = 0
        self._held: dict[str, frozenset[int]] = {}
        self._holders: dict[int, set[str]] = {}
        self._sent: LRUCache[str, str] = LRUCache(REMEMBERED_KEYS)  # where a key went last: news before it is published

    def set_replicas(self, names: Iterable[str]) -> None:
        """The replicas that there are now. Those that stay keep their loads."""
        loads = dict(zip(self._names, self._loads.tolist(), strict=True))
        self._names = sorted(set(names))
        self._index = {name: number for number, name in enumerate(self._names)}
        self._points = np.array([_point_of(name) for name in self._names], np.uint64)
        self._loads = np.array([loads.get(name, 0) for name in self._names], np.int64)
        self._total = int(self._loads.sum())
        for gone in self._held.keys() - self._index.keys():
            self.publish(gone, b"")
            del self._held[gone]

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

    def order(self, call: Call) -> list[str]:
        """The replicas that may take the call, the best first; empty only where there is no replica."""
        if len(self._names) < 2:
            return list(self._names)
        ranked = self._ranked(call)
        return [self._names[at] for at in ranked[self._loads[ranked] <= self._most(call.weight)]]

    def _ranked(self, call: Call) -> npt.NDArray[np.int64]:
        """All replicas, the best first, whatever they have under way."""
        if call.key is None:
            chance = [random.random() for _ in self._names]
            return np.asarray(np.lexsort((np.array(chance), self._loads)))
        scores = _mixed(self._points ^ np.uint64(int(call.key[:16], 16)))
        return np.asarray(np.lexsort((~scores, self._tier(call))))

    def may_take(self, name: str, weight: int) -> bool:
        """Whether `order` would name the replica for a call of this weight now."""
        return name in self._index and (len(self._names) < 2 or self.load(name) <= self._most(weight))

    def passes_by(self, name: str, call: Call) -> bool:
        """Whether the bound keeps the call from a replica that would be better than this one."""
        if len(self._names) < 2 or int(self._loads.max()) <= self._most(call.weight):
            return False
        for at in self._ranked(call):
            if self._names[at] == name or self._loads[at] > self._most(call.weight):
                return self._names[int(at)] != name
        return False

    def begin(self, name: str, call: Call) -> None:
        """The call has been sent there. Let `end` follow for each."""
        self._add(name, call.weight)
        if call.key is not None:
            self._sent[call.key] = name

    def end(self, name: str, weight: int) -> None:
        """A call of this weight is over, however it went; of no effect for a replica that is gone."""
        self._add(name, -weight)

    def load(self, name: str) -> int:
        """The weights under way there, of this router's."""
        return int(self._loads[self._index[name]])

    def _add(self, name: str, weight: int) -> None:
        number = self._index.get(name)
        if number is not None:
            self._loads[number] += weight
            self._total += weight

    def _most(self, weight: int) -> float:
        """What a replica that takes a call of this weight may have under way."""
        return self._load_bound * (self._total + weight) / len(self._names)

    def _tier(self, call: Call) -> npt.NDArray[np.int64]:
        """0 for replicas that say they hold the key, 1 for where it was sent last, 2 for others, 3 for one to avoid."""
        assert call.key is not None
        tiers = np.full(len(self._names), 2)
        last = self._index.get(self._sent.get(call.key, ""))
        if last is not None:
            tiers[last] = 1
        if call.attempt and last is not None:
            tiers[last] = 3
        for name in self._holders.get(int(call.key[: 2 * PREFIX_BYTES], 16), ()):
            tiers[self._index[name]] = 0
        return tiers


def _point_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection that makes neighbours strangers: the finish of splitmix64 (Steele, Lea, Flood)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
