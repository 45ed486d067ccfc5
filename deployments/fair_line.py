"""Whose turn it is in an encoder replica: by age, except that large requests yield to small ones for a while.

An image takes its place in line as if it had arrived later by the time that it and the images before it in its own
request take. So the sixteenth image of a large request stands where it would be if that request had the device for
itself, and the one image of a small request that comes meanwhile stands before it (start-time fair queueing, where a
request is a flow). Nobody yields for longer than MAX_YIELD_S, so nobody is overtaken by what arrives over MAX_YIELD_S
later than itself, however much of it there is.

The line decides who is first. Who may run together with the first is the packer's choice among the WINDOW first, and
every batch holds the first in line: an image that is the n-th in line is in one of the next n batches.

Numbers alone: it must not know of images, devices or clocks.
"""

from __future__ import annotations

import bisect
from typing import Generic, TypeVar

MAX_YIELD_S = 2.0
WINDOW = 32
"""So many of the first in line are packed together: twice a batch's images fill it to within two per cent."""

T = TypeVar("T")


def place_of(now_s: float, *, tokens: int, tokens_before: int, tokens_per_s: float) -> float:
    """The moment as whose arrival it stands in line, in seconds.

    Args:
        tokens: of the image.
        tokens_before: of the images before it in its request.
        tokens_per_s: the replica's speed; 0 before it is known, when the line goes by age alone.
    """
    return now_s + (min((tokens_before + tokens) / tokens_per_s, MAX_YIELD_S) if tokens_per_s > 0 else 0.0)


class FairLine(Generic[T]):
    """Ascending in place; those with equal places as they came. For one thread."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, T]] = []
        self._came = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, place: float, item: T) -> None:
        """In O(number that wait); places mostly ascend, so that it is the end of the list that moves."""
        self._came += 1
        bisect.insort(self._waiting, (place, self._came, item), key=lambda entry: entry[:2])

    def pop(self) -> T:
        """The first. Raises IndexError where nobody waits."""
        return self._waiting.pop(0)[2]

    def take(self, most: int | None = None) -> list[tuple[float, T]]:
        """The first, at most so many, with their places; None takes all."""
        taken = [(place, item) for place, _, item in self._waiting[:most]]
        del self._waiting[:most]
        return taken

    def discard(self, item: T) -> None:
        """Somebody leaves, if it waits."""
        self._waiting = [entry for entry in self._waiting if entry[2] is not item]
