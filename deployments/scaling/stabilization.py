"""Stabilization window for scale-down, as in Kubernetes' HorizontalPodAutoscaler, and range checks of the settings."""

from __future__ import annotations

import math
from collections import deque


class StabilizationWindow:
    """Maximum of the replicas that one deployment needed in the last `hold_s` seconds."""

    def __init__(self, hold_s: float, tolerance: float) -> None:
        """`tolerance`: share of the replicas below which a scale-down is skipped."""
        self._hold_s = hold_s
        self._tolerance = tolerance
        self._needed: deque[tuple[float, int]] = deque()
        """Times ascending, needs descending: the first is the maximum of the last `hold_s`."""

    def apply(self, now_s: float, need: int, asked_for: int, *, kept: int = 0, hold_s: float | None = None) -> int:
        """Returns the number of replicas to request if `need` are needed now.

        Args:
            asked_for: replicas requested last.
            kept: least result, whatever the needs were.
            hold_s: length of the window, if not that of the constructor.
        """
        # A new policy starts from the present number of replicas. So does one whose clock was set back, or it would
        # keep its maximum until the clock caught up.
        if not self._needed or now_s < self._needed[-1][0]:
            self._needed = deque([(now_s, asked_for)])
        while self._needed and self._needed[-1][1] <= need:
            self._needed.pop()
        self._needed.append((now_s, need))
        while self._needed[0][0] < now_s - (self._hold_s if hold_s is None else hold_s):
            self._needed.popleft()
        most = max(self._needed[0][1], kept)
        keeps = 0 < most < asked_for and asked_for - most < self._tolerance * asked_for
        return asked_for if keeps else most


def in_range(targets: object, **checks: tuple[bool, str]) -> None:
    """Raises ValueError for an attribute that is not finite or fails its check, `(fits, limit in words)`."""
    for name, (fits, limit) in checks.items():
        value = getattr(targets, name)
        if not (fits and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; it must be {limit}")
