"""Matrix products in 8 bits on Hopper and newer: e4m3 rows times e4m3 weights, a scale for each row of either.

Rows are scaled by whatever writes them: the norm before a product, the pass of the activation between two; what comes
from attention gets a pass of its own. It must not know what the layers mean.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from encoder.kernels.scaled import scaled_rows
from encoder.products import Affine, After, Part, Rows, ScaledRows, TorchProducts

# From so many rows on 8 bits were faster on an H200 (benchmarks/LOG.md): by 5 to 35 %, and slower below. Rows from
# attention pay for a pass that reads and writes them.
FEWEST_ROWS, FEWEST_ROWS_OF_ATTENTION = 1024, 8192
# Fast accumulation keeps fewer bits of a sum than float32 has, but many more than the factors' 4, whose rounding is
# what limits the product; exact sums would move every partial sum out of the tensor cores.
_FAST_ACCUMULATION = True
# What cuBLAS asks of both sides of an 8-bit weight.
_MULTIPLE = 16


def scaled(x: Tensor, after: After = After.NOTHING) -> ScaledRows:
    """`after` of `[rows, width]`, in 8 bits."""
    return ScaledRows(*scaled_rows(x, after.value))


class Fp8Products(TorchProducts):
    """8 bits for batches of many rows through a block's layers; all else as `wide`, whose weights are kept too."""

    def __init__(
        self,
        wide: TorchProducts,
        *,
        parts: Collection[Part] = tuple(Part),
        first_block: int = 0,
        fewest_rows: int | None = None,
    ) -> None:
        """`parts`: of the blocks from `first_block` on, those in 8 bits. `fewest_rows`: from which on 8 bits are used;
        None takes what pays."""
        self._wide = wide
        self._parts, self._first_block = parts, first_block
        self._fewest_rows = fewest_rows

    def inner_width(self, width: int, dtype: torch.dtype) -> int:
        """See `TorchProducts`."""
        width = self._wide.inner_width(width, dtype)
        while width % _MULTIPLE:
            width = self._wide.inner_width(width + 1, dtype)
        return width

    def load(self, layer: Affine, part: Part, block: int) -> Affine:
        """See `TorchProducts`. A layer whose sides are no multiples of 16 stays as it is."""
        if part not in self._parts or block < self._first_block:
            return layer
        if any(side % _MULTIPLE for side in layer.weight.shape):
            return layer
        fewest = self._fewest_rows
        if fewest is None:
            fewest = FEWEST_ROWS_OF_ATTENTION if part is Part.PROJ else FEWEST_ROWS
        return replace(layer, scaled=scaled(layer.weight.contiguous()), fewest_scaled_rows=fewest)

    def takes_scaled(self, layer: Affine, rows: int) -> bool:
        """See `TorchProducts`. Decided by the rows of a batch alone, so that a graph bakes it in."""
        return layer.scaled is not None and rows >= layer.fewest_scaled_rows

    def __call__(self, layer: Affine, x: Rows, after: After = After.NOTHING, out: Tensor | None = None) -> Tensor:
        """See `TorchProducts`."""
        if isinstance(x, Tensor):
            if out is not None or after is not After.NOTHING or not self.takes_scaled(layer, x.shape[0]):
                return self._wide(layer, x, after, out)
            x = scaled(x)
        assert out is None
        assert after is After.NOTHING
        return self._multiply(layer, x, layer.bias)

    def add_(self, layer: Affine, x: Rows, residual: Tensor) -> None:
        """See `TorchProducts`. In 8 bits the product is rounded once itself."""
        sums = self.add_later(layer, x, residual)
        if sums is not None:
            residual += sums.sum(0)

    def add_later(self, layer: Affine, x: Rows, residual: Tensor) -> Tensor | None:
        """See `TorchProducts`. There is no product of 8 bits that adds to what is there."""
        if isinstance(x, Tensor):
            if not self.takes_scaled(layer, x.shape[0]):
                return self._wide.add_later(layer, x, residual)
            x = scaled(x)
        return self._multiply(layer, x, None)[None]

    def add_both_later(self, first: Affine, second: Affine, x: Rows, after: After, residual: Tensor) -> Tensor | None:
        """See `TorchProducts`. In 8 bits the activation is a pass that reads bfloat16 and writes 8 bits."""
        if isinstance(x, Tensor):
            return self.add_later(second, self._wide(first, x, after), residual)
        return self.add_later(second, scaled(self._multiply(first, x, first.bias), after), residual)

    def _multiply(self, layer: Affine, x: ScaledRows, bias: Tensor | None) -> Tensor:
        """`[rows, in]` to `[rows, out]` in the dtype of the wide weights."""
        assert layer.scaled is not None
        return torch._scaled_mm(
            x.values,
            layer.scaled.values.t(),
            scale_a=x.scales,
            scale_b=layer.scaled.scales.t(),
            bias=bias,
            out_dtype=layer.weight.dtype,
            use_fast_accum=_FAST_ACCUMULATION,
        )
