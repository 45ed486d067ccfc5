"""8-bit GEMMs by QuACK on Hopper, with scales, rotary positions, GELU and residuals in their epilogues.

Between the MLP's layers, a row's maximum is unknown until all its features are computed. Each feature therefore has one
factor for all rows, from a bound that holds for every image: nothing is clipped. That costs almost no precision: e4m3
is a floating-point format, and numbers far above its smallest ones keep as many bits at any scale.
"""

from __future__ import annotations

from torch import Tensor

from encoder.fused import quack_epilogues
from encoder.fused.affine import Affine, ScaledRows
from encoder.fused.gemm_tiles import Tile, best_tile
from encoder.fused.quack_gemm import multiply, rotation_arguments
from encoder.fused.rope_in_gemm import Rotation

# Medians on an H200 (benchmarks/log/2026-11-21-fp8-epilogues.md).
_ROTATED = (Tile(128, 192), Tile(128, 128))
_GELU = Tile(128, 128)
_ADDING = (Tile(128, 192), Tile(128, 128), Tile(128, 256, pingpong=False))
_TILE_OVERHEAD = 24


class QuackFp8Kernels:
    """Kernels of `Fp8Gemm` if QuACK is installed."""

    def __init__(self, multiprocessors: int) -> None:
        self._multiprocessors = multiprocessors

    def rotated(self, layer: Affine, x: ScaledRows, rotation: Rotation) -> Tensor:
        """See `Gemm.rotated`."""
        assert layer.scaled is not None
        rows, columns = x.values.shape[0], layer.weight.shape[0]
        out = layer.weight.new_empty(rows, columns)
        tile = best_tile(_ROTATED, rows, columns, self._multiprocessors, _TILE_OVERHEAD)
        values = {**rotation_arguments(layer, rotation), **_scales(x, layer.scaled)}
        multiply(quack_epilogues.rotate_scaled, x.values, layer.scaled.values, out, tile, values)
        return out

    def accumulate(self, layer: Affine, x: ScaledRows, residual: Tensor) -> None:
        """See `Gemm.accumulate`; adds to `residual`, without partial sums."""
        assert layer.scaled is not None
        self._add(quack_epilogues.add_scaled, x.values, layer.scaled, residual, _scales(x, layer.scaled))

    def gelu_mlp(self, up: Affine, down: Affine, x: ScaledRows, residual: Tensor) -> None:
        """See `Gemm.mlp`; `up` must have `hidden_scale`."""
        assert up.scaled is not None
        assert up.hidden_scale is not None
        assert down.scaled is not None
        hidden = x.values.new_empty(x.values.shape[0], up.weight.shape[0])
        values = {**_scales(x, up.scaled), "bias": up.bias[None], "hidden_scale": up.hidden_scale[None]}
        multiply(quack_epilogues.gelu_scaled, x.values, up.scaled.values, hidden, _GELU, values)
        weight_scale = {"weight_scale": down.scaled.scales.view(1, -1)}
        self._add(quack_epilogues.add_weighted, hidden, down.scaled, residual, weight_scale)

    def _add(
        self, epilogue: object, values: Tensor, weight: ScaledRows, residual: Tensor, scales: dict[str, Tensor]
    ) -> None:
        rows, columns = residual.shape
        tile = best_tile(_ADDING, rows, columns, self._multiprocessors, _TILE_OVERHEAD)
        multiply(epilogue, values, weight.values, residual, tile, scales, residual)


def _scales(x: ScaledRows, weight: ScaledRows) -> dict[str, Tensor]:
    return {"scale": x.scales.view(1, -1), "weight_scale": weight.scales.view(1, -1)}
