"""A norm of a fused tower: adds what the stream lacks, and gives rows as the layer after it wants them.

It must not know towers or layers.
"""

from __future__ import annotations

from torch import Tensor

from encoder.kernels.norm import norm, norm_scaled
from encoder.layers import NORM_EPS
from encoder.products import Affine, Rows, ScaledRows, TorchProducts


class FusedNorm:
    """LayerNorm with a `bias`, RMSNorm without: `[width]`. `missing`: biases that the stream lacks where this reads it.

    Rows of the stream are put together to be as wide as the norm.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, missing: Tensor) -> None:
        """`missing`: float32, `[width of the stream]`."""
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()
        self._missing = missing.repeat(weight.shape[0] // missing.shape[0])

    def __call__(self, x: Tensor, valid: Tensor | None = None, sums: Tensor | None = None) -> Tensor:
        """To `[rows, width]`. `valid`, `sums`: see `norm`."""
        x, sums = self._wide(x, sums)
        return norm(x, self._weight, self._bias, NORM_EPS, shift=self._missing, valid=valid, sums=sums)

    def before(
        self,
        layer: Affine,
        products: TorchProducts,
        x: Tensor,
        valid: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> Rows:
        """As `layer` wants it."""
        if not products.takes_scaled(layer, x.shape[0]):
            return self(x, valid, sums)
        x, sums = self._wide(x, sums)
        return ScaledRows(
            *norm_scaled(x, self._weight, self._bias, NORM_EPS, shift=self._missing, valid=valid, sums=sums)
        )

    def _wide(self, x: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor | None]:
        width = self._weight.shape[0]
        return x.view(-1, width), None if sums is None else sums.view(sums.shape[0], -1, width)
