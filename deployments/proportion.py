"""Encoders and language models together: each by its own need, and a fixed number of GPUs between them.

Pure decisions over numbers; see `scaling_policy.py`. It must not know of Ray, nor how either need is found.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import partial

from deployments.llm_scaling import LLMLoad, LLMScaler, LLMTargets
from deployments.scaling_hold import in_range
from deployments.scaling_policy import ScalingTargets, VisualLoad, VisualScaler

# What each ingress replica reports, by these names (`Ingress.record_autoscaling_stats`).
LINE_TOKENS = "line_tokens"
IN_FLIGHT_TOKENS = "in_flight_tokens"
UNACCEPTED_REQUESTS = "unaccepted_requests"

A_LITTLE = 0.05
"""Of a replica, which no other is asked for."""
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
    use_all: bool = False
    """GPUs that nobody needs at the moment are given out too; they are shifted when somebody lacks some."""

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
        self._means: tuple[float, float] | None = None
        self._means_at = -math.inf

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
        if not (shared and self._pool.use_all) and self._pool.taken(*granted) <= self._pool.gpus:
            return granted
        now = (encoders.asked_for, llms.asked_for)
        needs = self._lasting(
            encoders.now_s,
            # Where there is too little for the encoders' share of idle time, none is set aside.
            self._encoders.needed(encoders, least=for_encoders.least, most=UNBOUNDED, idle=False),
            self._llms.needed(llms, least=for_llms.least, most=UNBOUNDED),
        )
        best = split(needs, self._pool, bounds)
        if not self._worth_a_shift(encoders.now_s, needs, now, best, bounds):
            return now
        self._shifted_at = encoders.now_s
        return best

    def _lasting(self, now_s: float, *needs: int) -> tuple[int, int]:
        """Means over about the time between two shifts: a burst is over before a GPU has changed sides."""
        if self._means is None:
            self._means = (float(needs[0]), float(needs[1]))
        share = 1.0 if self._pool.shift_hold_s == 0 else -math.expm1((self._means_at - now_s) / self._pool.shift_hold_s)
        self._means_at = now_s
        encoders, llms = (mean + (need - mean) * share for mean, need in zip(self._means, needs, strict=True))
        self._means = (encoders, llms)
        return math.ceil(encoders - A_LITTLE), math.ceil(llms - A_LITTLE)

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
        takes_nothing = best[0] >= now[0] and best[1] >= now[1]
        if self._pool.use_all and takes_nothing:
            return True
        before, after = lack(needs, now), lack(needs, best)
        if after >= before or after > (1 - self._pool.shift_gain) * before or (self._pool.use_all and before <= 1):
            return False
        return takes_nothing or now_s - self._shifted_at >= self._pool.shift_hold_s


def with_ingress(encoders: VisualLoad, llms: LLMLoad, ingress: IngressLoad) -> tuple[VisualLoad, LLMLoad]:
    """Both loads with what waits at the ingress, counted for whoever it waits for.

    The line moves when embeddings arrive at a language model. Of the tokens in flight, the encoders hold some up and
    the language models the others; in the same shares all requests wait for the two. Those that wait for encoders come
    to a language model one by one, as fast as these encode.
    """
    at_encoders = encoders.backlog_tokens + encoders.waiting_images * (encoders.tokens_per_image or 0.0)
    share = 1.0 if encoders.running == 0 else 0.0
    if ingress.in_flight_tokens > 0:
        share = min(1.0, at_encoders / ingress.in_flight_tokens) if encoders.running else 1.0
    coming = ingress.unaccepted_requests * (1 - share)
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

    Nobody gets more than it needs, unless the pool is to be used as a whole; then both have more in proportion. Where
    not even the least that both must have fit, they get that.
    """
    for_encoders, for_llms = bounds
    if pool.taken(for_encoders.least, for_llms.least) > pool.gpus:
        return for_encoders.least, for_llms.least
    if pool.use_all:
        needs = (max(1, needs[0]), max(1, needs[1]))

    def beside(llms: int) -> tuple[int, int]:
        """With as many encoders as there is room for."""
        return min(for_encoders.most, _whole((pool.gpus - llms * pool.llm_gpus) / pool.encoder_gpus)), llms

    room = _whole((pool.gpus - for_encoders.least * pool.encoder_gpus) / pool.llm_gpus)
    possible = range(for_llms.least, min(for_llms.most, room) + 1)
    # The more language models, the less they lack and the more the encoders do: the best is where the two cross.
    crossing = bisect_left(possible, True, key=lambda llms: _lack(needs[1], llms) <= _lack(needs[0], beside(llms)[0]))
    counts = min(
        (beside(possible[at]) for at in (crossing - 1, crossing) if 0 <= at < len(possible)), key=partial(lack, needs)
    )
    if not pool.use_all:
        counts = (max(min(counts[0], needs[0]), for_encoders.least), max(min(counts[1], needs[1]), for_llms.least))
    return counts


def _whole(replicas: float) -> int:
    """As many as fit, where tenths of a GPU add up to a little less than one."""
    return math.floor(replicas + 1e-9)
