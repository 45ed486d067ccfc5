"""Directory of embeddings: their last known locations in encoders' shared memory, so that the next request with the
same image needs no encoder, and the embeddings of each conversation that vLLM's prefix cache may cover.

An entry may be stale: the language model detects it, and the ingress then calls an encoder.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from cachetools import LRUCache

from deployments.common.messages import SharedEmbedding


class EmbeddingDirectory:
    """LRU directory of an ingress replica with at most `max_entries`; 0 disables it. Used from one event loop."""

    def __init__(self, max_entries: int, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since the epoch, as in EncodeTimings."""
        self._locations: LRUCache[str, SharedEmbedding] = LRUCache(max_entries)
        self._prefix_cached: LRUCache[tuple[str, str], SharedEmbedding | None] = LRUCache(max_entries)
        self._clock = clock

    def __len__(self) -> int:
        return len(self._locations)

    def get(self, key: str) -> SharedEmbedding | None:
        """Returns the expected location with the timings of a cache hit now, None if it is unknown."""
        location = self._locations.get(key)
        return None if location is None else self._as_cache_hit(location)

    def get_all(self, keys: Sequence[str], conversation: str | None) -> list[SharedEmbedding | None]:
        """Returns the location of each embedding of a request, as `get` does. Embeddings that only vLLM's prefix cache
        may cover are PREFIX_CACHE_ONLY, if all others are known: vLLM gets all embeddings of a request with it, or
        none."""
        known = [self.get(key) for key in keys]
        if conversation is None or None not in known:
            return known
        expected = [self._prefix_cached.get((conversation, key)) for key in keys]
        both = [
            one or (None if other is None else self._as_cache_hit(other))
            for one, other in zip(known, expected, strict=True)
        ]
        return known if None in both else both

    def record_prefix_hit(self, conversation: str, location: SharedEmbedding) -> None:
        """Records that an engine has used this embedding, which is stored nowhere, for the conversation."""
        if (
            self._prefix_cached.maxsize
            and self._prefix_cached.get((conversation, location.digest), location) is not None
        ):
            self._prefix_cached[conversation, location.digest] = location

    def record_prefix_miss(self, conversation: str, key: str) -> None:
        """Records that the prefix cache missed the embedding; it is not expected for this conversation again."""
        if self._prefix_cached.maxsize:
            self._prefix_cached[conversation, key] = None

    def _as_cache_hit(self, location: SharedEmbedding) -> SharedEmbedding:
        timings = dataclasses.replace(location.timings, cached=True, ready_at_s=self._clock())
        return dataclasses.replace(location, timings=timings)

    def put(self, key: str, location: SharedEmbedding) -> None:
        if self._locations.maxsize:
            self._locations[key] = location

    def clear(self) -> None:
        self._locations.clear()

    def discard(self, key: str) -> None:
        self._locations.pop(key, None)
