"""A norm of a fused tower. It also adds pending biases and partial sums, and quantises rows for 8-bit GEMMs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from encoder.fused.affine import Affine, ScaledRows
from encoder.fused.gemm import Rows
from encoder.kernels.norm import norm
from encoder.towers.layers import NORM_EPS, RMSNorm


class FusedNorm:
    """LayerNorm with a `bias` `[width]`, RMSNorm without. `pending`: biases that the residual stream lacks here.

    A norm wider than the stream treats several rows of the stream as one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, pending: Tensor) -> None:
        """`pending`: float32 `[width of the stream]`."""
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()
        self._pending = pending.repeat(weight.shape[0] // pending.shape[0])

    @classmethod
    def of(cls, norm: nn.Module, pending: Tensor) -> FusedNorm:
        """Wraps a LayerNorm or an RMSNorm and shares its weights."""
        assert isinstance(norm, nn.LayerNorm | RMSNorm)
        return cls(norm.weight, norm.bias if isinstance(norm, nn.LayerNorm) else None, pending)

    @property
    def layer_norm(self) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of a LayerNorm; None for an RMSNorm."""
        return None if self._bias is None else (self._weight, self._bias)

    def __call__(
        self,
        x: Tensor,
        valid: Tensor | None = None,
        sums: Tensor | None = None,
        scales: Tensor | None = None,
        center: Tensor | None = None,
    ) -> Tensor:
        """Returns `[rows, width]`. `valid`, `sums`, `scales`, `center`: see `encoder.kernels.norm.norm`."""
        width = self._weight.shape[0]
        return norm(
            x.view(-1, width),
            self._weight,
            self._bias,
            NORM_EPS,
            shift=self._pending,
            valid=valid,
            sums=None if sums is None else sums.view(sums.shape[0], -1, width),
            scales=scales,
            center=center,
        )

    def before(self, layer: Affine, x: Tensor, valid: Tensor | None = None, sums: Tensor | None = None) -> Rows:
        """Like `__call__`, in the form that `layer` reads: in 8 bits if its weights are."""
        if layer.scaled is None:
            return self(x, valid, sums)
        scales = x.new_empty(x.numel() // self._weight.shape[0], 1, dtype=torch.float32)
        return ScaledRows(self(x, valid, sums, scales, layer.center), scales)
