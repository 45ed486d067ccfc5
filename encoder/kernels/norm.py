"""LayerNorm or RMSNorm of a residual stream in one pass, which reads each row once and writes its norm once.

GEMMs add residuals in their epilogues but not their biases, which this norm adds. It also adds the partial sums of
GEMMs that cannot add to the stream. Rows for an 8-bit GEMM are written in 8 bits, with their scales; padding rows are
written as zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from encoder.kernels.launch import OPTIONS, parts
from encoder.kernels.overlap import begin_after, overlapping
from encoder.kernels.scaled import LARGEST, SMALLEST_MAXIMUM


@triton.jit
def _load(pointer: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _with_sums(
    x: tl.tensor,
    x_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    place: tl.tensor,
    mask: tl.tensor,
    rows: int,
    WIDTH: tl.constexpr,
    SUMS: tl.constexpr,
) -> tl.tensor:
    """Adds partial sums to the stream's values, stores the result and returns it as rounded."""
    for part in tl.static_range(SUMS):
        x += _load(sums_ptr + tl.cast(rows, tl.int64) * (part * WIDTH) + place, mask)
    rounded = x.to(x_ptr.dtype.element_ty)
    # If a block has fewer elements than threads, several threads load the same one: all loads must precede the stores.
    tl.debug_barrier()
    tl.store(x_ptr + place, rounded, mask=mask)
    return rounded.to(tl.float32)


@triton.jit
def _norm_kernel(
    x_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    center_ptr: tl.tensor,
    rows: int,
    eps: float,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    RMS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_VALID: tl.constexpr,
    SUMS: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_CENTER: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin_after(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    start = row.to(tl.int64) * WIDTH
    head = tl.arange(0, HEAD)[None, :]
    x = _load(x_ptr + start + head, inside)
    if SUMS:
        x = _with_sums(x, x_ptr, sums_ptr, start + head, inside, rows, WIDTH, SUMS)
    if HAS_SHIFT:
        x += tl.load(shift_ptr + head)
    if TAIL:
        tail = HEAD + tl.arange(0, TAIL)[None, :]
        within = tail < WIDTH
        y = _load(x_ptr + start + tail, inside & within)
        if SUMS:
            y = _with_sums(y, x_ptr, sums_ptr, start + tail, inside & within, rows, WIDTH, SUMS)
        if HAS_SHIFT:
            y += _load(shift_ptr + tail, within)
    if not RMS:
        total = tl.sum(x, axis=1, keep_dims=True)
        if TAIL:
            total += tl.sum(y, axis=1, keep_dims=True)
        x -= total / WIDTH
        if TAIL:
            y = tl.where(within, y - total / WIDTH, 0.0)
    squares = tl.sum(x * x, axis=1, keep_dims=True)
    if TAIL:
        squares += tl.sum(y * y, axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / WIDTH + eps)
    counts = row < tl.load(valid_ptr) if HAS_VALID else inside
    x = x * scale * tl.load(weight_ptr + head).to(tl.float32)
    if not RMS:
        x += tl.load(bias_ptr + head).to(tl.float32)
    if HAS_CENTER:
        x -= tl.load(center_ptr + head)
    # Selected, not multiplied: a padding row may hold NaN.
    x = tl.where(counts, x, 0.0)
    if TAIL:
        y = y * scale * _load(weight_ptr + tail, within)
        if not RMS:
            y += _load(bias_ptr + tail, within)
        if HAS_CENTER:
            y -= _load(center_ptr + tail, within)
        y = tl.where(counts, y, 0.0)
    if SCALED:
        largest = tl.max(tl.abs(x), axis=1, keep_dims=True)
        if TAIL:
            largest = tl.maximum(largest, tl.max(tl.abs(y), axis=1, keep_dims=True))
        largest = tl.maximum(largest, SMALLEST_MAXIMUM)
        tl.store(scales_ptr + row, largest / LARGEST, mask=inside)
        x *= LARGEST / largest
        if TAIL:
            y *= LARGEST / largest
    tl.store(out_ptr + start + head, x.to(out_ptr.dtype.element_ty), mask=inside)
    if TAIL:
        tl.store(out_ptr + start + tail, y.to(out_ptr.dtype.element_ty), mask=inside & within)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    shift: Tensor | None = None,
    valid: Tensor | None = None,
    sums: Tensor | None = None,
    scales: Tensor | None = None,
    center: Tensor | None = None,
) -> Tensor:
    """LayerNorm with a `bias`, RMSNorm without, of `x + shift`, computed in float32 and rounded once.

    `x`, result: `[rows, width]`, contiguous; `weight`, `bias`: `[width]`; `shift`: float32 `[width]`. `valid`: int32
    `[1]` on the device or None: rows from `valid` on are written as zeros, whatever they hold. `sums`:
    `[parts, rows, width]`, contiguous, float32 or the dtype of `x`, or None: added to `x` in place first, rounded once.
    `scales`: float32 `[rows, 1]` or None: if given, the result is float8_e4m3fn, with the rows' scales in it. `center`:
    float32 `[width]` or None: subtracted from the result before it is rounded.
    """
    out = torch.empty_like(x, dtype=x.dtype if scales is None else torch.float8_e4m3fn)
    rows, width = x.shape
    head, tail = parts(width)
    # Many narrow rows: one-warp programs, so that sums need no exchange between warps. Few rows: spread over the GPU.
    a_warp_each = rows > 512 and width <= 2048
    rows_each = 2 if a_warp_each else 1
    _norm_kernel[(triton.cdiv(rows, rows_each),)](
        x,
        weight if shift is None else shift,
        weight,
        weight if bias is None else bias,
        out,
        x if valid is None else valid,
        x if sums is None else sums,
        x if scales is None else scales,
        weight if center is None else center,
        rows,
        eps,
        WIDTH=width,
        HEAD=head,
        TAIL=tail,
        ROWS=rows_each,
        RMS=bias is None,
        HAS_SHIFT=shift is not None,
        HAS_VALID=valid is not None,
        SUMS=0 if sums is None else sums.shape[0],
        SCALED=scales is not None,
        HAS_CENTER=center is not None,
        **overlapping(x),
        num_warps=1 if a_warp_each else 4 if width <= 2048 else 8,
        **OPTIONS,
    )
    return out
