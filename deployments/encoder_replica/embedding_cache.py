"""LRU cache of embeddings, bounded in bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from cachetools import LRUCache

V = TypeVar("V")


class EmbeddingCache(Generic[V]):
    """Thread-safe LRU cache of at most `max_bytes` (0 or more).

    Keys are whole digests; values are opaque objects that weak references may refer to.
    """

    def __init__(self, max_bytes: int) -> None:
        self._entries: LRUCache[str, tuple[V, int]] = LRUCache(max_bytes, getsizeof=lambda entry: entry[1])
        self._lock = threading.Lock()

    def get(self, key: str) -> V | None:
        """Returns the value and marks it as most recently used, or returns None."""
        with self._lock:
            entry = self._entries.get(key)
            return None if entry is None else entry[0]

    def put(self, key: str, value: V, num_bytes: int) -> None:
        """Stores `value` of `num_bytes`, replacing any earlier one, and evicts the least recently used entries; does
        nothing if `value` is larger than the cache."""
        if num_bytes <= self._entries.maxsize:
            with self._lock:
                self._entries[key] = (value, num_bytes)

    def evict_oldest(self, may_evict: Callable[[V], bool]) -> bool:
        """Evicts the least recently used entry that `may_evict` and that nothing else refers to, which frees its
        memory. Older entries count as used from now on. Returns False, with the order unchanged, if there is none."""
        with self._lock:
            for _ in range(len(self._entries)):
                key, (value, num_bytes) = self._entries.popitem()
                if may_evict(value):
                    reference = weakref.ref(value)
                    del value
                    if (held := reference()) is None:
                        return True
                    value = held
                self._entries[key] = value, num_bytes
            return False

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return int(self._entries.currsize)

    def __contains__(self, key: str) -> bool:
        """Whether `key` is cached. Does not mark it as used."""
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
