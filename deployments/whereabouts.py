"""Where embeddings were last seen: what language models read from encoders' memory, for the next request with the same
image, whose ingress then need not ask an encoder; and what an engine has seen of a conversation, which its prefix cache
may make up for.

It may be out of date: whoever goes there finds out, and an encoder is asked after all. It must not know of replicas or
requests, and never holds an embedding itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from cachetools import LRUCache

from deployments.wire import SharedEmbedding


class Whereabouts:
    """Of one ingress replica, the `max_entries` used last; with 0 nothing is remembered. Used from one event loop."""

    def __init__(self, max_entries: int, *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch, as in EncodeTimings."""
        self._seen: LRUCache[str, SharedEmbedding] = LRUCache(max_entries)
        self._in_engines: LRUCache[tuple[str, str], SharedEmbedding | None] = LRUCache(max_entries)
        self._clock = clock

    def __len__(self) -> int:
        return len(self._seen)

    def get(self, key: str) -> SharedEmbedding | None:
        """Where it should lie, as of an image that comes from a cache now; None where that is not known."""
        seen = self._seen.get(key)
        return None if seen is None else self._cached(seen)

    def of_all(self, keys: Sequence[str], conversation: str | None) -> list[SharedEmbedding | None]:
        """Of one request's embeddings, as `get`; those that only an engine may have are NOWHERE, and named where the
        others are known too: vLLM takes all embeddings of a request with it, or none."""
        seen = [self.get(key) for key in keys]
        if conversation is None or None not in seen:
            return seen
        expected = [self._in_engines.get((conversation, key)) for key in keys]
        both = [
            one or (None if other is None else self._cached(other)) for one, other in zip(seen, expected, strict=True)
        ]
        return seen if None in both else both

    def in_engine(self, conversation: str, seen: SharedEmbedding) -> None:
        """An engine has answered this conversation with the embedding, which is not to be had without an encoder."""
        if self._in_engines.maxsize and self._in_engines.get((conversation, seen.digest), seen) is not None:
            self._in_engines[conversation, seen.digest] = seen

    def not_in_engine(self, conversation: str, key: str) -> None:
        """It was not there: for this conversation that is not expected again."""
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
