"""An encoder replica's embeddings in memory that other processes of the host can read: where they are written, and for
how long they stay.

An embedding lies here for as long as somebody refers to its array: the cache, an answer under way, a reader that holds
it, or an offer, which ends with the first reader or after a few seconds. Where there is no room, embeddings lie in
memory of the replica's own. It must not know who reads, nor of sockets.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.arena import Arena
from deployments.embedding_header import HEADER_BYTES, NOTHING, Header
from deployments.wire import EncodedImage

OFFERED_S = 10.0
"""From an encoder's answer to the reader's asking for the embedding."""

Bits = NDArray[np.generic]


class EmbeddingShelf:
    """May be used from any thread."""

    def __init__(
        self, num_bytes: int, *, offered_s: float = OFFERED_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.arena = Arena(num_bytes, holds="embeddings")
        self._offered_s, self._clock = offered_s, clock
        self._lock = threading.Lock()
        self._known: weakref.WeakValueDictionary[str, Bits] = weakref.WeakValueDictionary()
        self._offers: dict[str, tuple[Bits, float]] = {}

    def room(self, num_tokens: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Memory for an embedding `[num_tokens, width]`, kept by the tensor and its views; None where it is full."""
        num_bytes = num_tokens * width * dtype.itemsize
        lease = self.arena.take(HEADER_BYTES + num_bytes)
        if lease is None:
            self.prune()
            lease = self.arena.take(HEADER_BYTES + num_bytes)
        if lease is None:
            return None
        flat = lease.array((HEADER_BYTES + num_bytes,))
        flat[: len(NOTHING)] = 0
        return torch.from_numpy(flat[HEADER_BYTES:]).view(dtype).view(num_tokens, width)

    def offer(self, image: EncodedImage) -> bool:
        """Keeps the embedding for a reader that is about to ask for it; False where it does not lie here."""
        start = self._start(image.bits)
        if start is None:
            return False
        rows, width = image.bits.shape
        header = Header(image.digest, image.dtype, (rows, width), image.grid_thw).written()
        self.arena.write(start, header)
        with self._lock:
            self._known[image.digest] = image.bits
            self._offers[image.digest] = image.bits, self._clock() + self._offered_s
        return True

    def lend(self, digest: str) -> tuple[int, Bits] | None:
        """Where the embedding's header begins, and what keeps the embedding here; None where it is gone."""
        with self._lock:
            bits = self._known.get(digest)
            self._offers.pop(digest, None)
        start = None if bits is None else self._start(bits)
        return None if bits is None or start is None else (start, bits)

    def prune(self) -> None:
        """Ends the offers that nobody came for."""
        now = self._clock()
        with self._lock:
            over = [digest for digest, (_, until) in self._offers.items() if until <= now]
            ended = [self._offers.pop(digest) for digest in over]
        del ended  # outside of the lock: their leases may end here

    def _start(self, bits: Bits) -> int | None:
        start = bits.ctypes.data - self.arena.address - HEADER_BYTES
        return start if 0 <= start <= self.arena.num_bytes - HEADER_BYTES - bits.nbytes else None
