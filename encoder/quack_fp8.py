"""Products in 8 bits by QuACK on Hopper: scales, rotary positions, GELU and residuals in their epilogues.

Between the MLP's layers no row's maximum is known before all its features are, so one factor for all rows takes their
values to 8 bits. That costs next to nothing: e4m3 is a floating format, and what is not near its smallest numbers keeps
as many bits wherever it lies. It must not know what the layers mean.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from encoder import quack_epilogues
from encoder.fp8_products import Fp8Products, scaled
from encoder.fp8_range import between_factor
from encoder.products import Affine, After, Part, Rows, ScaledRows
from encoder.quack_products import QuackProducts, Tile, best_tile, multiply, turning
from encoder.rotation import Rotation

# Medians on an H200 (benchmarks/LOG.md).
_TURNING = (Tile(128, 192), Tile(128, 128))
_GELU = Tile(128, 128)
_ADDING = (Tile(128, 192), Tile(128, 128), Tile(128, 256, pingpong=False))
_TILE_OVERHEAD = 24


class QuackFp8Products(Fp8Products):
    """`Fp8Products` beside QuACK's, and faster."""

    turns = True

    def __init__(
        self,
        wide: QuackProducts,
        *,
        largest: Sequence[float] = (),
        parts: Collection[Part] = tuple(Part),
        first_block: int = 0,
        fewest_rows: int | None = None,
    ) -> None:
        """`largest`: of each block, the largest value between the MLP's layers that was seen; without it these values
        have a scale for each row, as in `Fp8Products`."""
        super().__init__(wide, parts=parts, first_block=first_block, fewest_rows=fewest_rows)
        self._largest = largest
        self._multiprocessors = wide.multiprocessors

    def load(self, layer: Affine, part: Part, block: int) -> Affine:
        """See `TorchProducts`."""
        layer = super().load(layer, part, block)
        if layer.scaled is None or not self._largest or part not in (Part.UP, Part.DOWN):
            return layer
        factor = between_factor(self._largest[block])
        scales = layer.scaled.scales.view(-1)
        return replace(layer, between=torch.full_like(scales, factor) if part is Part.UP else scales / factor)

    def turned(self, layer: Affine, x: Rows, rotation: Rotation) -> Tensor:
        """See `TorchProducts`."""
        if isinstance(x, Tensor):
            return self._wide.turned(layer, x, rotation)
        assert layer.scaled is not None
        rows, columns = x.values.shape[0], layer.weight.shape[0]
        out = layer.weight.new_empty(rows, columns)
        tile = best_tile(_TURNING, rows, columns, self._multiprocessors, _TILE_OVERHEAD)
        values = {**turning(layer, rotation), **_scales(x, layer.scaled)}
        multiply(quack_epilogues.turn_scaled, x.values, layer.scaled.values, out, tile, values)
        return out

    def add_later(self, layer: Affine, x: Rows, residual: Tensor) -> Tensor | None:
        """See `TorchProducts`. In 8 bits it is added at once, rounded once."""
        if isinstance(x, Tensor):
            if not self.takes_scaled(layer, x.shape[0]):
                return self._wide.add_later(layer, x, residual)
            x = scaled(x)
        assert layer.scaled is not None
        self._add(quack_epilogues.add_scaled, x.values, layer.scaled, residual, _scales(x, layer.scaled))
        return None

    def add_both_later(self, first: Affine, second: Affine, x: Rows, after: After, residual: Tensor) -> Tensor | None:
        """See `TorchProducts`."""
        if isinstance(x, Tensor) or after is not After.GELU_TANH or first.between is None or second.between is None:
            return super().add_both_later(first, second, x, after, residual)
        assert first.scaled is not None
        assert second.scaled is not None
        between = x.values.new_empty(x.values.shape[0], first.weight.shape[0])
        values = {**_scales(x, first.scaled), "bias": first.bias[None], "between": first.between[None]}
        multiply(quack_epilogues.gelu_scaled, x.values, first.scaled.values, between, _GELU, values)
        weight_scale = {"weight_scale": second.between[None]}
        self._add(quack_epilogues.add_weighted, between, second.scaled, residual, weight_scale)
        return None

    def _add(
        self,
        epilogue: object,
        values: Tensor,
        weight: ScaledRows,
        residual: Tensor,
        scales: dict[str, Tensor],
    ) -> None:
        rows, columns = residual.shape
        tile = best_tile(_ADDING, rows, columns, self._multiprocessors, _TILE_OVERHEAD)
        multiply(epilogue, values, weight.values, residual, tile, scales, residual)


def _scales(x: ScaledRows, weight: ScaledRows) -> dict[str, Tensor]:
    return {"scale": x.scales.view(1, -1), "weight_scale": weight.scales.view(1, -1)}
