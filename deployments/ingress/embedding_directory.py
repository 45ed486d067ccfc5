"""Directory of embeddings: their last known locations in encoders' shared memory, so that the next request with the
same image needs no encoder.

An entry may be stale: the language model detects it, and the ingress then calls an encoder.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from cachetools import LRUCache

from deployments.common.messages import SharedEmbedding


class EmbeddingDirectory:
    """LRU directory of an ingress replica with at most `max_entries`; 0 disables it. Used from one event loop."""

    def __init__(self, max_entries: int, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since the epoch, as in EncodeTimings."""
        self._locations: LRUCache[str, SharedEmbedding] = LRUCache(max_entries)
        self._clock = clock

    def __len__(self) -> int:
        return len(self._locations)

    def get(self, key: str) -> SharedEmbedding | None:
        """Returns the expected location with the timings of a cache hit now, None if it is unknown."""
        location = self._locations.get(key)
        if location is None:
            return None
        timings = dataclasses.replace(location.timings, cached=True, ready_at_s=self._clock())
        return dataclasses.replace(location, timings=timings)

    def put(self, key: str, location: SharedEmbedding) -> None:
        if self._locations.maxsize:
            self._locations[key] = location

    def clear(self) -> None:
        self._locations.clear()

    def discard(self, key: str) -> None:
        self._locations.pop(key, None)
