"""Matrix products with what goes before and after them: bias, activation, residual, a slice of a wider output.

The seam between the fused towers and whatever multiplies matrices. It must not know what the layers mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.kernels.swiglu import swiglu

if TYPE_CHECKING:
    from encoder.rotation import Rotation

# Rows of 16 bytes keep the fast kernels; 64 features are one step of them. 237 against 590 TFLOP/s on an H200.
_ALIGNMENT = 64
_ROW_BYTES = 16


class After(StrEnum):
    """What follows a product. `SWIGLU` takes features in pairs, a gate and what it gates, to half as many."""

    NOTHING = "nothing"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU = "gelu"
    SILU = "silu"
    SWIGLU = "swiglu"


class Part(StrEnum):
    """Of a block: the layers before and after attention, and those of the MLP."""

    QKV = "qkv"
    PROJ = "proj"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True)
class ScaledRows:
    """Rows in 8 bits: `values * scales` is what they stand for."""

    values: Tensor
    """float8_e4m3fn `[rows, width]`."""
    scales: Tensor
    """float32 `[rows, 1]`."""


Rows = Tensor | ScaledRows


@dataclass(frozen=True)
class Affine:
    """`x @ weight.T + bias`. `weight`: `[out, in]`; `bias`: `[out]`, zeros where the layer has none."""

    weight: Tensor
    bias: Tensor
    scaled: ScaledRows | None = None
    """The weight in 8 bits, a scale for each feature that comes out, where there are products for it."""
    fewest_scaled_rows: int = 0
    """Rows of a batch from which on those are used."""
    between: Tensor | None = None
    """Of the MLP's layers where one hands 8 bits to the other: what the first multiplies its features with, and what
    the second takes its weights' scales to be, that over the same factor. float32 `[out]`."""

    @classmethod
    def of(cls, layer: nn.Linear) -> Affine:
        """Shares the layer's weights."""
        weight = layer.weight.detach()
        return cls(weight, weight.new_zeros(weight.shape[0]) if layer.bias is None else layer.bias.detach())

    def padded(self, *, inputs: int | None = None, outputs: int | None = None) -> Affine:
        """With weights of 0 for further features in or out. Shares what needs no padding."""
        weight, bias = self.weight, self.bias
        if inputs is not None:
            weight = F.pad(weight, (0, inputs - weight.shape[1])) if inputs != weight.shape[1] else weight
        if outputs is not None and outputs != weight.shape[0]:
            weight, bias = (
                F.pad(weight, (0, 0, 0, outputs - weight.shape[0])),
                F.pad(bias, (0, outputs - bias.shape[0])),
            )
        return replace(self, weight=weight, bias=bias)

    @classmethod
    def paired(cls, gate: Affine, up: Affine) -> Affine:
        """Gates and what they gate in one product, features in turn, as `After.SWIGLU` takes them."""
        return cls(
            torch.stack((gate.weight, up.weight), 1).flatten(0, 1), torch.stack((gate.bias, up.bias), 1).flatten()
        )


def aligned_width(width: int, dtype: torch.dtype) -> int:
    """`width`, or the width to pad it to where rows of it would not begin on 16 bytes."""
    if width * dtype.itemsize % _ROW_BYTES == 0:
        return width
    return -(-width // _ALIGNMENT) * _ALIGNMENT


class TorchProducts:
    """cuBLAS and what its epilogues can do, on any device; the rest in a pass of its own."""

    turns = False
    """Whether there is `turned`."""

    def inner_width(self, width: int, dtype: torch.dtype) -> int:
        """What to pad a width to that one product makes and the next one takes."""
        return aligned_width(width, dtype)

    def load(self, layer: Affine, part: Part, block: int) -> Affine:
        """A layer of the tower's block `block`, from 0, as it is kept."""
        return layer

    def takes_scaled(self, layer: Affine, rows: int) -> bool:
        """Whether `layer` wants a batch of so many rows as `ScaledRows`."""
        return False

    def __call__(self, layer: Affine, x: Rows, after: After = After.NOTHING, out: Tensor | None = None) -> Tensor:
        """`[rows, in]` to `[rows, out]` (`SWIGLU`: half as many), into `out` if given, whose rows may be parts of rows.

        `out` is for `After.NOTHING` alone.
        """
        assert isinstance(x, Tensor)
        if out is not None:
            assert after is After.NOTHING
            return torch.addmm(layer.bias, x, layer.weight.t(), out=out)
        # On the CPU the same call is the exact GELU.
        if after is After.GELU_TANH and x.is_cuda:
            return torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
        product = F.linear(x, layer.weight, layer.bias)
        if after is After.NOTHING:
            return product
        if after is After.SWIGLU:
            return swiglu(product)
        if after is After.SILU:
            return F.silu(product)
        return F.gelu(product, approximate="tanh" if after is After.GELU_TANH else "none")

    def turned(self, layer: Affine, x: Rows, rotation: Rotation) -> Tensor:
        """The packed q, k, v with rotary positions turned; `layer`: of `rotation.adjacent_pairs`."""
        raise NotImplementedError(f"{type(self).__name__} does not turn q and k")

    def add_(self, layer: Affine, x: Rows, residual: Tensor) -> None:
        """Adds `x @ weight.T`, without the bias, to `residual` `[rows, out]`, rounded once."""
        assert isinstance(x, Tensor)
        torch.addmm(residual, x, layer.weight.t(), out=residual)

    def add_later(self, layer: Affine, x: Rows, residual: Tensor) -> Tensor | None:
        """As `add_`, or leaves it to the next norm: `[parts, rows, out]`, whose sum is to be added."""
        self.add_(layer, x, residual)
        return None

    def add_both_later(self, first: Affine, second: Affine, x: Rows, after: After, residual: Tensor) -> Tensor | None:
        """As `add_later`, of `second`'s product of `after` of `first`'s."""
        return self.add_later(second, self(first, x, after), residual)
