"""References to items, the only media that vLLM gets: a request names each item by a key, and the LLM replica has
the item's header, or its pixels if the engine has its own tower.

Imports no vLLM, so that the deployments can be built without it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from PIL.Image import Image

from deployments.common.messages import new_key
from encoder.item_header import HeaderError, ItemHeader


class UnknownReferenceError(ValueError):
    """The key or digest belongs to no request in flight. vLLM answers a ValueError with status 400."""


class FetchRefusedError(ValueError):
    """vLLM tried to fetch media itself."""


def drop_holder(holders: Counter[str], key: str) -> bool:
    """Counts one holder of `key` less, and returns whether it was the last."""
    holders[key] -= 1
    if holders[key]:
        return False
    del holders[key]
    return True


class References:
    """Headers of the items of all requests in flight, by key and by digest. Thread-safe: the event loop adds and
    releases, vLLM's media and processor threads look up.

    key = references.add(header, reference.key)       # 128 random bits; the URL of the item in the request's body
    try:
        ...                                           # vLLM may look it up any number of times
    finally:
        references.release([key])
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[str, str] = {}
        self._entries: dict[str, ItemHeader] = {}
        self._holders: Counter[str] = Counter()
        """Calls that hold each key and each digest: a retry may come before the first call has ended."""

    def add(self, header: ItemHeader, key: str | None = None) -> str:
        """Returns the key of a reference, `key` or a new one, valid until as many calls of `release`.

        Raises HeaderError if another header has the same digest, ValueError if the key is another item's.
        """
        key = key or new_key()
        with self._lock:
            if self._digests.get(key, header.digest) != header.digest:
                raise ValueError(f"reference {key!r} is another item's")
            known = self._entries.setdefault(header.digest, header)
            if known != header:
                raise HeaderError(f"two headers of item {header.digest} differ: {known} and {header}")
            self._digests[key] = header.digest
            self._holders.update((key, header.digest))
        return key

    def release(self, keys: Iterable[str]) -> None:
        """Removes keys; those removed before are ignored. A header is removed with its last key."""
        with self._lock:
            for key in filter(self._digests.__contains__, keys):
                digest = self._digests[key]
                if drop_holder(self._holders, key):
                    del self._digests[key]
                if drop_holder(self._holders, digest):
                    del self._entries[digest]

    def header(self, key: str) -> ItemHeader:
        """Raises UnknownReferenceError."""
        with self._lock:
            return self._find(self._digests.get(key, ""))

    def header_by_digest(self, digest: str) -> ItemHeader:
        """Raises UnknownReferenceError."""
        with self._lock:
            return self._find(digest)

    def _find(self, digest: str) -> ItemHeader:
        header = self._entries.get(digest)
        if header is None:
            raise UnknownReferenceError("the request names media that no encoder has sent")
        return header


DecodedImages = dict[str, tuple[str, Image]]
"""Decoded images of all requests in flight, by key, for an engine with its own tower, each with its identifier in the
engine's caches. The event loop adds and removes, vLLM's media threads look up."""
