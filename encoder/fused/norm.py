"""A norm of a fused tower. It also adds pending biases and partial sums, and quantises rows for 8-bit GEMMs."""

from __future__ import annotations

from torch import Tensor, nn

from encoder.fused.affine import Affine, ScaledRows
from encoder.fused.gemm import Rows
from encoder.kernels.norm import norm, norm_scaled
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

    def __call__(self, x: Tensor, valid: Tensor | None = None, sums: Tensor | None = None) -> Tensor:
        """Returns `[rows, width]`. `valid`, `sums`: see `encoder.kernels.norm.norm`."""
        x, sums = self._wide(x, sums)
        return norm(x, self._weight, self._bias, NORM_EPS, shift=self._pending, valid=valid, sums=sums)

    def before(
        self,
        layer: Affine,
        x: Tensor,
        valid: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> Rows:
        """Like `__call__`, in the form that `layer` reads: in 8 bits if its weights are."""
        if layer.scaled is None:
            return self(x, valid, sums)
        x, sums = self._wide(x, sums)
        return ScaledRows(
            *norm_scaled(x, self._weight, self._bias, NORM_EPS, shift=self._pending, valid=valid, sums=sums)
        )

    def _wide(self, x: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor | None]:
        width = self._weight.shape[0]
        return x.view(-1, width), None if sums is None else sums.view(sums.shape[0], -1, width)
