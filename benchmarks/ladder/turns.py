"""Contestants of several processes take turns on one GPU in random order; then each runs alone.

`in_turn` runs every contestant once per round, in a new order each round. `Spell` is a sustained run of one contestant
with nothing else on the GPU.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

FEWEST_ROUNDS = 5
CLOCK_EVERY = 4
"""Rounds between readings of clock and power: each reading is a pause in which a busy GPU cools."""


class RunFailedError(RuntimeError):
    """A contestant failed; the message gives the reason. Others may continue."""


@dataclass(frozen=True)
class Timed:
    """One run: milliseconds on the host's clock until the GPU is done; on request, clock and power right after it."""

    ms: float
    sm_mhz: float | None = None
    watts: float | None = None


@dataclass(frozen=True)
class Spell:
    """A sustained run: the times of all its runs, and its start and end by `time.monotonic`."""

    samples_ms: tuple[float, ...]
    began_s: float
    ended_s: float


class Contestant(Protocol):
    """A configuration that encodes the current batch, in this process or another."""

    def run(self, number: int, *, read_clock: bool) -> Timed:
        """Runs once, on input set `number`. Raises RunFailedError."""

    def sustain(self, settle_s: float, seconds: float) -> Spell:
        """Runs back to back, `settle_s` uncounted and then at least `seconds`. Raises RunFailedError."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of one contestant on one batch: median, first and third quartile."""

    ms: float
    low_ms: float
    high_ms: float
    rounds: int
    sm_mhz: float | None = None
    """Median SM clock right after a run; it falls on a GPU that is busy for long."""
    watts: float | None = None

    @classmethod
    def of(cls, samples: Sequence[float], clocks: Sequence[float] = (), watts: Sequence[float] = ()) -> Times:
        """Summarizes at least one sample."""
        ordered = sorted(samples)
        low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
        return cls(statistics.median(ordered), low, high, len(ordered), _median(clocks), _median(watts))


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


@dataclass(frozen=True)
class Result:
    """Times by contestant, and the reason for each that failed; no contestant is in both."""

    times: Mapping[str, Times]
    failed: Mapping[str, str]


def order(names: Sequence[str], seed: str, number: int) -> list[str]:
    """Returns the order of round `number`: a shuffle determined by the arguments."""
    shuffled = sorted(names)
    random.Random(f"{seed}/{number}").shuffle(shuffled)
    return shuffled


def run_in_turns(
    contestants: Mapping[str, Contestant],
    *,
    rounds: int,
    warm_ups: int,
    seed: str,
    enough: Callable[[], bool] = lambda: False,
) -> Result:
    """Runs every contestant once per round. Ends after `rounds`, or after `FEWEST_ROUNDS` once `enough()` is true."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    clocks: dict[str, list[float]] = {name: [] for name in contestants}
    watts: dict[str, list[float]] = {name: [] for name in contestants}
    failed: dict[str, str] = {}
    for number in range(-warm_ups, rounds):
        if number >= FEWEST_ROUNDS and enough():
            break
        read_clock = number >= 0 and number % CLOCK_EVERY == CLOCK_EVERY - 1
        for name in order(list(samples), seed, number):
            try:
                timed = contestants[name].run(number, read_clock=read_clock)
            except RunFailedError as error:
                failed[name] = str(error)
                del samples[name]
                continue
            if number < 0:
                continue
            samples[name].append(timed.ms)
            if timed.sm_mhz is not None:
                clocks[name].append(timed.sm_mhz)
            if timed.watts is not None:
                watts[name].append(timed.watts)
    times = {name: Times.of(found, clocks[name], watts[name]) for name, found in samples.items() if found}
    return Result(times, failed)


def run_sustained(run: Callable[[int], float], settle_s: float, seconds: float) -> Spell:
    """Runs `run(number)`, which returns milliseconds, back to back; at least one run counts."""
    number = 0
    until = time.monotonic() + settle_s
    while time.monotonic() < until:
        run(number)
        number += 1
    samples: list[float] = []
    began = time.monotonic()
    while not samples or time.monotonic() - began < seconds:
        samples.append(run(number))
        number += 1
    return Spell(tuple(samples), began, time.monotonic())
