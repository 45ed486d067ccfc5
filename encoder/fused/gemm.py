"""The GEMM interface of the fused towers, with epilogues (bias, activation, residual), and cuBLAS as implementation."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.fused.affine import Affine, ScaledRows
from encoder.fused.rope_in_gemm import Rotation

# Rows must begin on 16 bytes for the fast kernels, which step by 64 features: 590 TFLOP/s on an H200, else 237.
_ALIGNMENT = 64
_ROW_BYTES = 16


class Epilogue(StrEnum):
    """The activation after a GEMM. `SWIGLU` takes pairs of a gate and a gated feature, and halves the width."""

    NONE = "none"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU = "gelu"
    SILU = "silu"
    SWIGLU = "swiglu"


class Layer(StrEnum):
    """Layers of a block that may be in 8 bits: the one before attention, and the two of the MLP."""

    QKV = "qkv"
    UP = "up"
    DOWN = "down"


Rows = Tensor | ScaledRows


def aligned_width(width: int, dtype: torch.dtype) -> int:
    """Returns `width`, or the padded width if rows of `width` would not begin on 16 bytes."""
    if width * dtype.itemsize % _ROW_BYTES == 0:
        return width
    return -(-width // _ALIGNMENT) * _ALIGNMENT


class Gemm(Protocol):
    """GEMMs of a fused tower.

    gemm: Gemm = CublasGemm()
    hidden = gemm(up, x, Epilogue.GELU)
    partial_sums = gemm.accumulate(down, hidden, residual)
    """

    rotates: bool
    """Whether `rotated` is implemented."""

    def inner_width(self, width: int, dtype: torch.dtype) -> int:
        """Returns the padded width of the MLP's hidden features, which one GEMM writes and the next one reads."""
        ...

    def load(self, layer: Affine, kind: Layer, block: int) -> Affine:
        """Returns a layer of the tower's block `block`, counted from 0, quantised if its GEMM is in 8 bits."""
        return layer

    def load_mlp(
        self, up: Affine, down: Affine, block: int, norm: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Affine, Affine]:
        """Applies `load` to both layers of a block's MLP. `norm`: weight and bias of the LayerNorm before them, if the
        activation between them is the tanh approximation of GELU."""
        return self.load(up, Layer.UP, block), self.load(down, Layer.DOWN, block)

    def __call__(self, layer: Affine, x: Rows, epilogue: Epilogue = Epilogue.NONE, out: Tensor | None = None) -> Tensor:
        """`[rows, in]` to `[rows, out]` (`SWIGLU`: half as many), into `out` if given, which may be a slice of columns.

        `out` is for `Epilogue.NONE` only.
        """
        ...

    def rotated(self, layer: Affine, x: Rows, rotation: Rotation) -> Tensor:
        """Returns the packed q, k, v with q and k rotated. `layer`: from `rope_in_gemm.adjacent_pairs`."""
        ...

    def accumulate(self, layer: Affine, x: Rows, residual: Tensor) -> Tensor | None:
        """Adds `x @ weight.T`, without the bias, to `residual` `[rows, out]`, rounded once; or returns partial sums
        `[parts, rows, out]`, which the next norm adds to it."""
        ...

    def mlp(self, up: Affine, down: Affine, x: Rows, epilogue: Epilogue, residual: Tensor) -> Tensor | None:
        """Like `accumulate` of `down`, on the output of `up` with `epilogue`."""
        return self.accumulate(down, self(up, x, epilogue), residual)


class CublasGemm(Gemm):
    """cuBLAS and its epilogues, on any device; other epilogues run in a separate pass."""

    rotates = False

    def inner_width(self, width: int, dtype: torch.dtype) -> int:
        """See `Gemm`."""
        return aligned_width(width, dtype)

    def __call__(self, layer: Affine, x: Rows, epilogue: Epilogue = Epilogue.NONE, out: Tensor | None = None) -> Tensor:
        """See `Gemm`."""
        assert isinstance(x, Tensor)
        if out is not None:
            assert epilogue is Epilogue.NONE
            return torch.addmm(layer.bias, x, layer.weight.t(), out=out)
        # On the CPU, the same call computes the exact GELU.
        if epilogue is Epilogue.GELU_TANH and x.is_cuda:
            return torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)  # noqa: SLF001
        product = F.linear(x, layer.weight, layer.bias)
        match epilogue:
            case Epilogue.NONE:
                return product
            case Epilogue.SWIGLU:
                from encoder.kernels.swiglu import swiglu  # imports Triton, which takes half a second

                return swiglu(product)
            case Epilogue.SILU:
                return F.silu(product)
        return F.gelu(product, approximate="tanh" if epilogue is Epilogue.GELU_TANH else "none")

    def rotated(self, layer: Affine, x: Rows, rotation: Rotation) -> Tensor:
        """Not implemented."""
        raise NotImplementedError("cuBLAS does not rotate q and k")

    def accumulate(self, layer: Affine, x: Rows, residual: Tensor) -> Tensor | None:
        """See `Gemm`."""
        assert isinstance(x, Tensor)
        torch.addmm(residual, x, layer.weight.t(), out=residual)
        return None
