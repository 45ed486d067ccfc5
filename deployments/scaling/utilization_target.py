"""Target utilization and stabilization window of replicas, learned from the traffic with simulated shadow fleets.

One shadow fleet is simulated for each candidate pair of utilization (share) and window: it gets the real arrivals,
requests as many replicas as the policy would with that pair, and gets them after their start-up time. Of the fleets
that were not late in the last OVER_S, the pair with the fewest replicas is used: it keeps replicas for bursts that
recur, and follows a load that swells.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

SHARES = tuple(0.95**step for step in range(29))
"""Candidate utilizations for the mean arrival rate over ARRIVALS_OVER_S, from 1 to about a quarter."""
HOLDS = (0.25, 0.5, 1.0, 2.0, 5.0)
"""Candidate windows, as multiples of `hold_s`."""
FIRST_SHARE, FIRST_HOLD = 0.5, 1.0
"""Share and hold before any traffic."""
OVER_S = 1200.0
"""Seconds with arrivals after which lateness is forgotten, and time constant of the mean number of replicas."""
LEARNING_S = 300.0
"""Time from the first arrival during which the share may fall but not rise."""
RISE = 1.2
"""Most factor by which a share may rise per minute: if load rises again after its headroom was forgotten, the shadow
fleets are late before the real one has reached their share."""
LATE_FROM = 0.7
"""Share of the target delay from which a fleet is late. The rest covers routing and the arrival of work image by image,
which are not simulated."""
AT_WORK = 0.97
"""Share of the wanted replicas that work: others have just failed, or the tolerance skipped their request."""
START_S = 30.0
"""Start-up time of a replica if the settings have none."""
SETTLED_S = 15.0
"""Time after which a second's arrivals are final, because all replicas have reported them."""
ARRIVALS_OVER_S = 5.0
"""Time constant of the mean that replicas report (`deployments.common.throughput.ARRIVALS_OVER_S`)."""
MOST_SECONDS = 3600
"""Most seconds simulated after a pause; earlier ones are dropped."""


class Sample(Protocol):
    """Tokens that a replica had received at a time; Serve's TimeStampedValue is one."""

    @property
    def timestamp(self) -> float: ...

    @property
    def value(self) -> float: ...


Given = Mapping[Any, Sequence[Sample]]
"""Samples by replica, in order of time."""


class ArrivalSeries:
    """Converts the replicas' cumulative token counts to tokens that arrived in each second. For one deployment."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, float]] = {}
        self._seconds: dict[int, float] = {}
        self._next: int | None = None

    def seconds(self, now_s: float, reports: Given) -> list[float]:
        """Returns the tokens of each second that is final by now and was not returned before.

        Args:
            reports: may repeat earlier samples. A replica's first sample is its baseline.
        """
        for replica, samples in reports.items():
            before = self._last.get(replica)
            if not samples or (before is not None and samples[-1].timestamp <= before[0]):
                continue
            for sample in samples:
                if before is not None and sample.timestamp <= before[0]:
                    continue
                if before is not None:
                    self._spread(*before, sample.timestamp, sample.value)
                before = sample.timestamp, sample.value
            if before is not None:
                self._last[replica] = before
        for gone in self._last.keys() - reports.keys():
            del self._last[gone]
        settled = math.floor(now_s - SETTLED_S)
        first = settled if self._next is None else max(self._next, settled - MOST_SECONDS)
        self._next = max(first, settled)
        told = [self._seconds.pop(second, 0.0) for second in range(first, settled)]
        if told:
            self._seconds = {second: tokens for second, tokens in self._seconds.items() if second >= settled}
        return told

    def _spread(self, from_s: float, before: float, to_s: float, count: float) -> None:
        """Spreads the tokens between two samples evenly over the seconds between them."""
        per_s = max(0.0, count - before) / (to_s - from_s)
        for second in range(max(math.floor(from_s), math.floor(to_s) - MOST_SECONDS), math.floor(to_s) + 1):
            overlap = min(to_s, second + 1) - max(from_s, second)
            if overlap > 0:
                self._seconds[second] = self._seconds.get(second, 0.0) + per_s * overlap


class LearnedUtilization:
    """Shadow fleets of one deployment, and the share and hold that they favour."""

    def __init__(self, target_s: float, hold_s: float, start_s: float = 0.0) -> None:
        """`start_s`: start-up time of a replica; 0 takes START_S."""
        start = max(1, round(start_s or START_S))
        self._late_from_s = LATE_FROM * target_s
        self._kept = math.exp(-1 / ARRIVALS_OVER_S)
        self._arriving = 0.0
        self._second = 0
        self._with_traffic = 0
        self._starting = start + round(SETTLED_S) + round(4 * ARRIVALS_OVER_S)
        self._held = [_ShadowFleets(times * hold_s, start) for times in HOLDS]
        self._share, self._chosen = FIRST_SHARE, self._held[HOLDS.index(FIRST_HOLD)]

    def second(self, tokens: float, tokens_per_s: float) -> None:
        """Simulates one second in which `tokens` arrived. `tokens_per_s`: speed of one replica."""
        if not self._second and not tokens:
            return  # the simulation starts with the first arrival
        self._second += 1
        self._with_traffic += tokens > 0
        self._arriving = self._arriving * self._kept + tokens
        for held in self._held:
            running = held.running(self._arriving * (1 - self._kept))
            if self._second > self._starting:
                held.work(tokens, tokens_per_s, running, self._late_from_s, self._with_traffic)
        self._choose()

    def _choose(self) -> None:
        since = self._with_traffic - OVER_S
        if self._second < LEARNING_S:
            self._share = min(FIRST_SHARE, self._chosen.not_late(since))
            return
        for held in self._held:
            held.share = min(held.not_late(since), held.share * RISE ** (1 / 60))
        self._chosen = min(self._held, key=lambda held: held.tokens_per_s / held.share)
        self._share = self._chosen.share

    @property
    def share(self) -> float:
        """Target utilization to use from now on."""
        return self._share

    @property
    def hold_s(self) -> float:
        """Stabilization window to use from now on, in seconds."""
        return self._chosen.hold_s

    @property
    def wanted_tokens_per_s(self) -> float:
        """Total speed that the replicas should have, by the arrivals of all final seconds."""
        return self._chosen.most_tokens_per_s / self._share


class _ShadowFleets:
    """Shadow fleets with one hold, one for each share."""

    def __init__(self, hold_s: float, start: int) -> None:
        self.hold_s = hold_s
        self.share = math.inf
        """Share to use with this hold."""
        self.most_tokens_per_s = 0.0
        """Highest arrival rate of the last `hold_s`; a fleet is sized for 1 / share times as much."""
        self.tokens_per_s = 0.0
        """Mean of `most_tokens_per_s`, delayed by SETTLED_S, over OVER_S, up to a factor common to all holds."""
        self._most = _SlidingExtreme(max(1, round(hold_s)), most=True)
        self._known: deque[float] = deque([0.0] * round(SETTLED_S))
        self._ready = _SlidingExtreme(start, most=False)
        self._aged = math.exp(-1 / OVER_S)
        self._backlogs = [0.0] * len(SHARES)
        self._late_at = [-math.inf] * len(SHARES)

    def running(self, arriving: float) -> float:
        """Returns the arrival rate, in tokens per second, for which the replicas started by now were requested.

        `arriving`: present rate, which the fleets know after SETTLED_S.
        """
        asked_for = self._known.popleft()
        self.most_tokens_per_s = self._most.of(arriving)
        self._known.append(self.most_tokens_per_s)
        self.tokens_per_s = self.tokens_per_s * self._aged + asked_for
        return self._ready.of(asked_for)

    def work(self, tokens: float, tokens_per_s: float, running: float, late_from_s: float, now: int) -> None:
        """Simulates one second, `now`, of each fleet."""
        backlogs = self._backlogs
        for number, share in enumerate(SHARES):
            capacity = max(AT_WORK * running / share, tokens_per_s)
            backlogs[number] = backlog = max(0.0, backlogs[number] + tokens - capacity)
            if backlog > late_from_s * capacity:
                self._late_at[number] = now

    def not_late(self, since: float) -> float:
        """Returns the largest share whose fleet has not been late after `since`."""
        return next((share for share, at in zip(SHARES, self._late_at, strict=True) if at <= since), SHARES[-1])


class _SlidingExtreme:
    """Maximum or minimum of the last `over` values."""

    def __init__(self, over: int, *, most: bool) -> None:
        self._over, self._sign = over, 1.0 if most else -1.0
        self._number = 0
        self._left: deque[tuple[int, float]] = deque()

    def of(self, value: float) -> float:
        """Adds a value and returns the extreme."""
        self._number += 1
        while self._left and self._sign * self._left[-1][1] <= self._sign * value:
            self._left.pop()
        self._left.append((self._number, value))
        if self._left[0][0] <= self._number - self._over:
            self._left.popleft()
        return self._left[0][1]
