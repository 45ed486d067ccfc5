"""Which share of their time replicas should be busy, learnt from the traffic: fleets that are only reckoned.

Beside the real fleet, one is reckoned for each share that there is to choose from: it gets what really arrives, holds
as many replicas as the policy would with that share, and has them as late as they start. The largest share whose fleet
would have been late with next to nothing over the last OVER_S is the one to use: bursts that come again and again cost
idle replicas, and traffic without bursts does not. It must not know of Ray, nor how many replicas there are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

SHARES = (0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25)
FIRST_SHARE = 0.5
"""Before anything has been learnt."""
LATE_SHARE = 0.001
"""Of the work, that a reckoned fleet may be late with."""
OVER_S = 1200.0
"""Traffic counts less with age, by a time constant of so much."""
LEARNING_S = 300.0
"""From the first traffic on: until then the share may fall and not rise."""
LATE_FROM = 0.5
"""Of the target delay: the rest is for what is not reckoned, which is routing, and that work comes image by image."""
AT_WORK = 0.9
"""Of the replicas that are wanted: others have just failed, or were too few to be worth asking for."""
KNOWN_AFTER_S = 7.0
"""From a burst until replicas are asked for: the age of reports."""
START_S = 30.0
"""Of a replica, where the settings do not say."""
SETTLED_S = 25.0
"""A second's work is taken as known so long after it: all replicas have reported by then."""
ARRIVALS_OVER_S = 5.0
"""Of the mean that replicas report (`pace.ARRIVALS_OVER_S`)."""
MOST_SECONDS = 3600
"""That are reckoned after a pause; what lies before is forgotten."""


class Sample(Protocol):
    """What a replica had been given by then; Serve's TimeStampedValue is one."""

    @property
    def timestamp(self) -> float: ...

    @property
    def value(self) -> float: ...


Given = Mapping[Any, Sequence[Sample]]
"""By whatever names a replica, in order of time."""


class GivenWork:
    """From what each replica says it was ever given to what all were given in each second. For one deployment."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, float]] = {}
        self._seconds: dict[int, float] = {}
        self._next: int | None = None

    def seconds(self, now_s: float, reports: Given) -> list[float]:
        """Tokens of each second that is settled by now and was not told before.

        Args:
            reports: what was seen before may come again. A replica's first sample only says where it begins.
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
        """Evenly over the seconds between."""
        per_s = max(0.0, count - before) / (to_s - from_s)
        for second in range(max(math.floor(from_s), math.floor(to_s) - MOST_SECONDS), math.floor(to_s) + 1):
            overlap = min(to_s, second + 1) - max(from_s, second)
            if overlap > 0:
                self._seconds[second] = self._seconds.get(second, 0.0) + per_s * overlap


class BusyShare:
    """The reckoned fleets of one deployment."""

    def __init__(self, target_s: float, hold_s: float, start_s: float = 0.0) -> None:
        """`start_s`: what a replica takes to start; 0 where it is not known."""
        self._target_s = target_s
        self._kept = math.exp(-1 / ARRIVALS_OVER_S)
        self._aged = math.exp(-1 / OVER_S)
        self._arriving = 0.0
        self._second = 0
        start = max(1, round(start_s or START_S))
        self._starting = start + round(KNOWN_AFTER_S) + round(4 * ARRIVALS_OVER_S)
        self._held = _Extreme(max(1, round(hold_s)), most=True)
        self._ready = _Extreme(start, most=False)
        self._known: deque[float] = deque([0.0] * round(KNOWN_AFTER_S), maxlen=round(KNOWN_AFTER_S))
        self._backlogs = [0.0] * len(SHARES)
        self._late = [0.0] * len(SHARES)
        self._tokens = 0.0

    def second(self, tokens: float, tokens_per_s: float) -> None:
        """One second in which `tokens` arrived at replicas of such a speed each."""
        if not self._second and not tokens:
            return  # the first traffic begins it
        self._second += 1
        self._arriving = self._arriving * self._kept + tokens
        running = self._known[0]
        self._known.append(self._ready.of(self._held.of(self._arriving * (1 - self._kept))))
        if self._second <= self._starting:
            return
        self._tokens = self._tokens * self._aged + tokens
        for number, share in enumerate(SHARES):
            capacity = max(AT_WORK * running / share, tokens_per_s)
            self._backlogs[number] = backlog = max(0.0, self._backlogs[number] + tokens - capacity)
            late = backlog > LATE_FROM * self._target_s * capacity
            self._late[number] = self._late[number] * self._aged + (tokens if late else 0.0)

    @property
    def share(self) -> float:
        """To be used from now on."""
        if not self._tokens:
            return FIRST_SHARE
        allowed = LATE_SHARE * self._tokens
        best = next((share for share, late in zip(SHARES, self._late, strict=True) if late <= allowed), SHARES[-1])
        return best if self._second >= LEARNING_S else min(best, FIRST_SHARE)


class _Extreme:
    """The most or the least of the last so many values."""

    def __init__(self, over: int, *, most: bool) -> None:
        self._over, self._sign = over, 1.0 if most else -1.0
        self._number = 0
        self._left: deque[tuple[int, float]] = deque()

    def of(self, value: float) -> float:
        """With this one."""
        self._number += 1
        while self._left and self._sign * self._left[-1][1] <= self._sign * value:
            self._left.pop()
        self._left.append((self._number, value))
        if self._left[0][0] <= self._number - self._over:
            self._left.popleft()
        return self._left[0][1]
