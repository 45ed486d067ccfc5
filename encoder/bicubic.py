"""The weights of a bicubic resize with antialiasing, in the integer arithmetic by which torch resizes bytes on the CPU.

Each output pixel is a sum of neighbouring input pixels, `(Σ value * weight + half) >> precision`, clamped to a byte:
first along the rows, then along the columns, rounded to bytes in between. So whoever sums with these weights in
integers gets what the CPU gets, bit for bit. It must not know of tensors or devices.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_SHARPNESS = -0.5  # the kernel's parameter, where Pillow and torch antialias
_MAX_PRECISION = 22
_MAX_WEIGHT = 1 << 15  # weights are 16 bits wide


@dataclass(frozen=True)
class Taps:
    """What resizes a line of one length to another."""

    first: NDArray[np.int32]
    """`[num_out]`: the first input pixel of each output pixel."""
    weights: NDArray[np.int32]
    """`[num_out, taps]`: of the input pixels from `first` on; 0 past the line's end."""
    precision: int
    """Bits after the point of `weights`; at least 1."""

    @property
    def num_bytes(self) -> int:
        return self.first.nbytes + self.weights.nbytes


def taps(num_in: int, num_out: int) -> Taps:
    """The weights from `num_in` to `num_out` pixels, both at least 1. Equal lengths give one tap that copies."""
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
    # Summed one by one: pairs would round the sum otherwise than torch does.
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
    # Columns that no output pixel uses would be work for nothing.
    used = int((last - first).max())
    return Taps(first.astype(np.int32), np.ascontiguousarray(rounded[:, :used]), precision)


def _kernel(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    x, a = np.abs(distance), _SHARPNESS
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


class TapCache:
    """Remembers the weights of lengths that came by, up to a bound in bytes; the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._taps: OrderedDict[tuple[int, int], Taps] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.hits = self.misses = 0

    def get(self, num_in: int, num_out: int) -> Taps:
        """As `taps`."""
        key = (num_in, num_out)
        with self._lock:
            found = self._taps.get(key)
            if found is not None:
                self._taps.move_to_end(key)
                self.hits += 1
                return found
            self.misses += 1
        made = taps(num_in, num_out)
        with self._lock:
            if key not in self._taps:
                self._taps[key] = made
                self.num_bytes += made.num_bytes
            while self.num_bytes > self._max_bytes:
                _, gone = self._taps.popitem(last=False)
                self.num_bytes -= gone.num_bytes
        return made
