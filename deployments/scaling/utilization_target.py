"""Target utilization and stabilization window of replicas, learned from the traffic with simulated shadow fleets.

One shadow fleet is simulated for each candidate pair of utilization and window: it gets the real arrivals,
requests as many replicas as the policy would with that pair, and gets them after their start-up time. Of the fleets
that were not late in the last MEMORY_S, the pair with the fewest replicas is used: it keeps replicas for bursts that
recur, and follows a load that swells.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

UTILIZATIONS = tuple(0.95**step for step in range(29))
"""Candidate utilizations for the mean arrival rate over ARRIVALS_OVER_S, from 1 to about a quarter."""
WINDOW_FACTORS = (0.25, 0.5, 1.0, 2.0, 5.0)
"""Candidate windows, as multiples of the configured one."""
FIRST_UTILIZATION, FIRST_WINDOW_FACTOR = 0.5, 1.0
"""Utilization and window before any traffic."""
MEMORY_S = 1200.0
"""Seconds with arrivals after which lateness is forgotten, and time constant of the mean number of replicas."""
LEARNING_S = 300.0
"""Time from the first arrival during which the utilization may fall but not rise."""
MAX_RISE_PER_MINUTE = 1.2
"""Most factor by which a utilization may rise per minute: if load rises again after its headroom was forgotten, the
shadow fleets are late before the real one has reached their utilization."""
LATE_FRACTION = 0.7
"""Share of the target delay from which a fleet is late. The rest covers routing and the arrival of work image by image,
which are not simulated."""
WORKING_FRACTION = 0.97
"""Share of the wanted replicas that work: others have just failed, or the tolerance skipped their request."""
DEFAULT_STARTUP_S = 30.0
"""Start-up time of a replica if the settings have none."""
FINAL_AFTER_S = 15.0
"""Time after which a second's arrivals are final, because all replicas have reported them."""
ARRIVALS_OVER_S = 5.0
"""Time constant of the mean that replicas report (`deployments.common.throughput.ARRIVALS_OVER_S`)."""
MAX_SECONDS = 3600
"""Most seconds simulated after a pause; earlier ones are dropped."""


class Sample(Protocol):
    """Tokens that a replica had received at a time; Serve's TimeStampedValue is one."""

    @property
    def timestamp(self) -> float: ...

    @property
    def value(self) -> float: ...


TokenSamples = Mapping[Any, Sequence[Sample]]
"""Samples by replica, in order of time."""


class ArrivalSeries:
    """Converts the replicas' cumulative token counts to tokens that arrived in each second. For one deployment."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, float]] = {}
        self._seconds: dict[int, float] = {}
        self._next: int | None = None

    def final_seconds(self, now_s: float, reports: TokenSamples) -> list[float]:
        """Returns the tokens of each second that is final by now and was not returned before.

        Args:
            reports: may repeat earlier samples. A replica's first sample is its baseline.
        """
        settled = math.floor(now_s - FINAL_AFTER_S)
        if self._next is not None and settled < self._next - 1:  # the clock was set back
            self._last, self._seconds, self._next = {}, {}, None
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
        first = settled if self._next is None else max(self._next, settled - MAX_SECONDS)
        self._next = max(first, settled)
        tokens = [self._seconds.pop(second, 0.0) for second in range(first, settled)]
        if tokens:
            self._seconds = {second: count for second, count in self._seconds.items() if second >= settled}
        return tokens

    def _spread(self, from_s: float, before: float, to_s: float, count: float) -> None:
        """Spreads the tokens between two samples evenly over the seconds between them."""
        per_s = max(0.0, count - before) / (to_s - from_s)
        for second in range(max(math.floor(from_s), math.floor(to_s) - MAX_SECONDS), math.floor(to_s) + 1):
            overlap = min(to_s, second + 1) - max(from_s, second)
            if overlap > 0:
                self._seconds[second] = self._seconds.get(second, 0.0) + per_s * overlap


class LearnedUtilization:
    """Shadow fleets of one deployment, and the utilization and window that they favour."""

    def __init__(self, target_s: float, window_s: float, startup_s: float = 0.0) -> None:
        """`startup_s`: start-up time of a replica; 0 takes DEFAULT_STARTUP_S."""
        start = max(1, round(startup_s or DEFAULT_STARTUP_S))
        self._late_from_s = LATE_FRACTION * target_s
        self._decay = math.exp(-1 / ARRIVALS_OVER_S)
        self._arriving = 0.0
        self._second = 0
        self._with_traffic = 0
        self._starting = start + round(FINAL_AFTER_S) + round(4 * ARRIVALS_OVER_S)
        self._fleets = [_ShadowFleets(times * window_s, start) for times in WINDOW_FACTORS]
        self.utilization = FIRST_UTILIZATION
        """Target utilization to use from now on."""
        self._chosen = self._fleets[WINDOW_FACTORS.index(FIRST_WINDOW_FACTOR)]

    def step(self, tokens: float, tokens_per_s: float) -> None:
        """Simulates one second in which `tokens` arrived. `tokens_per_s`: speed of one replica."""
        if not self._second and not tokens:
            return  # the simulation starts with the first arrival
        self._second += 1
        self._with_traffic += tokens > 0
        self._arriving = self._arriving * self._decay + tokens
        for fleets in self._fleets:
            running = fleets.running(self._arriving * (1 - self._decay))
            if self._second > self._starting:
                fleets.step(tokens, tokens_per_s, running, self._late_from_s, self._with_traffic)
        self._choose()

    def _choose(self) -> None:
        since = self._with_traffic - MEMORY_S
        if self._second < LEARNING_S:
            self.utilization = min(FIRST_UTILIZATION, self._chosen.highest_on_time(since))
            return
        for fleets in self._fleets:
            fleets.utilization = min(
                fleets.highest_on_time(since), fleets.utilization * MAX_RISE_PER_MINUTE ** (1 / 60)
            )
        self._chosen = min(self._fleets, key=lambda fleets: fleets.tokens_per_s / fleets.utilization)
        self.utilization = self._chosen.utilization

    @property
    def window_s(self) -> float:
        """Stabilization window to use from now on, in seconds."""
        return self._chosen.window_s

    @property
    def target_tokens_per_s(self) -> float:
        """Total speed that the replicas should have, by the arrivals of all final seconds."""
        return self._chosen.max_tokens_per_s / self.utilization


class _ShadowFleets:
    """Shadow fleets with one window, one for each utilization."""

    def __init__(self, window_s: float, start: int) -> None:
        self.window_s = window_s
        self.utilization = math.inf
        """Utilization to use with this window."""
        self.max_tokens_per_s = 0.0
        """Highest arrival rate of the last `window_s`; a fleet is sized for 1 / utilization times as much."""
        self.tokens_per_s = 0.0
        """Mean of `max_tokens_per_s`, delayed by FINAL_AFTER_S, over MEMORY_S, up to a factor common to all windows."""
        self._arriving: deque[float] = deque(maxlen=max(1, round(window_s)))
        self._delayed: deque[float] = deque([0.0] * round(FINAL_AFTER_S))
        self._requested: deque[float] = deque(maxlen=start)
        self._decay = math.exp(-1 / MEMORY_S)
        self._backlogs = [0.0] * len(UTILIZATIONS)
        self._late_at = [-math.inf] * len(UTILIZATIONS)

    def running(self, arriving: float) -> float:
        """Returns the arrival rate, in tokens per second, for which the replicas started by now were requested.

        `arriving`: present rate, which the fleets know after FINAL_AFTER_S.
        """
        requested = self._delayed.popleft()
        self._arriving.append(arriving)
        self.max_tokens_per_s = max(self._arriving)
        self._delayed.append(self.max_tokens_per_s)
        self.tokens_per_s = self.tokens_per_s * self._decay + requested
        self._requested.append(requested)
        return min(self._requested)

    def step(self, tokens: float, tokens_per_s: float, running: float, late_from_s: float, now: int) -> None:
        """Simulates one second, `now`, of each fleet."""
        backlogs = self._backlogs
        for number, utilization in enumerate(UTILIZATIONS):
            capacity = max(WORKING_FRACTION * running / utilization, tokens_per_s)
            backlogs[number] = backlog = max(0.0, backlogs[number] + tokens - capacity)
            if backlog > late_from_s * capacity:
                self._late_at[number] = now

    def highest_on_time(self, since: float) -> float:
        """Returns the largest utilization whose fleet has not been late after `since`."""
        return next(
            (utilization for utilization, at in zip(UTILIZATIONS, self._late_at, strict=True) if at <= since),
            UTILIZATIONS[-1],
        )
