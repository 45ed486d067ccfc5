"""Embeddings of an encoder replica in shared memory: their allocation and lifetime.

An embedding is kept while it is referenced: by the cache, an answer in flight, a reader's lease, or an offer. If the
shared memory is full, embeddings are kept in private memory of the replica, from which they are read by TCP; offers
keep at most as many bytes there as in the shared memory.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.common.messages import EncodedImage
from deployments.transfer.header import EMPTY_HEADER, HEADER_BYTES, Header
from deployments.transfer.shared_memory import Arena

OFFER_TIMEOUT_S = 600.0
"""Maximum time from an encoder's answer to its reader's `acquire`."""
MIN_OFFER_AGE_S = 10.0
"""Minimum age of an offer that is ended because its memory is needed."""
RECENT_READS = 256


@dataclass
class _Offer:
    """An embedding that readers are about to acquire."""

    image: EncodedImage
    number: int
    """Readers that have not acquired it; those whose requests were cancelled remain until the offer expires."""
    offered_at_s: float
    """Time of the last offer."""


class EmbeddingStore:
    """Shared memory of an encoder replica and the embeddings in it. Thread-safe.

    tokens = store.allocate(num_tokens, width, torch.bfloat16)  # the encoder writes to it
    store.offer(EncodedImage.pack(tokens, digest, timings))
    image = store.acquire(digest)  # kept while `image` is referenced
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        offer_timeout_s: float = OFFER_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        on_evicted: Callable[[int], None] = lambda number: None,
    ) -> None:
        """`on_evicted` receives the number of offers that ended unread because their memory was needed."""
        self.arena = Arena(num_bytes, purpose="embeddings")
        self._offer_timeout_s, self._clock, self._on_evicted = offer_timeout_s, clock, on_evicted
        self._lock = threading.RLock()
        # Last published copy by digest. The weak reference is to the image, not its bits: all holders hold the image.
        self._published_images: weakref.WeakValueDictionary[str, EncodedImage] = weakref.WeakValueDictionary()
        self._offers: dict[str, _Offer] = {}  # by digest or reader, ascending by time of the last offer
        self._recent_waits_s: deque[float] = deque([0.0], RECENT_READS)

    def allocate(self, num_tokens: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Allocates an embedding `[num_tokens, width]`, freed with the tensor and its views. Returns None if full.

        If memory is needed, offers end that are older than MIN_OFFER_AGE_S and than any recently read offer was. The
        age of several offers of one embedding is that of the last one.
        """
        num_bytes = num_tokens * width * dtype.itemsize
        memory = self.arena.allocate(HEADER_BYTES + num_bytes)
        if memory is None:
            with self._lock:
                num_evicted = self._end_offers(max(MIN_OFFER_AGE_S, *self._recent_waits_s))
            if num_evicted:
                self._on_evicted(num_evicted)
            memory = self.arena.allocate(HEADER_BYTES + num_bytes)
        if memory is None:
            return None
        flat = memory.array((HEADER_BYTES + num_bytes,))
        flat[: len(EMPTY_HEADER)] = 0
        return torch.from_numpy(flat[HEADER_BYTES:]).view(dtype).view(num_tokens, width)

    def publish(self, image: EncodedImage) -> EncodedImage:
        """Allows readers to acquire the embedding while it is referenced. Returns the published object with these
        bits."""
        offset = self.offset_of(image)
        with self._lock:
            known = self._published_images.get(image.digest)
            if known is not None and known.bits is image.bits:
                return known
            if offset is not None:
                self.arena.write(offset, Header.of(image).to_bytes())
            self._published_images[image.digest] = image
        return image

    def find(self, digest: str) -> EncodedImage | None:
        """Returns the embedding if it is still stored here."""
        with self._lock:
            offer = self._offers.get(digest)
            return self._published_images.get(digest) if offer is None else offer.image

    def offer(self, image: EncodedImage, *, reader: str | None = None) -> bool:
        """Publishes the embedding and keeps it for one reader, which is about to acquire it. Returns False if it is in
        private memory, and offers keep too much there. `reader`: name of a reader whose offer ends by `end_offer`, not
        by `acquire`."""
        key = reader or image.digest
        with self._lock:
            held = self._private_bytes_besides(image) if self.offset_of(image) is None else 0
            if held and held + image.num_bytes > self.arena.num_bytes:
                return False
            published = self.publish(image)
            offer = self._offers.pop(key, None)
            self._offers[key] = _Offer(published, 1 + (offer.number if offer else 0), self._clock())
        return True

    def acquire(self, digest: str, *, offered: bool = True) -> EncodedImage | None:
        """Returns the object that keeps the embedding here; None if it was freed.

        `offered`: the embedding was offered to this reader, and the call ends one offer.
        """
        with self._lock:
            image = self.find(digest)
            if offered:
                self.end_offer(digest)
        return image

    def end_offer(self, key: str) -> None:
        """Ends one offer for `key`, a digest or the name of a reader, which has read the embedding."""
        with self._lock:
            offer = self._offers.get(key)
            if offer is not None:
                self._recent_waits_s.append(self._clock() - offer.offered_at_s)
                offer.number -= 1
                if not offer.number:
                    del self._offers[key]

    def is_offered(self, key: str) -> bool:
        """Whether there is an offer for `key`, a digest or a reader's name."""
        return key in self._offers

    def expire_offers(self) -> None:
        """Ends offers older than `offer_timeout_s`: their readers' requests have timed out."""
        with self._lock:
            self._end_offers(self._offer_timeout_s)

    def offset_of(self, image: EncodedImage) -> int | None:
        """Returns the offset of the image's header, or None if it is not stored here."""
        offset = image.bits.ctypes.data - self.arena.address - HEADER_BYTES
        return offset if 0 <= offset <= self.arena.num_bytes - HEADER_BYTES - image.bits.nbytes else None

    def _private_bytes_besides(self, image: EncodedImage) -> int:
        offered = {id(offer.image.bits): offer.image for offer in self._offers.values()}
        offered.pop(id(image.bits), None)
        return sum(other.num_bytes for other in offered.values() if self.offset_of(other) is None)

    def _end_offers(self, age_s: float) -> int:
        """Ends entries whose last offer is `age_s` old or older. Returns the number of offers that ended."""
        until, ended = self._clock() - age_s, 0
        while self._offers:
            key, offer = next(iter(self._offers.items()))
            if offer.offered_at_s > until:
                break
            del self._offers[key]
            ended += offer.number
        return ended
