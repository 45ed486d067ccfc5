"""Matrix products by QuACK on Hopper: with activations that cuBLAS has no epilogue for, or only a slow one.

QuACK (`quack-kernels`) comes with FlashAttention-4. Its kernels are compiled on first use, 2 s each, and kept on disk.
"""

from __future__ import annotations

import torch
from quack.gemm_config import GemmConfig
from quack.gemm_interface import gemm_act
from torch import Tensor

from encoder.products import Affine, After, TorchProducts

_TILE_ROWS, _TILE_COLUMNS = 128, 192
# QuACK remembers plans by the identity of a configuration, so there is one object for each.
_CONFIG = GemmConfig(
    tile_m=_TILE_ROWS,
    tile_n=_TILE_COLUMNS,
    pingpong=True,
    is_dynamic_persistent=False,
    cluster_m=2,
    cluster_n=1,
    device_capacity=9,
)
_NAMES = {After.NOTHING: None, After.GELU_TANH: "gelu_tanh_approx", After.SILU: "silu", After.SWIGLU: "swiglu"}

# Tiles come in waves of one a multiprocessor, and the last wave is seldom full. From this share of busy places on QuACK
# was faster than cuBLAS on an H200, where cuBLAS needs a pass more for the activation earlier.
_BUSY_ENOUGH = {After.NOTHING: 0.82, After.GELU_TANH: 0.8, After.SILU: 0.7, After.SWIGLU: 0.65}


class QuackProducts(TorchProducts):
    """Products that fill the chip by QuACK; the others, and residuals, as `TorchProducts`."""

    def __init__(self, device: torch.device) -> None:
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(self, layer: Affine, x: Tensor, after: After = After.NOTHING, out: Tensor | None = None) -> Tensor:
        """See `TorchProducts`."""
        if after not in _NAMES or self._busy(x.shape[0], layer.weight.shape[0]) < _BUSY_ENOUGH[after]:
            return super().__call__(layer, x, after, out)
        _, result = gemm_act(
            x,
            layer.weight.t(),
            bias=layer.bias,
            activation=_NAMES[after],
            postact_out=out,
            store_preact=False,
            tuned=False,
            config=_CONFIG,
        )
        assert isinstance(result, Tensor)
        return result

    def _busy(self, rows: int, columns: int) -> float:
        """The share of places for tiles that hold one, from the first wave to the last."""
        tiles = -(-rows // _TILE_ROWS) * -(-columns // _TILE_COLUMNS)
        return tiles / (-(-tiles // self._multiprocessors) * self._multiprocessors)
