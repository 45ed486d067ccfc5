"""Counters that tests read."""

from __future__ import annotations

import collections

from deployments.telemetry.metrics import LABELS, Counter, Counters


class Added(Counters):
    """Without Ray."""

    def __init__(self) -> None:
        self.added: collections.Counter[tuple[Counter, str | None]] = collections.Counter()

    def add(self, counter: Counter, number: int = 1, **labels: str) -> None:
        assert list(labels) == ([LABELS[counter]] if counter in LABELS else [])
        if number > 0:
            self.added[counter, next(iter(labels.values()), None)] += number
