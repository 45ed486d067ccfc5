"""Matrix products by QuACK on Hopper: with activations that cuBLAS has no epilogue for, or only a slow one.

QuACK (`quack-kernels`) comes with FlashAttention-4. Its kernels are compiled on first use, 2 s each, and kept on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from quack.gemm_config import GemmConfig
from quack.gemm_interface import gemm_act
from torch import Tensor

from encoder import quack_epilogues
from encoder.products import Affine, After, Rows, TorchProducts
from encoder.rotation import Rotation


@dataclass(frozen=True)
class Tile:
    """How a product is cut."""

    rows: int
    columns: int
    pingpong: bool = True
    cluster: int = 2

    @property
    def config(self) -> GemmConfig:
        """The same for `gemm_act`, which remembers plans by a configuration's identity: keep it."""
        return GemmConfig(
            tile_m=self.rows,
            tile_n=self.columns,
            pingpong=self.pingpong,
            is_dynamic_persistent=False,
            cluster_m=self.cluster,
            cluster_n=1,
            device_capacity=9,
        )

    def waves(self, rows: int, columns: int, places: int) -> float:
        """How often all multiprocessors have a tile each; the last wave is seldom full."""
        return -(-rows // self.rows) * -(-columns // self.columns) / places


_LARGE = Tile(128, 192)
_CONFIG = _LARGE.config
_NAMES = {After.NOTHING: None, After.GELU_TANH: "gelu_tanh_approx", After.SILU: "silu", After.SWIGLU: "swiglu"}

# From this share of busy places on QuACK was faster than cuBLAS on an H200, where cuBLAS needs a pass more for the
# activation earlier.
_BUSY_ENOUGH = {After.NOTHING: 0.82, After.GELU_TANH: 0.8, After.SILU: 0.7, After.SWIGLU: 0.65}
_RESIDUAL, _RESIDUAL_BUSY_ENOUGH = Tile(128, 128), 0.95
# q and k are turned in every product.
_TURNING, _TILE_OVERHEAD = (Tile(128, 192), Tile(128, 160), Tile(128, 128)), 16
_FEW_TURNING_ROWS, _FEW_TURNING = 512, Tile(64, 128)
# Products of so few rows are launched while what comes before still runs, which makes QuACK's the faster ones. Sums are
# left to the norm, and deep ones in parts, each of whole 16 bytes, that fill the device.
_FEW_ROWS, _PARTS, _LEAST_DEPTH = 256, 3, 1024
_IN_PARTS, _IN_ONE = Tile(64, 128, pingpong=False), Tile(64, 96, cluster=1)
# Mergers' products are deeper than a layer's, and run beside the layers.
_MOST_FEW_DEPTH = 2048
_FEW = {
    After.NOTHING: Tile(64, 128).config,
    After.GELU_TANH: Tile(128, 96, pingpong=False).config,
    After.SWIGLU: Tile(128, 128, pingpong=False, cluster=1).config,
}


class QuackProducts(TorchProducts):
    """Products that fill the chip by QuACK; the others, and most residuals, as `TorchProducts`."""

    turns = True

    def __init__(self, device: torch.device) -> None:
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(self, layer: Affine, x: Rows, after: After = After.NOTHING, out: Tensor | None = None) -> Tensor:
        """See `TorchProducts`."""
        assert isinstance(x, Tensor)
        config = self._config(after, x.shape[0], layer)
        if config is None:
            return super().__call__(layer, x, after, out)
        _, result = gemm_act(
            x,
            layer.weight.t(),
            bias=layer.bias,
            activation=_NAMES[after],
            postact_out=out,
            store_preact=False,
            tuned=False,
            config=config,
        )
        assert isinstance(result, Tensor)
        return result

    def _config(self, after: After, rows: int, layer: Affine) -> GemmConfig | None:
        """None where cuBLAS is faster."""
        if rows <= _FEW_ROWS and layer.weight.shape[1] <= _MOST_FEW_DEPTH and after in _FEW:
            return _FEW[after]
        if after not in _NAMES or self._busy(_LARGE, rows, layer.weight.shape[0]) < _BUSY_ENOUGH[after]:
            return None
        return _CONFIG

    def turned(self, layer: Affine, x: Rows, rotation: Rotation) -> Tensor:
        """See `TorchProducts`."""
        assert isinstance(x, Tensor)
        rows, columns = x.shape[0], layer.weight.shape[0]
        out = x.new_empty(rows, columns)
        tile = _FEW_TURNING
        if rows > _FEW_TURNING_ROWS:
            tile = best_tile(_TURNING, rows, columns, self.multiprocessors, _TILE_OVERHEAD)
        multiply(quack_epilogues.turn, x, layer.weight, out, tile, turning(layer, rotation))
        return out

    def add_(self, layer: Affine, x: Rows, residual: Tensor) -> None:
        """See `TorchProducts`."""
        assert isinstance(x, Tensor)
        if self._busy(_RESIDUAL, x.shape[0], layer.weight.shape[0]) < _RESIDUAL_BUSY_ENOUGH:
            super().add_(layer, x, residual)
        else:
            multiply(quack_epilogues.add, x, layer.weight, residual, _RESIDUAL, {}, residual)

    def add_later(self, layer: Affine, x: Rows, residual: Tensor) -> Tensor | None:
        """See `TorchProducts`."""
        assert isinstance(x, Tensor)
        rows, (columns, depth) = x.shape[0], layer.weight.shape
        if rows > _FEW_ROWS:
            self.add_(layer, x, residual)
            return None
        parts = _PARTS if depth % (8 * _PARTS) == 0 and depth >= _PARTS * _LEAST_DEPTH else 1
        sums = x.new_empty(parts, rows, columns, dtype=torch.float32)
        # Each part of the depth is a product of its own in one launch.
        cut_x = x.view(rows, parts, -1).transpose(0, 1)
        cut_weight = layer.weight.view(columns, parts, -1).transpose(0, 1)
        multiply(quack_epilogues.keep, cut_x, cut_weight, sums, _IN_ONE if parts == 1 else _IN_PARTS, {})
        return sums

    def inner_width(self, width: int, dtype: torch.dtype) -> int:
        """See `TorchProducts`; parts of it begin on 16 bytes."""
        step = 8 * _PARTS
        return -(-super().inner_width(width, dtype) // step) * step

    def _busy(self, tile: Tile, rows: int, columns: int) -> float:
        """The share of places for tiles that hold one, from the first wave to the last."""
        waves = tile.waves(rows, columns, self.multiprocessors)
        return waves / -(-waves // 1)


def best_tile(tiles: Sequence[Tile], rows: int, columns: int, multiprocessors: int, overhead: int) -> Tile:
    """Which is fastest follows from the waves, and from what a tile costs beside its columns, in columns."""

    def cost(tile: Tile) -> float:
        return -(-tile.waves(rows, columns, multiprocessors) // 1) * (tile.columns + overhead)

    return min(tiles, key=cost)


def turning(layer: Affine, rotation: Rotation) -> dict[str, Tensor]:
    """What `quack_epilogues.turn` reads beside the product. `layer`: of `rotation.adjacent_pairs`."""
    row, column = rotation.positions.split(1)
    return {"row": row, "column": column, "frequency": rotation.frequencies, "bias": layer.bias[None]}


def multiply(
    epilogue: Any,  # noqa: ANN401
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: Tile,
    values: dict[str, Tensor],
    residual: Tensor | None = None,
) -> None:
    """`x @ weight.T` and what `epilogue` makes of it with `values` and what is in `residual`, into `out`.

    Factors in 8 bits are summed as the tensor cores do: sums that leave them at every step take ten times as long.
    """
    epilogue.gemm(
        x,
        weight,
        out,
        residual,
        epi_args=values,
        tile_M=tile.rows,
        tile_N=tile.columns,
        cluster_M=tile.cluster,
        cluster_N=1,
        pingpong=tile.pingpong,
        post_init_attrs=(("fp8_slow_accum", False),) if x.dtype.itemsize == 1 else (),
    )
