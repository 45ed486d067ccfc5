"""Histogram of batches by number of tokens and length of the longest image. Pure Python."""

from __future__ import annotations

from collections import Counter

# All counts are halved when the total exceeds this, so that older traffic weighs less.
_HALVED_AT = 50_000


class TrafficHistogram:
    """Traffic histogram of batches. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()
        self.total = 0
        """Number of batches in the histogram."""

    def add(self, num_tokens: int, max_seqlen: int, number: int = 1) -> None:
        """Counts `number` batches of `num_tokens` tokens whose longest image has `max_seqlen` patches."""
        self._counts[num_tokens, max_seqlen] += number
        self.total += number
        if self.total > _HALVED_AT:
            self._counts = Counter({key: count // 2 for key, count in self._counts.items() if count > 1})
            self.total = self._counts.total()

    def by_tokens(self) -> dict[int, int]:
        """Returns the number of batches by number of tokens."""
        found: Counter[int] = Counter()
        for (tokens, _), number in self._counts.items():
            found[tokens] += number
        return dict(found)

    def number(self, over: int, up_to: int, max_seqlen: int) -> int:
        """Counts batches of more than `over` and at most `up_to` tokens with no image over `max_seqlen` patches."""
        return sum(
            number
            for (tokens, longest), number in self._counts.items()
            if over < tokens <= up_to and longest <= max_seqlen
        )
