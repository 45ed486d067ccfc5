"""Where embeddings were last seen: what language models read from encoders' memory, for the next request with the same
image, whose ingress then need not ask an encoder.

It may be out of date: whoever goes there finds out, and an encoder is asked after all. It must not know of replicas or
requests, and never holds an embedding itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from cachetools import LRUCache

from deployments.wire import SharedEmbedding


class Whereabouts:
    """Of one ingress replica, the `max_entries` used last; with 0 nothing is remembered. Used from one event loop."""

    def __init__(self, max_entries: int, *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch, as in EncodeTimings."""
        self._seen: LRUCache[str, SharedEmbedding] = LRUCache(max_entries)
        self._clock = clock

    def __len__(self) -> int:
        return len(self._seen)

    def get(self, key: str) -> SharedEmbedding | None:
        """Where it should lie, as of an image that comes from a cache now; None where that is not known."""
        seen = self._seen.get(key)
        if seen is None:
            return None
        timings = dataclasses.replace(seen.timings, cached=True, ready_at_s=self._clock())
        return dataclasses.replace(seen, timings=timings)

    def put(self, key: str, seen: SharedEmbedding) -> None:
        if self._seen.maxsize:
            self._seen[key] = seen

    def clear(self) -> None:
        self._seen.clear()

    def forget(self, key: str) -> None:
        self._seen.pop(key, None)
