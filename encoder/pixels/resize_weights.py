"""Weights of the antialiased bicubic resize in the integer arithmetic that torch uses for uint8 images on the CPU.

Each output pixel is a sum of neighbouring input pixels, `(Σ value * weight + half) >> precision`, clamped to a byte:
first along the rows, then along the columns, rounded to bytes in between. Integer sums with these weights equal the
CPU's result bit for bit on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_SHARPNESS = -0.5  # the bicubic kernel's parameter in antialiased resizes of Pillow and torch
_MAX_PRECISION = 22
_MAX_WEIGHT = 1 << 15  # weights are 16 bits wide


@dataclass(frozen=True)
class Taps:
    """Weights that resize a line from one length to another."""

    first: NDArray[np.int32]
    """`[num_out]`: index of the first input pixel of each output pixel."""
    weights: NDArray[np.int32]
    """`[num_out, taps]`: fixed-point weights of the input pixels from `first` on; 0 past the end of the line."""
    precision: int
    """Fractional bits of `weights`; at least 1."""


# Clients choose the lengths: at up to 24 bytes a pixel, the remembered weights take at most 25 MB.
_MAX_REMEMBERED, _LONGEST_REMEMBERED = 128, 8192


def taps(num_in: int, num_out: int) -> Taps:
    """Returns the weights from `num_in` to `num_out` pixels, both at least 1. Equal lengths give one copying tap."""
    compute = _taps if max(num_in, num_out) <= _LONGEST_REMEMBERED else _taps.__wrapped__
    return compute(num_in, num_out)


@lru_cache(_MAX_REMEMBERED)
def _taps(num_in: int, num_out: int) -> Taps:
    if num_in == num_out:
        precision = 14
        first = np.arange(num_in, dtype=np.int32)
        return Taps(first, np.full((num_in, 1), 1 << precision, np.int32), precision)
    scale = num_in / num_out
    stretch = max(scale, 1.0)
    reach = 2.0 * stretch
    centre = scale * (np.arange(num_out) + 0.5)
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + reach + 0.5).astype(np.int64), num_in)
    place = np.arange(int(np.ceil(reach)) * 2 + 1)
    weights = _kernel((place[None] + first[:, None] - centre[:, None] + 0.5) * (1.0 / stretch))
    weights[place[None] >= (last - first)[:, None]] = 0.0
    # Summed column by column: numpy's pairwise sum would round differently from torch.
    total = np.zeros(num_out)
    for column in weights.T:
        total += column
    weights /= total[:, None]
    largest = float(weights.max())
    precision = next(
        (bits for bits in range(_MAX_PRECISION) if int(0.5 + largest * (1 << (bits + 1))) >= _MAX_WEIGHT),
        _MAX_PRECISION,
    )
    rounded = np.trunc(weights * (1 << precision) + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    # Drop taps that no output pixel uses.
    used = int((last - first).max())
    return Taps(first.astype(np.int32), np.ascontiguousarray(rounded[:, :used]), precision)


def _kernel(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    x, a = np.abs(distance), _SHARPNESS
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
