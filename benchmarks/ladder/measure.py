"""Timing on one device: contestants of this process, the peak of matrix products, and memory. Independent of towers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.ladder.gpu_clock import Nvml
from benchmarks.ladder.turns import RunFailedError, Spell, Timed, Times, run_in_turns, run_sustained

PEAK_SIDE = 8192


@dataclass
class Deadline:
    """Time limit in seconds for everything; work that would begin after it is skipped and reported."""

    seconds: float
    _began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self._began)

    @property
    def over(self) -> bool:
        return self.left <= 0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Returns milliseconds on the host's clock until the device is done, including launches, which bound eager runs."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


@dataclass(frozen=True)
class Local:
    """A contestant of this process: `function` is called with the number of the input set."""

    function: Callable[[int], object]
    device: torch.device
    nvml: Nvml | None = None

    def run(self, number: int, *, read_clock: bool) -> Timed:
        """See `turns.Contestant`."""
        ms = self._ms(number)
        reading = self.nvml.read() if self.nvml is not None and read_clock else None
        return Timed(ms) if reading is None else Timed(ms, reading.sm_mhz, reading.watts)

    def sustain(self, settle_s: float, seconds: float) -> Spell:
        """See `turns.Contestant`."""
        return run_sustained(self._ms, settle_s, seconds)

    def _ms(self, number: int) -> float:
        try:
            return timed(lambda: self.function(number), self.device)
        except Exception as error:
            raise RunFailedError(f"{type(error).__name__}: {error}"[:500]) from error


def time_interleaved(
    functions: Mapping[str, Callable[[int], object]],
    *,
    rounds: int,
    warm_ups: int,
    device: torch.device,
    deadline: Deadline,
) -> dict[str, Times]:
    """Times functions of this process in turn, in random order. Raises RunFailedError if one of them fails."""
    contestants = {name: Local(function, device) for name, function in functions.items()}
    found = run_in_turns(contestants, rounds=rounds, warm_ups=warm_ups, seed="0", enough=lambda: deadline.over)
    for name, reason in found.failed.items():
        raise RunFailedError(f"{name}: {reason}")
    return dict(found.times)


def product_tflops(device: torch.device, side: int = PEAK_SIDE) -> float:
    """Returns TFLOP/s of a square bfloat16 product by the library that torch calls."""
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    b = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ b
    return 2e-9 * side**3 / statistics.median(timed(lambda: a @ b, device) for _ in range(20))


def reserved_bytes(device: torch.device) -> int:
    """Returns torch's reserved bytes on the device after releasing its unused cache; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def held_bytes(device: torch.device) -> int:
    """Returns torch's reserved bytes including its unused cache; 0 on the CPU."""
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0
