"""Encoders and language models together: each by its own need, and a fixed number of GPUs between them.

Pure decisions over numbers; see `scaling_policy.py`. It must not know of Ray, nor how either need is found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from deployments.llm_scaling import LLMLoad, LLMScaler, LLMTargets
from deployments.scaling_hold import in_range
from deployments.scaling_policy import ScalingTargets, VisualLoad, VisualScaler

# What each ingress replica reports, by these names (`Ingress.record_autoscaling_stats`).
LINE_TOKENS = "line_tokens"
LINE_REQUESTS = "line_requests"
IN_FLIGHT_TOKENS = "in_flight_tokens"
UNACCEPTED_REQUESTS = "unaccepted_requests"

UNBOUNDED = 1_000_000
"""Replicas: more than any deployment has."""


@dataclass(frozen=True)
class IngressLoad:
    """What all ingress replicas have under way."""

    line_tokens: float = 0.0
    """Visual tokens of requests whose turn has not come."""
    in_flight_tokens: float = 0.0
    """Of those whose turn has come and whose embeddings no language model has yet."""
    unaccepted_requests: float = 0.0
    """From their arrival until a language model has them, those in line and those without images among them."""
    line_requests: float = 0.0
    """Of these, those whose turn has not come."""


@dataclass(frozen=True)
class Bounds:
    """Of one deployment's replicas, by the operator's `autoscaling_config`."""

    least: int
    most: int


@dataclass(frozen=True)
class Pool:
    """GPUs that encoders and language models share. Raises ValueError for what is out of range."""

    gpus: float = math.inf
    """Of both together; infinite where each has as many as it needs."""
    encoder_gpus: float = 1.0
    """Of one replica."""
    llm_gpus: float = 1.0
    """Of one replica."""
    shift_gain: float = 0.2
    """A shift has to take so large a share off the want of whoever lacks most; each costs a start."""
    shift_hold_s: float = 60.0
    """Between two shifts."""

    def __post_init__(self) -> None:
        in_range(
            ("gpus", min(self.gpus, UNBOUNDED), self.gpus > 0, "over 0"),
            ("encoder_gpus", self.encoder_gpus, self.encoder_gpus > 0, "over 0"),
            ("llm_gpus", self.llm_gpus, self.llm_gpus > 0, "over 0"),
            ("shift_gain", self.shift_gain, 0 <= self.shift_gain < 1, "at least 0 and under 1"),
            ("shift_hold_s", self.shift_hold_s, self.shift_hold_s >= 0, "at least 0"),
        )

    def taken(self, encoders: int, llms: int) -> float:
        """GPUs of so many replicas."""
        return encoders * self.encoder_gpus + llms * self.llm_gpus


class ProportionScaler:
    """Both deployments of one application. Remembers what they needed, and when GPUs were shifted last."""

    def __init__(self, encoders: ScalingTargets, llms: LLMTargets, pool: Pool) -> None:
        self._encoders = VisualScaler(encoders)
        self._llms = LLMScaler(llms)
        self._pool = pool
        self._shifted_at = -math.inf

    def replicas(
        self, encoders: VisualLoad, llms: LLMLoad, ingress: IngressLoad, *, bounds: tuple[Bounds, Bounds]
    ) -> tuple[int, int]:
        """Encoders and language models to ask for now. Call it with times that do not go back."""
        encoders, llms = with_ingress(encoders, llms, ingress)
        (for_encoders, for_llms), shared = bounds, math.isfinite(self._pool.gpus)
        # Where GPUs are short, the needs decide who gets them, whether or not either could be met.
        most = (UNBOUNDED, UNBOUNDED) if shared else (for_encoders.most, for_llms.most)
        needs = (
            self._encoders.replicas(encoders, least=for_encoders.least, most=most[0]),
            self._llms.replicas(llms, least=for_llms.least, most=most[1]),
        )
        granted = (min(needs[0], for_encoders.most), min(needs[1], for_llms.most))
        if self._pool.taken(*granted) <= self._pool.gpus:
            return granted
        now = (encoders.asked_for, llms.asked_for)
        best = split(needs, self._pool, bounds)
        if not self._worth_a_shift(encoders.now_s, needs, now, best, bounds):
            return now
        self._shifted_at = encoders.now_s
        return best

    def _worth_a_shift(
        self,
        now_s: float,
        needs: tuple[int, int],
        now: tuple[int, int],
        best: tuple[int, int],
        bounds: tuple[Bounds, Bounds],
    ) -> bool:
        within = all(bound.least <= count <= bound.most for count, bound in zip(now, bounds, strict=True))
        if not within or self._pool.taken(*now) > self._pool.gpus:
            return True
        before, after = lack(needs, now), lack(needs, best)
        if after >= before or after > (1 - self._pool.shift_gain) * before:
            return False
        takes_nothing = best[0] >= now[0] and best[1] >= now[1]
        return takes_nothing or now_s - self._shifted_at >= self._pool.shift_hold_s


def with_ingress(encoders: VisualLoad, llms: LLMLoad, ingress: IngressLoad) -> tuple[VisualLoad, LLMLoad]:
    """Both loads with what waits at the ingress, counted for whoever it waits for.

    The line moves when embeddings arrive at a language model. Of the tokens in flight, the encoders hold some up and
    the language models the others; in the same shares the line waits for the two.
    """
    at_encoders = encoders.backlog_tokens + encoders.waiting_images * (encoders.tokens_per_image or 0.0)
    share = 1.0 if encoders.running == 0 else 0.0
    if ingress.in_flight_tokens > 0:
        share = min(1.0, at_encoders / ingress.in_flight_tokens) if encoders.running else 1.0
    coming = ingress.unaccepted_requests - ingress.line_requests * share
    return (
        replace(encoders, waiting_tokens=ingress.line_tokens * share),
        replace(llms, coming_requests=max(llms.coming_requests, coming)),
    )


def lack(needs: tuple[int, int], counts: tuple[int, int]) -> float:
    """How many times what there is would be needed, of that deployment that lacks most."""
    return max(_lack(need, count) for need, count in zip(needs, counts, strict=True))


def _lack(need: int, count: int) -> float:
    if need == 0:
        return 0.0
    return need / count if count else math.inf


def split(needs: tuple[int, int], pool: Pool, bounds: tuple[Bounds, Bounds]) -> tuple[int, int]:
    """The replicas that the pool holds, within the bounds, so that who lacks most lacks as little as can be.

    Where not even the least that both must have fit, they get that.
    """
    for_encoders, for_llms = bounds
    wanted = pool.taken(*needs)
    even = needs[0] * pool.gpus / wanted if wanted else 0.0
    best = (for_encoders.least, for_llms.least)
    # With a count of replicas given, the other follows; the best lies beside the even split, or at a bound.
    edge = (pool.gpus - for_llms.least * pool.llm_gpus) / pool.encoder_gpus
    full = (pool.gpus - for_llms.most * pool.llm_gpus) / pool.encoder_gpus
    for candidate in (math.floor(even), math.ceil(even), math.floor(edge), math.ceil(full), for_encoders.least):
        encoders = min(max(candidate, for_encoders.least), for_encoders.most)
        llms = math.floor((pool.gpus - encoders * pool.encoder_gpus) / pool.llm_gpus + 1e-9)
        llms = min(llms, for_llms.most)
        if llms < for_llms.least:
            continue
        counts = (min(encoders, needs[0]), min(llms, needs[1]))
        counts = (max(counts[0], for_encoders.least), max(counts[1], for_llms.least))
        if lack(needs, counts) < lack(needs, best):
            best = counts
    return best
