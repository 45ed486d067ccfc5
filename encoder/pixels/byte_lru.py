"""An LRU cache bounded by bytes that counts hits and misses; uses the standard library only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByteLru(Generic[K, V]):
    """LRU cache that computes missing values. Not thread-safe."""

    def __init__(self, make: Callable[[K], V], num_bytes: Callable[[V], int], max_bytes: int) -> None:
        self._make = make
        self._num_bytes = num_bytes
        self._max_bytes = max_bytes
        self._values: OrderedDict[K, V] = OrderedDict()
        self.held_bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, key: K) -> V:
        """Returns the value of `key`. A value larger than `max_bytes` is computed on each call and evicts nothing."""
        if key in self._values:
            self.hits += 1
            self._values.move_to_end(key)
            return self._values[key]
        self.misses += 1
        value = self._make(key)
        size = self._num_bytes(value)
        if size <= self._max_bytes:
            self._values[key] = value
            self.held_bytes += size
            while self.held_bytes > self._max_bytes:
                self.held_bytes -= self._num_bytes(self._values.popitem(last=False)[1])
        return value

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)
