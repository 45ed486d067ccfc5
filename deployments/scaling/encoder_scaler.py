"""Number of encoder replicas for the visual load: queued tokens, arriving tokens per second, measured speed.

Pure decisions over numbers, so that the same code runs in Serve's controller and under the simulated clock of
`benchmarks/simulation/simulate.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from deployments.scaling.stabilization import StabilizationWindow, in_range
from deployments.scaling.utilization_target import ArrivalSeries, Given, LearnedUtilization

# Keys of the autoscaling stats that each replica reports (`EncoderReplica.record_autoscaling_stats`).
BACKLOG_TOKENS = "backlog_tokens"
ARRIVING_TOKENS_PER_S = "arriving_tokens_per_s"
GIVEN_TOKENS = "given_tokens"
TOKENS_PER_S = "tokens_per_s"
TOKENS_PER_IMAGE = "tokens_per_image"
CACHE_BYTES = "cache_bytes"


@dataclass(frozen=True)
class ScalingTargets:
    """Settings of VisualTokenPolicy. Raises ValueError if one is out of range."""

    target_encode_delay_s: float = 1.0
    """Time within which the backlog should be encoded."""
    target_utilization: float | None = None
    """Share of its time that a replica should be busy with arriving work; the rest is headroom for bursts. None: it is
    learned from the traffic (`utilization_target.py`), together with the stabilization window."""
    scale_down_stabilization_s: float = 120.0
    """Stabilization window: the highest number of replicas needed in this time is kept. If `target_utilization` is
    learned, the window is 0.25 to 5 times as long for arriving work, and never longer for queued work."""
    replica_startup_s: float = 0.0
    """Time a replica takes to start. If set, the backlog may take that much longer, so that bursts that are over by
    then start fewer replicas."""
    max_scale_up_factor: float = 2.0
    """Most replicas requested at once, as a multiple of the running ones."""
    tolerance: float = 0.1
    """Share of the replicas below which a scale-down is skipped."""

    def __post_init__(self) -> None:
        in_range(
            self,
            target_encode_delay_s=(self.target_encode_delay_s > 0, "over 0"),
            scale_down_stabilization_s=(self.scale_down_stabilization_s >= 0, "at least 0"),
            replica_startup_s=(self.replica_startup_s >= 0, "at least 0"),
            max_scale_up_factor=(self.max_scale_up_factor > 1, "over 1"),
            tolerance=(0 <= self.tolerance < 1, "at least 0 and under 1"),
        )
        if self.target_utilization is not None:
            in_range(self, target_utilization=(0 < self.target_utilization <= 1, "over 0 and at most 1"))


@dataclass(frozen=True)
class VisualLoad:
    """Load of a deployment at one moment. Tokens are merged tokens, summed over replicas unless stated otherwise."""

    now_s: float
    running: int
    """Replicas that can encode."""
    asked_for: int
    """Replicas requested last."""
    backlog_tokens: float
    """Tokens that replicas have received and not encoded."""
    waiting_images: float
    """Images that wait at the handles for a replica."""
    arriving_tokens_per_s: float
    tokens_per_s: float | None
    """Speed of one busy replica; None before the first measurement."""
    tokens_per_image: float | None
    """Mean over recent images; None before the first image."""
    given: Given = field(default_factory=dict)
    """Time series, by replica, of the tokens received since its start."""


class VisualScaler:
    """Scaler of one deployment: keeps the recent needs and the last measured speed and image size."""

    def __init__(self, targets: ScalingTargets) -> None:
        self.targets = targets
        self._hold = StabilizationWindow(targets.scale_down_stabilization_s, targets.tolerance)
        self._given = ArrivalSeries()
        self._learnt = LearnedUtilization(
            targets.target_encode_delay_s, targets.scale_down_stabilization_s, targets.replica_startup_s
        )
        self._tokens_per_s: float | None = None
        self._tokens_per_image: float | None = None

    def replicas(self, load: VisualLoad, *, least: int, most: int) -> int:
        """Returns the number of replicas to request, from `least` to `most`."""
        need, kept, hold_s = (
            self.needed(load, least=least, most=most),
            0,
            self.targets.scale_down_stabilization_s,
        )
        if self.targets.target_utilization is None and self._tokens_per_s is not None:
            kept = self._in_steps(
                self._learnt.wanted_tokens_per_s, self._tokens_per_s, load.running, least=0, most=most
            )
            hold_s = min(hold_s, self._learnt.hold_s)
        settled = self._hold.apply(load.now_s, need, load.asked_for, kept=kept, hold_s=hold_s)
        return min(max(settled, least), most)

    def needed(self, load: VisualLoad, *, least: int, most: int) -> int:
        """Returns the replicas that the present load needs, to keep up with arrivals and to encode the backlog within
        the target, without a stabilization window.
        """
        targets = self.targets
        self._tokens_per_s = load.tokens_per_s or self._tokens_per_s
        self._tokens_per_image = load.tokens_per_image or self._tokens_per_image
        if self._tokens_per_s is None or (self._tokens_per_image is None and load.waiting_images > 0):
            busy = load.backlog_tokens > 0 or load.waiting_images > 0
            return min(max(load.asked_for, int(busy), least), most)  # until speed and image size are measured
        waiting = load.backlog_tokens + load.waiting_images * (self._tokens_per_image or 0.0)
        clear_s = targets.replica_startup_s + targets.target_encode_delay_s
        share = self._busy_share(load, self._tokens_per_s)
        per_s = load.arriving_tokens_per_s / share + waiting / clear_s
        return self._in_steps(per_s, self._tokens_per_s, load.running, least=least, most=most)

    def _in_steps(self, per_s: float, tokens_per_s: float, running: int, *, least: int, most: int) -> int:
        """Returns the replicas for `per_s` tokens per second, limited by `max_scale_up_factor`."""
        if per_s * self.targets.target_encode_delay_s < 1:  # an exponentially weighted mean never decays to 0
            return least
        need = math.ceil(min(per_s / tokens_per_s, most))
        return min(max(need, least), most, math.ceil(self.targets.max_scale_up_factor * max(1, running)))

    def _busy_share(self, load: VisualLoad, tokens_per_s: float) -> float:
        if self.targets.target_utilization is not None:
            return self.targets.target_utilization
        for tokens in self._given.seconds(load.now_s, load.given):
            self._learnt.second(tokens, tokens_per_s)
        return self._learnt.share
