"""Rows to 8-bit floats with a scale each, in one pass, after an activation where one is asked for.

A row's scale is its largest magnitude over 448, the largest e4m3 number; a row of zeros stays one, and what is in a row
touches no other. It must not know what is multiplied with the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from encoder.kernels.launch import parts
from encoder.kernels.overlap import begin_after, overlapping

LARGEST = tl.constexpr(448.0)
# Rows of less than this lose their smallest numbers, and no scale or its inverse leaves float32's range.
SMALLEST_MAXIMUM = tl.constexpr(1e-30)

ACTIVATIONS = ("nothing", "gelu_pytorch_tanh", "gelu", "silu", "swiglu")
"""What may come first. "swiglu" takes features in pairs, a gate and what it gates, to half as many."""

_NARROW, _FEW_ROWS = 2048, 512


@triton.jit
def _activated(
    x_ptr: tl.tensor, start: tl.tensor, first: int, mask: tl.tensor, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
) -> tl.tensor:
    """`[rows, BLOCK]` features from `first` on, in float32."""
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


def scaled_rows(x: Tensor, activation: str = "nothing") -> tuple[Tensor, Tensor]:
    """`[rows, width]`, contiguous (for "swiglu" twice as wide) to float8_e4m3fn and float32 scales `[rows, 1]`.

    `values * scales` is `activation(x)` within half a step of e4m3, 1/16 of a number's magnitude at most, or half of
    its smallest step, 2⁻¹⁰ of the scale. `activation`: of `ACTIVATIONS`.
    """
    assert activation in ACTIVATIONS
    assert x.is_contiguous()
    rows, width = x.shape[0], x.shape[1] // 2 if activation == "swiglu" else x.shape[1]
    out = x.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(rows, 1, dtype=torch.float32)
    head, tail = parts(width)
    # Many narrow rows: a warp each, so that maxima need no exchange between warps. Few: spread over the chip.
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
    )
    return out, scales
