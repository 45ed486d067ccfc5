"""Directory of embeddings: their last known locations in encoders' shared memory, so that the next request with the
same image needs no encoder. Only language models on the host of a location can read it.

An entry may be stale: the language model detects it, and the ingress then calls an encoder.
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
import time
from collections.abc import Callable

from cachetools import LRUCache

from deployments.common.messages import SharedEmbedding
from deployments.transfer.unix_socket import host_of
from encoder.item_header import MAX_IMAGE_HEADER_BYTES, ItemHeader


class EmbeddingDirectory:
    """LRU directory of an ingress replica with at most `max_entries`; 0 disables it. Used from one event loop.

    An entry with a large header, such as a video's, counts as several.
    """

    def __init__(self, max_entries: int, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since the epoch, as in EncodeTimings."""
        self._locations: LRUCache[tuple[str, str], SharedEmbedding] = LRUCache(max_entries, getsizeof=_num_entries)
        self._clock = clock

    def __len__(self) -> int:
        return len(self._locations)

    def get(self, host: str, digest: str) -> SharedEmbedding | None:
        """Returns the expected location on the host with the timings of a cache hit now, None if it is unknown."""
        if (location := self._locations.get((host, digest))) is None:
            return None
        timings = dataclasses.replace(location.timings, cached=True, ready_at_s=self._clock())
        return dataclasses.replace(location, timings=timings)

    def put(self, location: SharedEmbedding) -> None:
        if _num_entries(location) <= self._locations.maxsize:
            # Each location arrives with its own copies of strings that all of them share.
            timings = dataclasses.replace(location.timings, replica=sys.intern(location.timings.replica))
            server = sys.intern(location.server)
            host = sys.intern(host_of(server))
            self._locations[host, location.digest] = dataclasses.replace(location, timings=timings, server=server)

    def discard(self, location: SharedEmbedding) -> None:
        """Forgets the location, unless a newer one of another server is known."""
        key = host_of(location.server), location.digest
        known = self._locations.get(key)
        if known is not None and known.server == location.server:
            del self._locations[key]


def _num_entries(location: SharedEmbedding) -> int:
    """Returns the size of the location in entries of MAX_IMAGE_HEADER_BYTES."""
    if not isinstance(location.header, ItemHeader) or location.header.modality == "image":
        return 1
    return 1 + len(pickle.dumps(location.header)) // MAX_IMAGE_HEADER_BYTES
