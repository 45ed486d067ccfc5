"""Options and results of all transfer paths."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BARS_MS = {10.0: 2.0, 70.0: 6.0, 500.0: 35.0}
"""Limits on the median milliseconds, by megabytes."""


@dataclass(frozen=True)
class Options:
    megabytes: tuple[float, ...]
    """Sizes of embeddings in 10^6 bytes."""
    width: int
    rounds: int
    warm_ups: int

    def num_tokens(self, megabytes: float) -> int:
        return max(1, round(megabytes * 1e6 / (2 * self.width)))

    @property
    def most_bytes(self) -> int:
        return 2 * self.width * max(map(self.num_tokens, self.megabytes))


@dataclass(frozen=True)
class Took:
    """Result of one path at one size."""

    p50_ms: float
    p90_ms: float
    least_ms: float
    rounds: int
    gb_per_s: float

    @classmethod
    def of(cls, seconds: Sequence[float], num_bytes: int) -> Took:
        ordered = sorted(seconds)
        p50 = statistics.median(ordered)
        p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
        return cls(1e3 * p50, 1e3 * p90, 1e3 * ordered[0], len(ordered), 1e-9 * num_bytes / p50)


def bars_met(took: dict[float, Took]) -> dict[str, bool]:
    """Returns for each size with a limit whether it was met."""
    return {f"{mb:g}": took[mb].p50_ms <= most for mb, most in BARS_MS.items() if mb in took}


def device_here() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def sum_of_bits(tokens: Tensor) -> int:
    """Returns the sum of the bits of bfloat16 tokens as int16 words; waits for their device."""
    return int(tokens.view(torch.int16).sum(dtype=torch.int64))


def change(tokens: Tensor) -> None:
    """Changes the embedding in place into a different one."""
    tokens.view(torch.int16).bitwise_xor_(0x5A5B).add_(3)
