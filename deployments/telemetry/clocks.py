"""Durations whose start was measured by another host's clock. Hosts' clocks may differ by any amount, so these
durations are used for metrics only.
"""

from __future__ import annotations

from deployments.telemetry.metrics import Counter, Counters

MAX_DURATION_S = 600.0
"""Default request timeout, which no stage of a request exceeds."""


def clamp_duration(duration_s: float, counts: Counters) -> float:
    """Returns `duration_s` clamped to 0 to MAX_DURATION_S, and counts it if it was outside."""
    if 0 <= duration_s <= MAX_DURATION_S:
        return duration_s
    counts.add(Counter.DURATIONS_CLAMPED, skew="ahead" if duration_s < 0 else "behind")  # of the other host's clock
    return min(max(duration_s, 0.0), MAX_DURATION_S)
