"""How many encoder replicas there should be, by visual work: tokens that wait, tokens that arrive, measured speed.

Pure decisions over numbers, so that the same code runs in Serve's controller and under the clock of
`benchmarks/simulate.py`. It must not know of Ray; `deployments/scaling.py` joins the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from deployments.busy_share import BusyShare, Given, GivenWork
from deployments.scaling_hold import Hold, in_range

# What each replica reports, by these names (`EncoderReplica.record_autoscaling_stats`).
BACKLOG_TOKENS = "backlog_tokens"
ARRIVING_TOKENS_PER_S = "arriving_tokens_per_s"
GIVEN_TOKENS = "given_tokens"
TOKENS_PER_S = "tokens_per_s"
TOKENS_PER_IMAGE = "tokens_per_image"
CACHE_BYTES = "cache_bytes"


@dataclass(frozen=True)
class ScalingTargets:
    """What the operator asks for. Raises ValueError for what is out of range."""

    target_encode_delay_s: float = 1.0
    """The backlog is to be cleared within this."""
    busy_share: float | None = None
    """The share of its time that a replica should be busy with what arrives; the rest is for bursts. None: learnt from
    the traffic (`busy_share.py`), and with it how long replicas are kept."""
    hold_s: float = 120.0
    """Replicas are kept for as long as they were needed at any moment of the last so many seconds. Where `busy_share`
    is learnt, from a quarter of it to five times as long for what arrives, and never longer for what waits."""
    start_s: float = 0.0
    """What a replica takes to start: where set, the backlog has so much longer, and bursts that are over by then ask
    for less."""
    growth: float = 2.0
    """At most so many times the replicas that run are asked for at once."""
    tolerance: float = 0.1
    """A smaller share of the replicas than this is not worth taking away."""

    def __post_init__(self) -> None:
        share = self.busy_share
        in_range(
            ("target_encode_delay_s", self.target_encode_delay_s, self.target_encode_delay_s > 0, "over 0"),
            *([] if share is None else [("busy_share", share, 0 < share <= 1, "over 0 and at most 1")]),
            ("hold_s", self.hold_s, self.hold_s >= 0, "at least 0"),
            ("start_s", self.start_s, self.start_s >= 0, "at least 0"),
            ("growth", self.growth, self.growth > 1, "over 1"),
            ("tolerance", self.tolerance, 0 <= self.tolerance < 1, "at least 0 and under 1"),
        )


@dataclass(frozen=True)
class VisualLoad:
    """What is known at one moment. Tokens are merged tokens, all replicas together unless said otherwise."""

    now_s: float
    running: int
    """Replicas that can encode."""
    asked_for: int
    """Replicas that were asked for last."""
    backlog_tokens: float
    """In the replicas: what they were given and have not encoded."""
    waiting_images: float
    """Not yet given to any replica."""
    arriving_tokens_per_s: float
    tokens_per_s: float | None
    """Of one replica that has enough to do; None where none has measured it yet."""
    tokens_per_image: float | None
    """None where none has been seen yet."""
    waiting_tokens: float = 0.0
    """Of requests that wait in line before any handle, because the encoders hold them up."""
    given: Given = field(default_factory=dict)
    """The tokens that each replica had been given since its start, by time."""


class VisualScaler:
    """Remembers what was needed of late, and what a replica and an image were measured to be. For one deployment."""

    def __init__(self, targets: ScalingTargets) -> None:
        self.targets = targets
        self._hold = Hold(targets.hold_s, targets.tolerance)
        self._given = GivenWork()
        self._learnt = BusyShare(targets.target_encode_delay_s, targets.hold_s, targets.start_s)
        self._tokens_per_s: float | None = None
        self._tokens_per_image: float | None = None

    def replicas(self, load: VisualLoad, *, least: int, most: int) -> int:
        """How many to ask for now, from `least` to `most`. Call it with times that do not go back."""
        need, kept, hold_s = self.needed(load, least=least, most=most), 0, self.targets.hold_s
        if self.targets.busy_share is None and self._tokens_per_s is not None:
            kept = self._in_steps(
                self._learnt.wanted_tokens_per_s, self._tokens_per_s, load.running, least=0, most=most
            )
            hold_s = min(hold_s, self._learnt.hold_s)
        settled = self._hold.settled(load.now_s, need, load.asked_for, kept=kept, hold_s=hold_s)
        return min(max(settled, least), most)

    def needed(self, load: VisualLoad, *, least: int, most: int, idle: bool = True) -> int:
        """What this moment alone asks for: to keep up with what arrives, and clear what waits within the target.

        `idle`: with what `busy_share` leaves idle.
        """
        targets = self.targets
        self._tokens_per_s = load.tokens_per_s or self._tokens_per_s
        self._tokens_per_image = load.tokens_per_image or self._tokens_per_image
        if self._tokens_per_s is None or (self._tokens_per_image is None and load.waiting_images > 0):
            busy = load.backlog_tokens > 0 or load.waiting_images > 0 or load.waiting_tokens > 0
            return min(max(load.asked_for, int(busy), least), most)  # until something has been measured
        waiting = load.backlog_tokens + load.waiting_tokens + load.waiting_images * (self._tokens_per_image or 0.0)
        clear_s = targets.start_s + targets.target_encode_delay_s
        share = self._busy_share(load, self._tokens_per_s)
        per_s = load.arriving_tokens_per_s / (share if idle else 1.0) + waiting / clear_s
        return self._in_steps(per_s, self._tokens_per_s, load.running, least=least, most=most)

    def _in_steps(self, per_s: float, tokens_per_s: float, running: int, *, least: int, most: int) -> int:
        """Replicas for so many tokens a second, no more than are asked for at once."""
        if per_s * self.targets.target_encode_delay_s < 1:  # less than one: a mean that fades never gets to nothing
            return least
        need = math.ceil(min(per_s / tokens_per_s, most))
        return min(max(need, least), most, math.ceil(self.targets.growth * max(1, running)))

    def _busy_share(self, load: VisualLoad, tokens_per_s: float) -> float:
        if self.targets.busy_share is not None:
            return self.targets.busy_share
        for tokens in self._given.seconds(load.now_s, load.given):
            self._learnt.second(tokens, tokens_per_s)
        return self._learnt.share
