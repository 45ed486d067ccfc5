"""Number of encoder replicas for the visual load: queued tokens, arriving tokens per second, measured speed.

Pure decisions over numbers, so that the same code runs in Serve's controller and under the simulated clock of
`benchmarks/simulation/simulate.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from deployments.scaling.stabilization import StabilizationWindow, in_range, limit_growth
from deployments.scaling.utilization_target import ArrivalSeries, LearnedUtilization, TokenSamples

# Keys of the autoscaling stats that each replica reports (`EncoderReplica.record_autoscaling_stats`).
BACKLOG_TOKENS = "backlog_tokens"
ARRIVING_TOKENS_PER_S = "arriving_tokens_per_s"
RECEIVED_TOKENS = "given_tokens"
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
    """Most replicas requested at once, as a multiple of the running ones; never less than were requested before."""
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
    running_replicas: int
    """Replicas that can encode."""
    target_replicas: int
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
    received_tokens: TokenSamples = field(default_factory=dict)
    """Time series, by replica, of the tokens received since its start."""


class VisualScaler:
    """Scaler of one deployment: keeps the recent needs and the last measured speed and image size."""

    def __init__(self, targets: ScalingTargets) -> None:
        self.targets = targets
        self._window = StabilizationWindow(targets.scale_down_stabilization_s, targets.tolerance)
        self._arrivals = ArrivalSeries()
        self._learned = LearnedUtilization(
            targets.target_encode_delay_s, targets.scale_down_stabilization_s, targets.replica_startup_s
        )
        self._tokens_per_s: float | None = None
        self._tokens_per_image: float | None = None

    def choose_replicas(self, load: VisualLoad, *, min_replicas: int, max_replicas: int) -> int:
        """Returns the number of replicas to request, from `min_replicas` to `max_replicas`."""
        need = self.compute_need(load, min_replicas=min_replicas, max_replicas=max_replicas)
        floor, window_s = 0, self.targets.scale_down_stabilization_s
        if self.targets.target_utilization is None and self._tokens_per_s is not None:
            per_s = self._learned.target_tokens_per_s
            floor = self._to_replicas(per_s, self._tokens_per_s, load, min_replicas=0, max_replicas=max_replicas)
            window_s = min(window_s, self._learned.window_s)
        settled = self._window.apply(load.now_s, need, load.target_replicas, floor=floor, window_s=window_s)
        return min(max(settled, min_replicas), max_replicas)

    def compute_need(self, load: VisualLoad, *, min_replicas: int, max_replicas: int) -> int:
        """Returns the replicas that the present load needs, to keep up with arrivals and to encode the backlog within
        the target, without a stabilization window.
        """
        targets = self.targets
        self._tokens_per_s = load.tokens_per_s or self._tokens_per_s
        self._tokens_per_image = load.tokens_per_image or self._tokens_per_image
        if self._tokens_per_s is None or (self._tokens_per_image is None and load.waiting_images > 0):
            busy = load.backlog_tokens > 0 or load.waiting_images > 0
            # Until speed and image size are measured, replicas are kept while there is work or some of them start.
            is_idle = not busy and not self._is_traffic(load.arriving_tokens_per_s)
            kept = 0 if is_idle and load.running_replicas >= load.target_replicas else load.target_replicas
            return min(max(kept, int(busy), min_replicas), max_replicas)
        waiting = load.backlog_tokens + load.waiting_images * (self._tokens_per_image or 0.0)
        clear_s = targets.replica_startup_s + targets.target_encode_delay_s
        utilization = self._target_utilization(load, self._tokens_per_s)
        per_s = load.arriving_tokens_per_s / utilization + waiting / clear_s
        least = max(min_replicas, int(waiting > 0))
        return self._to_replicas(per_s, self._tokens_per_s, load, min_replicas=least, max_replicas=max_replicas)

    def _is_traffic(self, tokens_per_s: float) -> bool:
        # An exponentially weighted mean never decays to 0.
        return tokens_per_s * self.targets.target_encode_delay_s >= 1

    def _to_replicas(
        self, per_s: float, tokens_per_s: float, load: VisualLoad, *, min_replicas: int, max_replicas: int
    ) -> int:
        """Returns the replicas for `per_s` tokens per second, limited by `max_scale_up_factor`."""
        if not self._is_traffic(per_s):
            return min_replicas
        need = math.ceil(min(per_s / tokens_per_s, max_replicas))
        most = limit_growth(self.targets.max_scale_up_factor, load.running_replicas, load.target_replicas)
        return min(max(need, min_replicas), max_replicas, most)

    def _target_utilization(self, load: VisualLoad, tokens_per_s: float) -> float:
        if self.targets.target_utilization is not None:
            return self.targets.target_utilization
        for tokens in self._arrivals.final_seconds(load.now_s, load.received_tokens):
            self._learned.step(tokens, tokens_per_s)
        return self._learned.utilization
