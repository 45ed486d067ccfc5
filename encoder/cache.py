"""A cache of embeddings, bounded in bytes, for those who serve: the encoder itself does without.

It must not know of tensors, Ray or requests: values are opaque, their bytes are told, keys are digests.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Generic, TypeVar

from cachetools import LRUCache

V = TypeVar("V")


@dataclass(frozen=True)
class CacheCounts:
    """Since the start: `hits`, `misses`, `evictions` (dropped for room) and `too_large` (never stored), in entries.

    Now: `num_entries` and `num_bytes` held.
    """

    hits: int
    misses: int
    evictions: int
    too_large: int
    num_entries: int
    num_bytes: int


class EmbeddingCache(Generic[V]):
    """Keeps the entries used last within `max_bytes`. May be used from any thread.

    Keys are compared whole. `max_bytes` 0 stores nothing that has bytes. Raises ValueError for a negative `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least 0")
        self._entries: LRUCache[str, tuple[V, int]] = LRUCache(max_bytes, getsizeof=lambda entry: entry[1])
        self._hits = self._misses = self._evictions = self._too_large = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> V | None:
        """The value, which becomes the one used last, or None. Counts a hit or a miss."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            return entry[0]

    def put(self, key: str, value: V, num_bytes: int) -> bool:
        """Stores `value`, which holds `num_bytes`, in place of any earlier one, and drops what was used least recently.

        False, and nothing is stored or dropped, if it is larger than the cache. Raises ValueError for negative bytes.
        """
        if num_bytes < 0:
            raise ValueError(f"num_bytes is {num_bytes}; it must be at least 0")
        with self._lock:
            if num_bytes > self._entries.maxsize:
                self._too_large += 1
                return False
            expected = len(self._entries) + (key not in self._entries)
            self._entries[key] = (value, num_bytes)
            self._evictions += expected - len(self._entries)
            return True

    def drop_oldest(self) -> bool:
        """Drops what was used least recently, for somebody who needs its memory; False where nothing is held."""
        with self._lock:
            if not self._entries:
                return False
            self._entries.popitem()
            self._evictions += 1
            return True

    def keys(self) -> list[str]:
        """What is held, in the order in which it was stored."""
        with self._lock:
            return list(self._entries)

    def clear(self) -> None:
        """Drops every entry; the counts go on."""
        with self._lock:
            self._entries.clear()

    def __contains__(self, key: str) -> bool:
        """Whether it is held, without counting or touching it."""
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def counts(self) -> CacheCounts:
        return CacheCounts(
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            too_large=self._too_large,
            num_entries=len(self._entries),
            num_bytes=int(self._entries.currsize),
        )
