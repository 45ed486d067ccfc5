"""Durations whose start was measured by another host's clock. Hosts' clocks may differ by any amount, so these
durations are used for metrics only.
"""

from __future__ import annotations

from enum import Enum

from deployments.telemetry.metrics import Counter, Counters

MAX_DURATION_S = 600.0
"""Default request timeout, which no stage of a request exceeds."""


class ClockDifference(Enum):
    """Direction in which the other host's clock differs from this host's; the metric's label `skew`."""

    AHEAD = "ahead"
    BEHIND = "behind"


def clamp_duration(duration_s: float, counts: Counters) -> float:
    """Returns `duration_s` clamped to 0 to MAX_DURATION_S, and counts it if it was outside."""
    if 0 <= duration_s <= MAX_DURATION_S:
        return duration_s
    difference = ClockDifference.AHEAD if duration_s < 0 else ClockDifference.BEHIND
    counts.add(Counter.DURATIONS_CLAMPED, skew=difference.value)
    return min(max(duration_s, 0.0), MAX_DURATION_S)
