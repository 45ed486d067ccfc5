"""Number of language model replicas for the load: running and queued requests, KV cache utilization.

Pure decisions over numbers, like `encoder_scaler.py` for encoders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deployments.scaling.stabilization import StabilizationWindow, in_range, limit_growth

# Keys of the autoscaling stats that each replica reports (`LLM.record_autoscaling_stats`).
RUNNING_REQUESTS = "engine_running_requests"
WAITING_REQUESTS = "engine_waiting_requests"
KV_CACHE_USE = "kv_cache_use"


@dataclass(frozen=True)
class EngineLoad:
    """Load of one replica's engines."""

    running_requests: int = 0
    waiting_requests: int = 0
    kv_cache_use: float = 0.0
    """Share of the replica's KV cache that is in use, 0 to 1."""


@dataclass(frozen=True)
class LLMTargets:
    """Settings of EngineLoadPolicy. Raises ValueError if one is out of range."""

    target_requests: float = 64.0
    """Requests that a replica should have, running and queued; at most as many as its engine runs at once."""
    target_kv_cache_utilization: float = 0.8
    """Share of its KV cache that a replica should have in use; beyond it, requests wait or are preempted."""
    scale_down_stabilization_s: float = 60.0
    """Stabilization window: the highest number of replicas needed in this time is kept."""
    max_scale_up_factor: float = 2.0
    """Most replicas requested at once, as a multiple of the running ones; never less than were requested before."""
    tolerance: float = 0.1
    """Share of the replicas below which a scale-down is skipped."""

    def __post_init__(self) -> None:
        in_range(
            self,
            target_requests=(self.target_requests > 0, "over 0"),
            target_kv_cache_utilization=(0 < self.target_kv_cache_utilization <= 1, "over 0 and at most 1"),
            scale_down_stabilization_s=(self.scale_down_stabilization_s >= 0, "at least 0"),
            max_scale_up_factor=(self.max_scale_up_factor > 1, "over 1"),
            tolerance=(0 <= self.tolerance < 1, "at least 0 and under 1"),
        )


@dataclass(frozen=True)
class LLMLoad:
    """Load of a deployment at one moment, summed over replicas."""

    now_s: float
    running_replicas: int
    """Replicas that can serve requests."""
    target_replicas: int
    """Replicas requested last."""
    running_requests: float
    waiting_requests: float
    """Requests queued in the engines."""
    queued_requests: float
    """Requests queued at the handles, which no replica has received yet."""
    kv_cache_use: float
    """Sum of the shares of the replicas' KV caches in use: 1.5 means one and a half full caches."""


class LLMScaler:
    """Scaler of one deployment: keeps the recent needs."""

    def __init__(self, targets: LLMTargets) -> None:
        self.targets = targets
        self._window = StabilizationWindow(targets.scale_down_stabilization_s, targets.tolerance)

    def choose_replicas(self, load: LLMLoad, *, min_replicas: int, max_replicas: int) -> int:
        """Returns the number of replicas to request, from `min_replicas` to `max_replicas`."""
        need = self.compute_need(load, min_replicas=min_replicas, max_replicas=max_replicas)
        return min(max(self._window.apply(load.now_s, need, load.target_replicas), min_replicas), max_replicas)

    def compute_need(self, load: LLMLoad, *, min_replicas: int, max_replicas: int) -> int:
        """Returns the replicas that the present load needs, by number of requests and by the KV cache of such requests,
        without a stabilization window.
        """
        requests = load.running_requests + load.waiting_requests + load.queued_requests
        by_number = requests / self.targets.target_requests
        by_cache = 0.0
        if load.running_requests > 0:
            by_cache = load.kv_cache_use * requests / load.running_requests / self.targets.target_kv_cache_utilization
        need = math.ceil(min(max(by_number, by_cache), max_replicas))
        most = limit_growth(self.targets.max_scale_up_factor, load.running_replicas, load.target_replicas)
        return min(max(need, min_replicas), max_replicas, most)
