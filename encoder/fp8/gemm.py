"""8-bit GEMMs on Hopper and newer: e4m3 rows times e4m3 weights, with a scale per row of each.

Rows are quantised by the kernel that writes them: the norm before a GEMM, or the activation pass between two. A layer
is in 8 bits for every number of rows or for none, so that an image's precision does not depend on its batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from encoder.fp8.activation_range import hidden_scales
from encoder.fp8.channel_means import ChannelMeans
from encoder.fp8.sensitivity import Layers
from encoder.fused.affine import Affine, ScaledRows
from encoder.fused.gemm import Epilogue, Gemm, Layer, Rows
from encoder.fused.rope_in_gemm import Rotation
from encoder.kernels.scaled import scaled_rows

if TYPE_CHECKING:
    from encoder.fp8.quack_gemm import QuackFp8Kernels

# Fast accumulation keeps fewer bits of a sum than float32 has, but many more than the operands' 4, whose rounding
# limits the precision; exact accumulation would move every partial sum out of the tensor cores.
_FAST_ACCUMULATION = True
# cuBLAS requires both sides of an 8-bit weight to be multiples of this.
_MULTIPLE = 16


def scaled(x: Tensor, epilogue: Epilogue = Epilogue.NONE) -> ScaledRows:
    """Returns `epilogue` of `[rows, width]`, quantised to 8 bits."""
    return ScaledRows(*scaled_rows(x, epilogue.value))


class Fp8Gemm(Gemm):
    """8-bit GEMMs for a block's layers before attention and in the MLP, by QuACK if `wide` uses it, else by cuBLAS;
    `wide` computes all others. Attention's output stays in 16 bits: another quantisation pass costs what 8 bits
    save."""

    def __init__(
        self,
        wide: Gemm,
        *,
        layers: Layers | None = None,
        means: ChannelMeans | None = None,
    ) -> None:
        """`layers`: the layers in 8 bits; None for all. `means`: of channels with massive activations in their inputs,
        subtracted before rows are quantised."""
        self._wide, self.rotates = wide, wide.rotates
        self._layers, self._means = layers, means or {}
        self._quack: QuackFp8Kernels | None = None
        if wide.rotates:
            from encoder.fp8.quack_gemm import QuackFp8Kernels
            from encoder.fused.quack_gemm import QuackGemm

            assert isinstance(wide, QuackGemm)
            self._quack = QuackFp8Kernels(wide.multiprocessors)

    def inner_width(self, width: int, dtype: torch.dtype) -> int:
        """See `Gemm`."""
        width = self._wide.inner_width(width, dtype)
        while width % _MULTIPLE:
            width = self._wide.inner_width(width + 1, dtype)
        return width

    def load(self, layer: Affine, kind: Layer, block: int) -> Affine:
        """See `Gemm`. A layer whose sides are not multiples of 16 is returned unchanged."""
        if self._layers is not None and (block, kind) not in self._layers:
            return layer
        if any(side % _MULTIPLE for side in layer.weight.shape):
            return layer
        mean = self._means.get((block, kind))
        layer = layer if mean is None else layer.centered(mean)
        return replace(layer, scaled=scaled(layer.weight.contiguous()))

    def load_mlp(
        self, up: Affine, down: Affine, block: int, norm: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Affine, Affine]:
        """See `Gemm`. With `norm` and QuACK, each hidden feature has a scale; otherwise each row of them has one."""
        up, down = super().load_mlp(up, down, block, norm)
        if self._quack is None or norm is None or up.scaled is None or down.scaled is None:
            return up, down
        weight, bias = norm
        scales = hidden_scales(up, weight, bias if up.center is None else bias.float() - up.center)
        # Exact, since the scales are powers of two.
        divided = scaled((down.weight / scales.to(down.weight.dtype)).contiguous())
        return replace(up, hidden_scale=scales), replace(down, scaled=divided)

    def __call__(self, layer: Affine, x: Rows, epilogue: Epilogue = Epilogue.NONE, out: Tensor | None = None) -> Tensor:
        """See `Gemm`."""
        if isinstance(x, Tensor):
            if layer.scaled is None:
                return self._wide(layer, x, epilogue, out)
            assert layer.center is None, "only norms subtract it"
            x = scaled(x)
        assert out is None
        assert epilogue is Epilogue.NONE
        return _multiply(layer, x, layer.bias)

    def rotated(self, layer: Affine, x: Rows, rotation: Rotation) -> Tensor:
        """See `Gemm`."""
        if isinstance(x, Tensor):
            return self._wide.rotated(layer, x, rotation)
        assert self._quack is not None
        return self._quack.rotated(layer, x, rotation)

    def accumulate(self, layer: Affine, x: Rows, residual: Tensor) -> Tensor | None:
        """See `Gemm`. cuBLAS has no 8-bit GEMM that adds to a residual."""
        if isinstance(x, Tensor):
            if layer.scaled is None:
                return self._wide.accumulate(layer, x, residual)
            x = scaled(x)
        if self._quack is None:
            return _multiply(layer, x, None)[None]
        self._quack.accumulate(layer, x, residual)
        return None

    def mlp(self, up: Affine, down: Affine, x: Rows, epilogue: Epilogue, residual: Tensor) -> Tensor | None:
        """See `Gemm`. Without QuACK's GELU, the activation is a pass that reads bfloat16 and writes 8 bits."""
        if isinstance(x, Tensor):
            return self.accumulate(down, self._wide(up, x, epilogue), residual)
        if self._quack is not None and up.hidden_scale is not None:
            assert epilogue is Epilogue.GELU_TANH
            self._quack.gelu_mlp(up, down, x, residual)
            return None
        return self.accumulate(down, scaled(_multiply(up, x, up.bias), epilogue), residual)


def _multiply(layer: Affine, x: ScaledRows, bias: Tensor | None) -> Tensor:
    """`[rows, in]` to `[rows, out]` in the dtype of the unquantised weights, by cuBLAS."""
    assert layer.scaled is not None
    return torch._scaled_mm(  # noqa: SLF001
        x.values,
        layer.scaled.values.t(),
        scale_a=x.scales,
        scale_b=layer.scaled.scales.t(),
        bias=bias,
        out_dtype=layer.weight.dtype,
        use_fast_accum=_FAST_ACCUMULATION,
    )
