"""Fair queue of an encoder replica: first in, first out by age, except that small requests overtake large ones for a
bounded time.

An image is queued by virtual arrival time: its arrival plus the service time of itself and of the images before it in
its own request. The sixteenth image of a large request is therefore queued where it would be if that request had the
device alone, and the single image of a small request that arrives meanwhile is queued before it (start-time fair
queueing with a request as a flow). If vLLM cannot begin with a request before its last image, all of them are queued
where the last one is: of equal requests, the first is then complete first. The delay is capped at MAX_YIELD_S, so no
image is overtaken by images that arrive more than MAX_YIELD_S after it, whatever their number.

The queue determines the first image. The packer chooses the rest of the batch among the first WINDOW images, and every
batch contains the first one: the n-th queued image is in one of the next n batches.

The module does arithmetic on numbers only.
"""

from __future__ import annotations

import bisect
from typing import Generic, TypeVar

MAX_YIELD_S = 2.0
WINDOW = 32
"""Images at the head of the queue that are packed together: twice a batch's images fill it to within 2 %."""

T = TypeVar("T")


def virtual_arrival_s(now_s: float, *, tokens: int, tokens_before: int, tokens_per_s: float) -> float:
    """Returns the virtual arrival time in seconds, the key that orders the queue.

    Args:
        tokens: of the image.
        tokens_before: of the images before it in its request, or of all the others.
        tokens_per_s: measured speed of the replica; 0 while it is unknown, which orders the queue by age alone.
    """
    return now_s + (min((tokens_before + tokens) / tokens_per_s, MAX_YIELD_S) if tokens_per_s > 0 else 0.0)


class FairQueue(Generic[T]):
    """Queue in ascending order of virtual arrival time, equal ones in order of insertion. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, T]] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, virtual_arrival_s: float, item: T) -> None:
        """Inserts in O(queue length). Keys mostly ascend, so an insertion moves only the end of the list."""
        self._num_added += 1
        bisect.insort(self._waiting, (virtual_arrival_s, self._num_added, item), key=lambda entry: entry[:2])

    def pop(self) -> T:
        """Removes and returns the first item. Raises IndexError if the queue is empty."""
        return self._waiting.pop(0)[2]

    def take(self, limit: int | None = None) -> list[tuple[float, T]]:
        """Removes the first `limit` items, all if None, and returns them with their virtual arrival times."""
        items = [(place, item) for place, _, item in self._waiting[:limit]]
        del self._waiting[:limit]
        return items

    def discard(self, item: T) -> None:
        """Removes `item` if it is queued."""
        self._waiting = [entry for entry in self._waiting if entry[2] is not item]
