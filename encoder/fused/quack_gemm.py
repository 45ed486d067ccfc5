"""QuACK's GEMMs on Hopper, with epilogues that cuBLAS lacks or runs slowly.

FlashAttention-4 installs QuACK (`quack-kernels`). Its kernels are compiled on first use, 2 s each, and cached on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from quack.gemm_config import GemmConfig
from quack.gemm_interface import gemm_act
from torch import Tensor

from encoder.fused import quack_epilogues
from encoder.fused.affine import Affine
from encoder.fused.gemm import CublasGemm, Epilogue, Gemm, Rows
from encoder.fused.rope_in_gemm import Rotation


@dataclass(frozen=True)
class Tile:
    """Tile of a GEMM that one thread block, or a cluster of them, computes."""

    rows: int
    columns: int
    pingpong: bool = True
    cluster: int = 2

    @property
    def config(self) -> GemmConfig:
        """The tile for `gemm_act`, which caches plans by the configuration's identity: callers must keep the object."""
        return GemmConfig(
            tile_m=self.rows,
            tile_n=self.columns,
            pingpong=self.pingpong,
            is_dynamic_persistent=False,
            cluster_m=self.cluster,
            cluster_n=1,
            device_capacity=9,
        )

    def waves(self, rows: int, columns: int, multiprocessors: int) -> float:
        """Returns the number of tiles per multiprocessor; the last wave is rarely full."""
        return -(-rows // self.rows) * -(-columns // self.columns) / multiprocessors


_LARGE = Tile(128, 192)
_CONFIG = _LARGE.config
_NAMES = {Epilogue.NONE: None, Epilogue.GELU_TANH: "gelu_tanh_approx", Epilogue.SILU: "silu", Epilogue.SWIGLU: "swiglu"}

# The share of busy multiprocessors from which QuACK was faster than cuBLAS on an H200; lower where cuBLAS needs a
# separate pass for the activation.
_BUSY_ENOUGH = {Epilogue.NONE: 0.82, Epilogue.GELU_TANH: 0.8, Epilogue.SILU: 0.7, Epilogue.SWIGLU: 0.65}
_RESIDUAL, _RESIDUAL_BUSY_ENOUGH = Tile(128, 128), 0.95
# q and k are rotated by QuACK for every number of rows.
_ROTATED, _TILE_OVERHEAD = (Tile(128, 192), Tile(128, 160), Tile(128, 128)), 16
_FEW_ROTATED_ROWS, _FEW_ROTATED = 512, Tile(64, 128)
# GEMMs of up to this number of rows overlap with the preceding kernel, which makes QuACK's faster. `accumulate` leaves
# partial sums to the norm; deep GEMMs are split along K, on 16 bytes, to fill the device.
_FEW_ROWS, _PARTS, _LEAST_DEPTH = 256, 3, 1024
_IN_PARTS, _IN_ONE = Tile(64, 128, pingpong=False), Tile(64, 96, cluster=1)
# Mergers' GEMMs are deeper than a layer's, and run concurrently with the layers.
_MOST_FEW_DEPTH = 2048
_FEW = {
    Epilogue.NONE: Tile(64, 128).config,
    Epilogue.GELU_TANH: Tile(128, 96, pingpong=False).config,
    Epilogue.SWIGLU: Tile(128, 128, pingpong=False, cluster=1).config,
}


class QuackGemm(Gemm):
    """QuACK's GEMMs if they fill the device, else cuBLAS's."""

    rotates = True

    def __init__(self, device: torch.device) -> None:
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._cublas = CublasGemm()

    def inner_width(self, width: int, dtype: torch.dtype) -> int:
        """See `Gemm`. Each part of a split width begins on 16 bytes."""
        step = 8 * _PARTS
        return -(-self._cublas.inner_width(width, dtype) // step) * step

    def __call__(self, layer: Affine, x: Rows, epilogue: Epilogue = Epilogue.NONE, out: Tensor | None = None) -> Tensor:
        """See `Gemm`."""
        assert isinstance(x, Tensor)
        config = self._config(epilogue, x.shape[0], layer)
        if config is None:
            return self._cublas(layer, x, epilogue, out)
        _, result = gemm_act(
            x,
            layer.weight.t(),
            bias=layer.bias,
            activation=_NAMES[epilogue],
            postact_out=out,
            store_preact=False,
            tuned=False,
            config=config,
        )
        assert isinstance(result, Tensor)
        return result

    def rotated(self, layer: Affine, x: Rows, rotation: Rotation) -> Tensor:
        """See `Gemm`."""
        assert isinstance(x, Tensor)
        rows, columns = x.shape[0], layer.weight.shape[0]
        out = x.new_empty(rows, columns)
        tile = _FEW_ROTATED
        if rows > _FEW_ROTATED_ROWS:
            tile = best_tile(_ROTATED, rows, columns, self.multiprocessors, _TILE_OVERHEAD)
        multiply(quack_epilogues.rotate, x, layer.weight, out, tile, rotation_arguments(layer, rotation))
        return out

    def accumulate(self, layer: Affine, x: Rows, residual: Tensor) -> Tensor | None:
        """See `Gemm`."""
        assert isinstance(x, Tensor)
        rows, (columns, depth) = x.shape[0], layer.weight.shape
        if rows > _FEW_ROWS:
            if self._busy(_RESIDUAL, rows, columns) < _RESIDUAL_BUSY_ENOUGH:
                return self._cublas.accumulate(layer, x, residual)
            multiply(quack_epilogues.add, x, layer.weight, residual, _RESIDUAL, {}, residual)
            return None
        parts = _PARTS if depth % (8 * _PARTS) == 0 and depth >= _PARTS * _LEAST_DEPTH else 1
        sums = x.new_empty(parts, rows, columns, dtype=torch.float32)
        # Split-K: each part of the depth is a separate GEMM, all in one launch.
        split_x = x.view(rows, parts, -1).transpose(0, 1)
        split_weight = layer.weight.view(columns, parts, -1).transpose(0, 1)
        multiply(quack_epilogues.keep, split_x, split_weight, sums, _IN_ONE if parts == 1 else _IN_PARTS, {})
        return sums

    def _config(self, epilogue: Epilogue, rows: int, layer: Affine) -> GemmConfig | None:
        """Returns None if cuBLAS is faster."""
        if rows <= _FEW_ROWS and layer.weight.shape[1] <= _MOST_FEW_DEPTH and epilogue in _FEW:
            return _FEW[epilogue]
        if epilogue not in _NAMES or self._busy(_LARGE, rows, layer.weight.shape[0]) < _BUSY_ENOUGH[epilogue]:
            return None
        return _CONFIG

    def _busy(self, tile: Tile, rows: int, columns: int) -> float:
        """Returns the share of multiprocessors that have a tile, averaged over all waves."""
        waves = tile.waves(rows, columns, self.multiprocessors)
        return waves / -(-waves // 1)


def best_tile(tiles: Sequence[Tile], rows: int, columns: int, multiprocessors: int, overhead: int) -> Tile:
    """Returns the fastest tile by number of waves. `overhead`: the cost of a tile beyond its columns, in columns."""

    def cost(tile: Tile) -> float:
        return -(-tile.waves(rows, columns, multiprocessors) // 1) * (tile.columns + overhead)

    return min(tiles, key=cost)


def rotation_arguments(layer: Affine, rotation: Rotation) -> dict[str, Tensor]:
    """Returns the arguments of `quack_epilogues.rotate`. `layer`: from `rope_in_gemm.adjacent_pairs`."""
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
    """Writes `epilogue` of `x @ weight.T`, `values` and `residual` to `out`.

    8-bit products are accumulated in the tensor cores: moving sums out at every step takes ten times as long.
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
