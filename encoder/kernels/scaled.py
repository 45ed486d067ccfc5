"""Quantises rows to e4m3 with one scale per row, in one pass, optionally after an activation.

A row's scale is its largest magnitude over 448, the largest e4m3 number. Rows of zeros remain zero, and rows are
independent of each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from encoder.kernels.launch import OPTIONS, parts
from encoder.kernels.overlap import begin_after, overlapping

LARGEST = tl.constexpr(448.0)
# Keeps scales and their inverses within float32's range. Rows with a smaller maximum lose their smallest numbers.
SMALLEST_MAXIMUM = tl.constexpr(1e-30)

ACTIVATIONS = ("none", "gelu_pytorch_tanh", "gelu", "silu", "swiglu")
"""Activations before the quantisation. "swiglu" takes pairs of a gate and a gated feature and halves the width."""

_NARROW, _FEW_ROWS = 2048, 512


@triton.jit
def _activated(
    x_ptr: tl.tensor, start: tl.tensor, first: int, mask: tl.tensor, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
) -> tl.tensor:
    """Returns `[rows, BLOCK]` activated features from `first` on, in float32."""
    if ACTIVATION == "swiglu":
        feature = 2 * first + tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.reshape(tl.broadcast_to(mask[:, :, None], mask.shape[0], BLOCK, 2), mask.shape[0], 2 * BLOCK)
        packed = tl.load(x_ptr + 2 * start + feature, mask=both, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(packed, [mask.shape[0], BLOCK, 2]))
        return gate * tl.sigmoid(gate) * up
    x = tl.load(x_ptr + start + first + tl.arange(0, BLOCK)[None, :], mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu_pytorch_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z).
        x *= tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    if ACTIVATION == "gelu":
        x *= 0.5 + 0.5 * tl.erf(0.7071067811865476 * x)
    if ACTIVATION == "silu":
        x *= tl.sigmoid(x)
    return x


@triton.jit
def _scaled_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    rows: int,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin_after(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    start = row.to(tl.int64) * WIDTH
    head = tl.arange(0, HEAD)[None, :]
    x = _activated(x_ptr, start, 0, inside & (head < WIDTH), HEAD, ACTIVATION)
    largest = tl.max(tl.abs(x), axis=1, keep_dims=True)
    if TAIL:
        tail = HEAD + tl.arange(0, TAIL)[None, :]
        within = inside & (tail < WIDTH)
        y = _activated(x_ptr, start, HEAD, within, TAIL, ACTIVATION)
        largest = tl.maximum(largest, tl.max(tl.abs(y), axis=1, keep_dims=True))
    largest = tl.maximum(largest, SMALLEST_MAXIMUM)
    tl.store(scales_ptr + row, largest / LARGEST, mask=inside)
    tl.store(out_ptr + start + head, (x * (LARGEST / largest)).to(out_ptr.dtype.element_ty), mask=inside)
    if TAIL:
        tl.store(out_ptr + start + tail, (y * (LARGEST / largest)).to(out_ptr.dtype.element_ty), mask=within)


def scaled_rows(x: Tensor, activation: str = "none") -> tuple[Tensor, Tensor]:
    """Quantises `activation(x)` to float8_e4m3fn `[rows, width]` with float32 scales `[rows, 1]`.

    `x`: `[rows, width]`, for "swiglu" twice as wide, contiguous. `activation`: one of `ACTIVATIONS`. `values * scales`
    equals `activation(x)` within half a step of e4m3: at most 1/16 of a number's magnitude, or half of the smallest
    step, 2⁻¹⁰ of the scale.
    """
    assert activation in ACTIVATIONS
    assert x.is_contiguous()
    rows, width = x.shape[0], x.shape[1] // 2 if activation == "swiglu" else x.shape[1]
    out = x.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(rows, 1, dtype=torch.float32)
    head, tail = parts(width)
    # Many narrow rows: one-warp programs, so that maxima need no exchange between warps. Few rows: spread over the GPU.
    a_warp_each = rows > _FEW_ROWS and width <= _NARROW
    rows_each = 2 if a_warp_each else 1
    _scaled_kernel[(triton.cdiv(rows, rows_each),)](
        x,
        out,
        scales,
        rows,
        WIDTH=width,
        HEAD=head,
        TAIL=tail,
        ROWS=rows_each,
        ACTIVATION=activation,
        **overlapping(x),
        num_warps=1 if a_warp_each else 4 if width <= _NARROW else 8,
        **OPTIONS,
    )
    return out, scales
