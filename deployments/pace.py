"""How fast work comes to a replica, how fast it is done, and how much of it there is: what scaling goes by.

It must not know what the work is, nor what is made of the numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ARRIVALS_OVER_S = 5.0
SPEED_OVER_S = 10.0
BEST_SPEED_OVER_S = 600.0


class WorkUnderWay:
    """The tokens of the jobs a replica has taken and not finished, and how many come. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.tokens = self.given = 0
        """Under way now, and ever."""
        self._arrived = 0.0  # tokens, each counting less with age
        self._jobs = 0.0
        self._at = clock()

    @contextmanager
    def job(self, tokens: int) -> Iterator[None]:
        """While the job is under way, however it ends."""
        self._age()
        self._arrived += tokens
        self._jobs += 1
        self.tokens += tokens
        self.given += tokens
        try:
            yield
        finally:
            self.tokens -= tokens

    def arriving_per_s(self) -> float:
        """Tokens per second, an exponentially weighted mean over ARRIVALS_OVER_S."""
        self._age()
        return self._arrived / ARRIVALS_OVER_S

    def tokens_per_job(self) -> float:
        """Of the jobs that came last; 0 before the first."""
        return self._arrived / self._jobs if self._jobs else 0.0

    def _age(self) -> None:
        now = self._clock()
        kept = math.exp((self._at - now) / ARRIVALS_OVER_S)
        self._arrived, self._jobs, self._at = self._arrived * kept, self._jobs * kept, now


class BusySpeed:
    """Tokens per second while there is something to do. The caller sees to it that one thread calls at a time.

    A replica with little to do runs small batches, which are slower a token; with more replicas they would get smaller
    still. So the best that it has been seen to reach counts, forgotten slowly, and in busy time only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way = 0
        self._tokens = self._busy_s = 0.0
        self._since = 0.0
        self._best = 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 before anything has been done."""
        return self._best

    @property
    def recent_tokens_per_s(self) -> float:
        """A mean over the last SPEED_OVER_S of busy time, until now: it falls while nothing is done."""
        busy_s = self._clock() - self._since if self._under_way else 0.0
        kept = math.exp(max(-busy_s / SPEED_OVER_S, -500.0))  # over 0: nothing measured and nothing done are told apart
        busy_s += self._busy_s * kept
        return self._tokens * kept / busy_s if busy_s > 0 else 0.0

    def begin(self) -> None:
        """One more job is there."""
        if not self._under_way:
            self._since = self._clock()
        self._under_way += 1

    def end(self, tokens: int) -> None:
        """One job less; `tokens` were done for it, 0 where it was dropped."""
        self._under_way -= 1
        now = self._clock()
        busy_s, self._since = now - self._since, now
        kept = math.exp(-busy_s / SPEED_OVER_S)
        self._tokens = self._tokens * kept + tokens
        self._busy_s = self._busy_s * kept + busy_s
        speed = self._tokens / self._busy_s if self._busy_s > 0 else 0.0
        self._best = max(speed, self._best * math.exp(-busy_s / BEST_SPEED_OVER_S))
