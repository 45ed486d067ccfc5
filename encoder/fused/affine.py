"""Weights of one layer in 16 bits and, for 8-bit GEMMs, quantised."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ScaledRows:
    """Rows quantised to 8 bits, which represent `values * scales`."""

    values: Tensor
    """float8_e4m3fn `[rows, width]`."""
    scales: Tensor
    """float32 `[rows, 1]`."""


@dataclass(frozen=True)
class Affine:
    """`x @ weight.T + bias`. `weight`: `[out, in]`; `bias`: `[out]`, zeros for layers without one."""

    weight: Tensor
    bias: Tensor
    scaled: ScaledRows | None = None
    """The quantised weight, with a scale per output feature. If set, every GEMM of the layer is in 8 bits, whatever the
    number of rows, so that an image's precision does not depend on its batch."""
    hidden_scale: Tensor | None = None
    """For the MLP's first layer, if it writes 8 bits for the second: the factor of each hidden feature, by which the
    second layer's quantised weight is divided. float32 `[out]`."""
    center: Tensor | None = None
    """For a quantised layer after a norm: subtracted from the norm's rows before they are quantised. Its product with
    the weight is part of the bias. float32 `[in]`."""

    def centered(self, center: Tensor) -> Affine:
        """Returns the same function for rows from which `center` has been subtracted, up to the bias's rounding."""
        bias = self.bias.float() + self.weight.float() @ center
        return replace(self, bias=bias.to(self.bias.dtype), center=center)

    @classmethod
    def of(cls, layer: nn.Linear) -> Affine:
        """Wraps a layer and shares its weights."""
        weight = layer.weight.detach()
        return cls(weight, weight.new_zeros(weight.shape[0]) if layer.bias is None else layer.bias.detach())

    def padded(self, *, inputs: int | None = None, outputs: int | None = None) -> Affine:
        """Adds zero weights for further input or output features. Shares weights that need no padding."""
        weight, bias = self.weight, self.bias
        if inputs is not None and inputs != weight.shape[1]:
            weight = F.pad(weight, (0, inputs - weight.shape[1]))
        if outputs is not None and outputs != weight.shape[0]:
            weight = F.pad(weight, (0, 0, 0, outputs - weight.shape[0]))
            bias = F.pad(bias, (0, outputs - bias.shape[0]))
        return replace(self, weight=weight, bias=bias)

    @classmethod
    def paired(cls, gate: Affine, up: Affine) -> Affine:
        """Interleaves gates and gated features for one GEMM with `Epilogue.SWIGLU`."""
        return cls(
            torch.stack((gate.weight, up.weight), 1).flatten(0, 1), torch.stack((gate.bias, up.bias), 1).flatten()
        )
