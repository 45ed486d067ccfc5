"""Timing: interleaved rounds on random inputs, the device's product ceiling, and memory. It must not know towers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

PEAK_SIDE = 8192
FEWEST_ROUNDS = 3
CLOCK_EVERY = 4
"""Rounds from one reading of the clock to the next: each is a pause, in which a busy device cools."""


@dataclass
class Deadline:
    """Seconds for everything; what would begin after them is left out, and said to be."""

    seconds: float
    _began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self._began)

    @property
    def over(self) -> bool:
        return self.left <= 0


@dataclass(frozen=True)
class Times:
    """Milliseconds of one way on one batch: the median, and between which a quarter and three quarters lie."""

    ms: float
    low_ms: float
    high_ms: float
    rounds: int
    sm_mhz: float | None = None
    """The multiprocessors' clock right after a run, the median; a device that is busy for long slows down."""

    @classmethod
    def of(cls, samples: Sequence[float], clocks: Sequence[float] = ()) -> Times:
        ordered = sorted(samples)
        low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
        clock = statistics.median(clocks) if clocks else None
        return cls(statistics.median(ordered), low, high, len(ordered), clock)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sm_mhz(device: torch.device) -> float | None:
    """The multiprocessors' clock now; None where there is none, or nvidia-ml-py is not installed."""
    if device.type != "cuda":
        return None
    try:
        return float(torch.cuda.clock_rate(device))
    except (ImportError, RuntimeError):
        return None


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds on the host's clock until the device is done: launches count, for they are what eager waits for."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def interleaved(
    ways: Mapping[str, Callable[[int], object]],
    *,
    rounds: int,
    warm_ups: int,
    device: torch.device,
    deadline: Deadline,
) -> dict[str, Times]:
    """Each way once a round, in another order each time, so that a drift of the clock meets all alike.

    A way is called with the round's number, by which it takes its input.
    """
    names = list(ways)
    for name in names:
        for number in range(warm_ups):
            ways[name](number)
    samples: dict[str, list[float]] = {name: [] for name in names}
    clocks: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        if deadline.over and number >= FEWEST_ROUNDS:
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            run = ways[name]
            samples[name].append(timed(lambda run=run, number=number: run(number), device))  # type: ignore[misc]
            if number % CLOCK_EVERY == CLOCK_EVERY - 1 and (clock := sm_mhz(device)) is not None:
                clocks[name].append(clock)
    return {name: Times.of(found, clocks[name]) for name, found in samples.items()}


def product_tflops(device: torch.device, side: int = PEAK_SIDE) -> float:
    """TFLOP/s of a square bfloat16 product by the library that torch calls."""
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    b = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ b
    return 2e-9 * side**3 / statistics.median(timed(lambda: a @ b, device) for _ in range(20))


def reserved_bytes(device: torch.device) -> int:
    """What torch holds of the device's memory, after giving back what nobody uses; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def held_bytes(device: torch.device) -> int:
    """As `reserved_bytes`, with what the last runs left to be used again."""
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0
