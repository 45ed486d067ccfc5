"""QuACK's GEMMs on Hopper, with epilogues that cuBLAS lacks or runs slowly.

FlashAttention-4 installs QuACK (`quack-kernels`). Its kernels take 2 s each to compile, and are cached on disk. While
`encoder.fused.compile_ahead` compiles them in parallel, a GEMM without a kernel leaves its result undefined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from quack.cache.async_compile import CompilePending, suppress_pool
from quack.gemm_config import GemmConfig
from quack.gemm_interface import gemm_act
from torch import Tensor

from encoder.fused import quack_epilogues
from encoder.fused.affine import Affine
from encoder.fused.compile_ahead import compiling_ahead
from encoder.fused.gemm import CublasGemm, Epilogue, Gemm, Rows
from encoder.fused.gemm_tiles import PARTS, Tile, activation_tile, residual_tile, rotated_tile, split_tile
from encoder.fused.rope_in_gemm import Rotation

_NAMES = {Epilogue.NONE: None, Epilogue.GELU_TANH: "gelu_tanh_approx", Epilogue.SILU: "silu", Epilogue.SWIGLU: "swiglu"}


@cache
def _config(tile: Tile) -> GemmConfig:
    """Returns the tile for `gemm_act`, the same object each time: QuACK caches plans by the object's identity."""
    return GemmConfig(
        tile_m=tile.rows,
        tile_n=tile.columns,
        pingpong=tile.pingpong,
        is_dynamic_persistent=False,
        cluster_m=tile.cluster,
        cluster_n=1,
        device_capacity=9,
    )


class QuackGemm(Gemm):
    """QuACK's GEMMs if they fill the device, else cuBLAS's."""

    rotates = True

    def __init__(self, device: torch.device) -> None:
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._cublas = CublasGemm()

    def inner_width(self, width: int, dtype: torch.dtype) -> int:
        """See `Gemm`. Each part of a split width begins on 16 bytes."""
        step = 8 * PARTS
        return -(-self._cublas.inner_width(width, dtype) // step) * step

    def __call__(self, layer: Affine, x: Rows, epilogue: Epilogue = Epilogue.NONE, out: Tensor | None = None) -> Tensor:
        """See `Gemm`."""
        assert isinstance(x, Tensor)
        rows, (columns, depth) = x.shape[0], layer.weight.shape
        tile = activation_tile(epilogue, rows, columns, depth, self.multiprocessors)
        if tile is None:
            return self._cublas(layer, x, epilogue, out)
        if epilogue is Epilogue.GELU:
            out = x.new_empty(rows, columns)
            multiply(quack_epilogues.gelu, x, layer.weight, out, tile, {"bias": layer.bias[None]})
            return out
        if out is None:
            out = x.new_empty(rows, columns // 2 if epilogue is Epilogue.SWIGLU else columns)
        _call(
            gemm_act,
            x,
            layer.weight.t(),
            bias=layer.bias,
            activation=_NAMES[epilogue],
            postact_out=out,
            store_preact=False,
            tuned=False,
            config=_config(tile),
        )
        return out

    def rotated(self, layer: Affine, x: Rows, rotation: Rotation) -> Tensor:
        """See `Gemm`."""
        assert isinstance(x, Tensor)
        rows, columns = x.shape[0], layer.weight.shape[0]
        out = x.new_empty(rows, columns)
        tile = rotated_tile(rows, columns, self.multiprocessors)
        multiply(quack_epilogues.rotate, x, layer.weight, out, tile, rotation_arguments(layer, rotation))
        return out

    def accumulate(self, layer: Affine, x: Rows, residual: Tensor) -> Tensor | None:
        """See `Gemm`."""
        assert isinstance(x, Tensor)
        rows, (columns, depth) = x.shape[0], layer.weight.shape
        part = split_tile(rows, columns, depth, self.multiprocessors)
        if part is None:
            tile = residual_tile(rows, columns, depth, self.multiprocessors)
            if tile is None:
                return self._cublas.accumulate(layer, x, residual)
            multiply(quack_epilogues.add, x, layer.weight, residual, tile, {}, residual)
            return None
        sums = x.new_empty(PARTS, rows, columns, dtype=torch.float32)
        # Split-K: each part of the depth is a separate GEMM, all in one launch.
        split_x = x.view(rows, PARTS, -1).transpose(0, 1)
        split_weight = layer.weight.view(columns, PARTS, -1).transpose(0, 1)
        multiply(quack_epilogues.keep, split_x, split_weight, sums, part, {})
        return sums


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
    _call(
        epilogue.gemm,
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


def _call(gemm: Callable[..., object], *arguments: object, **options: object) -> None:
    """Calls a GEMM. While this thread compiles ahead, one whose kernel is still being compiled does nothing."""
    try:
        gemm(*arguments, **options)
    except CompilePending:  # the pool is the whole process's
        if not compiling_ahead.get():
            with suppress_pool():
                gemm(*arguments, **options)
