"""How many language model replicas there should be: requests that run and wait, and the KV cache they take.

Pure decisions over numbers; see `scaling_policy.py`, which does the same for encoders. It must not know of Ray or vLLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deployments.scaling_hold import Hold, in_range

# What each replica reports, by these names (`LLM.record_autoscaling_stats`).
RUNNING_REQUESTS = "engine_running_requests"
WAITING_REQUESTS = "engine_waiting_requests"
KV_CACHE_USE = "kv_cache_use"


@dataclass(frozen=True)
class EngineLoad:
    """What one replica's engines have to do."""

    running: int = 0
    waiting: int = 0
    kv_cache_use: float = 0.0
    """The share of its KV cache that is taken, 0 to 1."""


@dataclass(frozen=True)
class LLMTargets:
    """What the operator asks for. Raises ValueError for what is out of range."""

    target_requests: float = 64.0
    """That a replica should have, running and waiting ones together; at most as many as its engine runs at once."""
    kv_cache_share: float = 0.8
    """Of its KV cache that a replica should have in use; beyond, requests wait or are computed again."""
    hold_s: float = 60.0
    """Replicas are kept for as long as they were needed at any moment of the last so many seconds."""
    growth: float = 2.0
    """At most so many times the replicas that run are asked for at once."""
    tolerance: float = 0.1
    """A smaller share of the replicas than this is not worth taking away."""

    def __post_init__(self) -> None:
        in_range(
            ("target_requests", self.target_requests, self.target_requests > 0, "over 0"),
            ("kv_cache_share", self.kv_cache_share, 0 < self.kv_cache_share <= 1, "over 0 and at most 1"),
            ("hold_s", self.hold_s, self.hold_s >= 0, "at least 0"),
            ("growth", self.growth, self.growth > 1, "over 1"),
            ("tolerance", self.tolerance, 0 <= self.tolerance < 1, "at least 0 and under 1"),
        )


@dataclass(frozen=True)
class LLMLoad:
    """What is known at one moment, of all replicas together."""

    now_s: float
    running: int
    """Replicas that can answer."""
    asked_for: int
    """Replicas that were asked for last."""
    running_requests: float
    waiting_requests: float
    """In the engines, for room."""
    coming_requests: float
    """On their way to a replica: at the handles, at the ingress, their images at the encoders."""
    kv_cache_use: float
    """In caches of a replica: 1.5 is one and a half of them full."""


class LLMScaler:
    """Remembers what was needed of late. For one deployment."""

    def __init__(self, targets: LLMTargets) -> None:
        self.targets = targets
        self._hold = Hold(targets.hold_s, targets.tolerance)

    def replicas(self, load: LLMLoad, *, least: int, most: int) -> int:
        """How many to ask for now, from `least` to `most`. Call it with times that do not go back."""
        need = self.needed(load, least=least, most=most)
        return min(max(self._hold.settled(load.now_s, need, load.asked_for), least), most)

    def needed(self, load: LLMLoad, *, least: int, most: int) -> int:
        """What this moment alone asks for: room for every request, by number and by the cache that such ones take."""
        requests = load.running_requests + load.waiting_requests + load.coming_requests
        by_number = requests / self.targets.target_requests
        by_cache = 0.0
        if load.running_requests > 0:
            by_cache = load.kv_cache_use * requests / load.running_requests / self.targets.kv_cache_share
        need = math.ceil(min(max(by_number, by_cache), most))
        return min(max(need, least), most, math.ceil(self.targets.growth * max(1, load.running)))
