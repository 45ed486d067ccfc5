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
        self._seen: LRUCache[str, SharedEmbedding] = LRUCache(max_entries)
        self._in_engines: LRUCache[tuple[str, str], SharedEmbedding | None] = LRUCache(max_entries)
        self._clock = clock

    def __len__(self) -> int:
        return len(self._seen)

    def get(self, key: str) -> SharedEmbedding | None:
        """Returns the expected location with the timings of a cache hit now, None if it is unknown."""
        seen = self._seen.get(key)
        return None if seen is None else self._cached(seen)

    def of_all(self, keys: Sequence[str], conversation: str | None) -> list[SharedEmbedding | None]:
        """Returns the location of each embedding of a request, as `get` does. Embeddings that only vLLM's prefix cache
        may cover are PREFIX_CACHE_ONLY, if all others are known: vLLM gets all embeddings of a request with it, or
        none."""
        seen = [self.get(key) for key in keys]
        if conversation is None or None not in seen:
            return seen
        expected = [self._in_engines.get((conversation, key)) for key in keys]
        both = [
            one or (None if other is None else self._cached(other)) for one, other in zip(seen, expected, strict=True)
        ]
        return seen if None in both else both

    def in_engine(self, conversation: str, seen: SharedEmbedding) -> None:
        """Records that an engine has used this embedding, which is stored nowhere, for the conversation."""
        if self._in_engines.maxsize and self._in_engines.get((conversation, seen.digest), seen) is not None:
            self._in_engines[conversation, seen.digest] = seen

    def not_in_engine(self, conversation: str, key: str) -> None:
        """Records that the prefix cache missed the embedding; it is not expected for this conversation again."""
        if self._in_engines.maxsize:
            self._in_engines[conversation, key] = None

    def _cached(self, seen: SharedEmbedding) -> SharedEmbedding:
        timings = dataclasses.replace(seen.timings, cached=True, ready_at_s=self._clock())
        return dataclasses.replace(seen, timings=timings)

    def put(self, key: str, seen: SharedEmbedding) -> None:
        if self._seen.maxsize:
            self._seen[key] = seen

    def clear(self) -> None:
        self._seen.clear()

    def forget(self, key: str) -> None:
        self._seen.pop(key, None)
