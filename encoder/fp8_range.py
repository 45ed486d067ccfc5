"""How large the values between the MLP's layers get, and the factor that takes them to 8 bits.

Weights and norms bound nothing there, so it is seen on images. It must not know which products run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from encoder.products import Affine, After, Rows, TorchProducts
from encoder.rotation import Rotation

_LARGEST = 448.0
_HEADROOM = 8.0
"""Over the largest value that was seen. What is larger still is cut off."""


def between_factor(largest: float) -> float:
    """A power of two that takes `_HEADROOM` times `largest` into e4m3's range; 1 where nothing was seen."""
    if not (largest > 0 and math.isfinite(largest)):
        return 1.0
    return 2.0 ** math.floor(math.log2(_LARGEST / (_HEADROOM * largest)))


class WatchedProducts(TorchProducts):
    """As `wide`, but it notes what comes to lie between the MLP's layers. For towers that run in order of blocks."""

    def __init__(self, wide: TorchProducts) -> None:
        self._wide, self.turns = wide, wide.turns
        self._seen: list[Tensor] = []

    def largest(self) -> tuple[float, ...]:
        """The largest magnitude in each block since this was made. Waits for the device."""
        return tuple(float(one) for one in self._seen)

    def inner_width(self, width: int, dtype: torch.dtype) -> int:
        """See `TorchProducts`."""
        return self._wide.inner_width(width, dtype)

    def __call__(self, layer: Affine, x: Rows, after: After = After.NOTHING, out: Tensor | None = None) -> Tensor:
        """See `TorchProducts`."""
        return self._wide(layer, x, after, out)

    def turned(self, layer: Affine, x: Rows, rotation: Rotation) -> Tensor:
        """See `TorchProducts`."""
        return self._wide.turned(layer, x, rotation)

    def add_(self, layer: Affine, x: Rows, residual: Tensor) -> None:
        """See `TorchProducts`."""
        self._wide.add_(layer, x, residual)

    def add_later(self, layer: Affine, x: Rows, residual: Tensor) -> Tensor | None:
        """See `TorchProducts`."""
        return self._wide.add_later(layer, x, residual)

    def add_both_later(self, first: Affine, second: Affine, x: Rows, after: After, residual: Tensor) -> Tensor | None:
        """See `TorchProducts`."""
        between = self(first, x, after)
        self._seen.append(between.abs().amax())
        return self.add_later(second, between, residual)
