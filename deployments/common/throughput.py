"""Arrival rate, speed and in-flight tokens of a replica, on which autoscaling is based."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ARRIVALS_OVER_S = 5.0
SPEED_OVER_S = 10.0
BEST_SPEED_OVER_S = 600.0
MIN_JOBS = 1e-100
"""Weight of all jobs below which their mean size is unknown: near the smallest float, the ratio is rounded."""


class InFlightTokens:
    """Tokens of a replica's in-flight jobs, and their arrival rate. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.tokens = self.received = 0
        """Tokens in flight, and tokens of all jobs so far."""
        self._arrived = 0.0  # tokens, with weights that decay with age
        self._jobs = 0.0
        self._at = clock()
        self._places: list[tuple[float, int]] = []

    @contextmanager
    def job(self, tokens: int, place: float = 0.0) -> Iterator[None]:
        """Counts the job as in flight until the block ends, also by an exception. `place`: in the fair queue."""
        self._age()
        self._arrived += tokens
        self._jobs += 1
        self.tokens += tokens
        self.received += tokens
        self._places.append((place, tokens))
        try:
            yield
        finally:
            self.tokens -= tokens
            self._places.remove((place, tokens))

    def tokens_before(self, place: float) -> int:
        """Tokens in flight of jobs at or before a place in the fair queue."""
        return sum(tokens for at, tokens in self._places if at <= place)

    def arriving_tokens_per_s(self) -> float:
        """Tokens per second, an exponentially weighted mean over ARRIVALS_OVER_S."""
        self._age()
        return self._arrived / ARRIVALS_OVER_S

    def tokens_per_job(self) -> float:
        """Mean tokens of recent jobs, with the same weights as `arriving_tokens_per_s`; 0 before the first job and
        after some 20 minutes without any."""
        self._age()
        return self._arrived / self._jobs if self._jobs > MIN_JOBS else 0.0

    def _age(self) -> None:
        now = self._clock()
        kept = math.exp((self._at - now) / ARRIVALS_OVER_S)
        self._arrived, self._jobs, self._at = self._arrived * kept, self._jobs * kept, now


class BusySpeed:
    """Tokens per second of busy time. Callers serialize their calls.

    A lightly loaded replica runs small batches, which are slower per token, and with more replicas they would be
    smaller still. The estimate is therefore the best speed observed, which decays slowly and in busy time only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_jobs = 0
        self._tokens = self._busy_s = 0.0
        self._since = 0.0
        self._best = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Best speed observed; 0 before the first job has finished."""
        return self._best

    @property
    def recent_tokens_per_s(self) -> float:
        """Mean over the last SPEED_OVER_S of busy time, up to now; it falls while a job runs and none finishes."""
        busy_s = self._clock() - self._since if self._num_jobs else 0.0
        kept = math.exp(max(-busy_s / SPEED_OVER_S, -500.0))  # above 0: unmeasured and zero speed stay distinct
        busy_s += self._busy_s * kept
        return self._tokens * kept / busy_s if busy_s > 0 else 0.0

    def begin(self) -> None:
        """Counts one more job in flight."""
        if not self._num_jobs:
            self._since = self._clock()
        self._num_jobs += 1

    def end(self, tokens: int) -> None:
        """Counts one job less in flight; `tokens` were processed for it, 0 if it was dropped."""
        self._num_jobs -= 1
        now = self._clock()
        busy_s, self._since = now - self._since, now
        kept = math.exp(-busy_s / SPEED_OVER_S)
        self._tokens = self._tokens * kept + tokens
        self._busy_s = self._busy_s * kept + busy_s
        speed = self._tokens / self._busy_s if self._busy_s > 0 else 0.0
        self._best = max(speed, self._best * math.exp(-busy_s / BEST_SPEED_OVER_S))
