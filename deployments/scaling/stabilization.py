"""Stabilization window for scale-down, as in Kubernetes' HorizontalPodAutoscaler, the limit of a scale-up, and range
checks of the settings."""

from __future__ import annotations

import math
from collections import deque


def limit_growth(max_scale_up_factor: float, running_replicas: int, target_replicas: int) -> int:
    """Returns the most replicas to request: a multiple of the running ones, and at least those requested last, since
    replicas that start in place of lost ones do not run yet."""
    return max(target_replicas, math.ceil(max_scale_up_factor * max(1, running_replicas)))


class StabilizationWindow:
    """Maximum of the replicas that one deployment needed in the last `window_s` seconds."""

    def __init__(self, window_s: float, tolerance: float) -> None:
        """`tolerance`: share of the replicas below which a scale-down is skipped."""
        self._window_s = window_s
        self._tolerance = tolerance
        self._needed: deque[tuple[float, int]] = deque()
        """Times ascending, needs descending: the first is the maximum of the last `window_s`."""
        self._known_replicas = 0

    def apply(
        self, now_s: float, need: int, target_replicas: int, *, floor: int = 0, window_s: float | None = None
    ) -> int:
        """Returns the number of replicas to request if `need` are needed now.

        Args:
            target_replicas: replicas requested last.
            floor: least result, whatever the needs were.
            window_s: length of the window, if not that of the constructor.
        """
        # A new policy starts from the present number of replicas. So does one whose clock was set back, or it would
        # keep its maximum until the clock caught up.
        if not self._needed or now_s < self._needed[-1][0]:
            self._needed = deque([(now_s, target_replicas)])
        elif target_replicas > self._known_replicas:  # Serve starts a replica itself if there is none
            self._add(now_s, target_replicas)
        self._add(now_s, need)
        while self._needed[0][0] < now_s - (self._window_s if window_s is None else window_s):
            self._needed.popleft()
        needed = max(self._needed[0][1], floor)
        keeps = 0 < needed < target_replicas and target_replicas - needed < self._tolerance * target_replicas
        self._known_replicas = max(needed, target_replicas)
        return target_replicas if keeps else needed

    def _add(self, now_s: float, need: int) -> None:
        while self._needed and self._needed[-1][1] <= need:
            self._needed.pop()
        self._needed.append((now_s, need))


def in_range(targets: object, **checks: tuple[bool, str]) -> None:
    """Raises ValueError for an attribute that is not finite or fails its check, `(fits, limit in words)`."""
    for name, (fits, limit) in checks.items():
        value = getattr(targets, name)
        if not (fits and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; it must be {limit}")
