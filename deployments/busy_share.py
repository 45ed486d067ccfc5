"""How busy replicas should be, and how long they are kept, learnt from the traffic: fleets that are only reckoned.

Beside the real fleet, one is reckoned for each share and each time to be kept that there are to choose from: it gets
what really arrives, holds as many replicas as the policy would with those two, and has them as late as they start. Of
those that would not have been late in the last OVER_S, the one that would have held the fewest replicas is to be used:
where bursts come again and again it pays to keep what they take, and where load swells to follow it. It must not know
of Ray, nor how many replicas there are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

SHARES = tuple(0.95**step for step in range(29))
"""Of the mean over ARRIVALS_OVER_S, from always busy to a quarter of the time."""
HOLDS = (0.25, 0.5, 1.0, 2.0, 5.0)
"""How long replicas are kept, in times of `hold_s`."""
FIRST_SHARE, FIRST_HOLD = 0.5, 1.0
"""Before anything has been learnt."""
OVER_S = 1200.0
"""What was late is forgotten after so many seconds in which something arrived; how many replicas were held counts less
with age, by a time constant of so much."""
LEARNING_S = 300.0
"""From the first traffic on: until then the share may fall and not rise."""
RISE = 1.2
"""A share may rise so many times a minute at most: where load begins to rise again after what that wants has been
forgotten, reckoned fleets are late before the real one follows them."""
LATE_FROM = 0.7
"""Of the target delay: the rest is for what is not reckoned, which is routing, and that work comes image by image."""
AT_WORK = 0.97
"""Of the replicas that are wanted: others have just failed, or were too few to be worth asking for."""
START_S = 30.0
"""Of a replica, where the settings do not say."""
SETTLED_S = 15.0
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
        start = max(1, round(start_s or START_S))
        self._late_from_s = LATE_FROM * target_s
        self._kept = math.exp(-1 / ARRIVALS_OVER_S)
        self._arriving = 0.0
        self._second = 0
        self._with_traffic = 0
        self._starting = start + round(SETTLED_S) + round(4 * ARRIVALS_OVER_S)
        self._held = [_HeldFleets(times * hold_s, start) for times in HOLDS]
        self._share, self._chosen = FIRST_SHARE, self._held[HOLDS.index(FIRST_HOLD)]

    def second(self, tokens: float, tokens_per_s: float) -> None:
        """One second in which `tokens` arrived at replicas of such a speed each."""
        if not self._second and not tokens:
            return  # the first traffic begins it
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
        """To be used from now on."""
        return self._share

    @property
    def hold_s(self) -> float:
        """For which replicas are to be kept from now on."""
        return self._chosen.hold_s

    @property
    def wanted_tokens_per_s(self) -> float:
        """What the replicas together should be able to encode, by all seconds that are known."""
        return self._chosen.most_tokens_per_s / self._share


class _HeldFleets:
    """Fleets that are kept equally long, one for each share."""

    def __init__(self, hold_s: float, start: int) -> None:
        self.hold_s = hold_s
        self.share = math.inf
        """To be used with this hold."""
        self.most_tokens_per_s = 0.0
        """That arrived at any moment of the last `hold_s`, which times 1 / share are to be encoded."""
        self.tokens_per_s = 0.0
        """The same, a mean over OVER_S (but for a factor that all have), as it was known."""
        self._most = _Extreme(max(1, round(hold_s)), most=True)
        self._known: deque[float] = deque([0.0] * round(SETTLED_S))
        self._ready = _Extreme(start, most=False)
        self._aged = math.exp(-1 / OVER_S)
        self._backlogs = [0.0] * len(SHARES)
        self._late_at = [-math.inf] * len(SHARES)

    def running(self, arriving: float) -> float:
        """What replicas that have started by now were asked for to do, tokens a second; `arriving` is not known yet."""
        asked_for = self._known.popleft()
        self.most_tokens_per_s = self._most.of(arriving)
        self._known.append(self.most_tokens_per_s)
        self.tokens_per_s = self.tokens_per_s * self._aged + asked_for
        return self._ready.of(asked_for)

    def work(self, tokens: float, tokens_per_s: float, running: float, late_from_s: float, now: int) -> None:
        """One second, `now`, of each fleet."""
        backlogs = self._backlogs
        for number, share in enumerate(SHARES):
            capacity = max(AT_WORK * running / share, tokens_per_s)
            backlogs[number] = backlog = max(0.0, backlogs[number] + tokens - capacity)
            if backlog > late_from_s * capacity:
                self._late_at[number] = now

    def not_late(self, since: float) -> float:
        """The largest share whose fleet has not been late since then."""
        return next((share for share, at in zip(SHARES, self._late_at, strict=True) if at <= since), SHARES[-1])


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
