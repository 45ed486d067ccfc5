"""What scaling policies have in common: holding on to replicas that were needed a moment ago, and checked settings.

Holding on to the most that was needed of late, before going down, is the stabilisation window of Kubernetes'
HorizontalPodAutoscaler. It must not know what replicas are needed for.
"""

from __future__ import annotations

import math
from collections import deque


class Hold:
    """What was needed of late. For one deployment."""

    def __init__(self, hold_s: float, tolerance: float) -> None:
        """`tolerance`: a smaller share of the replicas than this is not taken away."""
        self._hold_s = hold_s
        self._tolerance = tolerance
        self._needed: deque[tuple[float, int]] = deque()
        """Times ascending, needs descending: the first is the most of the last `hold_s`."""

    def settled(self, now_s: float, need: int, asked_for: int, *, kept: int = 0, hold_s: float | None = None) -> int:
        """How many to ask for where `need` are needed now. Call it with times that do not go back.

        Args:
            kept: replicas that are to be there whatever else was needed.
            hold_s: another than that of the start.
        """
        if not self._needed:  # a new policy takes over what there is, and has seen nothing yet that says it is too much
            self._needed.append((now_s, asked_for))
        while self._needed and self._needed[-1][1] <= need:
            self._needed.pop()
        self._needed.append((now_s, need))
        while self._needed[0][0] < now_s - (self._hold_s if hold_s is None else hold_s):
            self._needed.popleft()
        most = max(self._needed[0][1], kept)
        keeps = 0 < most < asked_for and asked_for - most < self._tolerance * asked_for
        return asked_for if keeps else most


def in_range(*checks: tuple[str, float, bool, str]) -> None:
    """Each a setting's name, its value, whether that fits, and the limit in words. Raises ValueError."""
    for name, value, fits, limit in checks:
        if not (fits and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; it must be {limit}")
