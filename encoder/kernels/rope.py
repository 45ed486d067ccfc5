"""Rotary positions: a batch's table of angles, and the rotation of q and k in place in the packed qkv.

The pair (i, i + head_dim / 2) of a head is rotated by angle i; the first half of the angles is proportional to the row,
the second to the column.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from encoder.kernels.launch import OPTIONS, parts
from encoder.kernels.overlap import begin_after, overlapping


@triton.jit
def _table_kernel(
    positions_ptr: tl.tensor,
    frequencies_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows: int,
    FREQUENCIES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < 2 * FREQUENCIES)
    position = tl.load(positions_ptr + 2 * row + column // FREQUENCIES, mask=inside, other=0).to(tl.float32)
    angle = position * tl.load(frequencies_ptr + column % FREQUENCIES)
    start = row.to(tl.int64) * (4 * FREQUENCIES)
    tl.store(table_ptr + start + column, tl.cos(angle), mask=inside)
    tl.store(table_ptr + start + 2 * FREQUENCIES + column, tl.sin(angle), mask=inside)


def rope_table(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns cosines, then sines, of each patch: `[num_patches, 2, head_dim / 2]` in `dtype`.

    `positions`: int32 `[num_patches, 2]`, row and column; `frequencies`: float32 `[head_dim / 4]`. float16 suffices for
    bfloat16 heads: it resolves [-1, 1] eight times finer.
    """
    rows, count = positions.shape[0], frequencies.shape[0]
    table = torch.empty(rows, 2, 2 * count, dtype=dtype, device=positions.device)
    rows_each = 8
    _table_kernel[(triton.cdiv(rows, rows_each),)](
        positions,
        frequencies,
        table,
        rows,
        FREQUENCIES=count,
        ROWS=rows_each,
        COLUMNS=triton.next_power_of_2(2 * count),
        num_warps=4,
        **OPTIONS,
    )
    return table


@triton.jit
def _rotate(base_ptr: tl.tensor, table_ptr: tl.tensor, pair: tl.tensor, mask: tl.tensor, HALF: tl.constexpr) -> None:
    cos = tl.load(table_ptr + pair, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(table_ptr + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    first = tl.load(base_ptr + pair, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(base_ptr + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    # If a block has fewer elements than threads, several threads load the same one: all loads must precede the stores.
    tl.debug_barrier()
    tl.store(base_ptr + pair, first * cos - second * sin, mask=mask)
    tl.store(base_ptr + HALF + pair, second * cos + first * sin, mask=mask)


@triton.jit
def _rope_kernel(
    qkv_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows: int,
    row_stride: int,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin_after(OVERLAP)
    # A line is one head of q or k in one row.
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)[:, None]
    row = (line // (2 * HEADS)).to(tl.int64)
    inside = row < rows
    base_ptr = qkv_ptr + row * row_stride + (line % (2 * HEADS)) * (2 * HALF)
    angles_ptr = table_ptr + row * (2 * HALF)
    _rotate(base_ptr, angles_ptr, tl.arange(0, HEAD)[None, :], inside, HALF)
    if TAIL:
        tail = HEAD + tl.arange(0, TAIL)[None, :]
        _rotate(base_ptr, angles_ptr, tail, inside & (tail < HALF), HALF)


def rope_(qkv: Tensor, table: Tensor, heads: int) -> None:
    """Rotates q and k in place, computed in float32 and rounded once.

    `qkv`: `[rows, 3 * heads * head_dim]`, q, k, v, each row contiguous; `table`: from `rope_table`.
    """
    rows, half = qkv.shape[0], table.shape[2]
    head, tail = parts(half)
    lines = 64
    _rope_kernel[(triton.cdiv(rows * 2 * heads, lines),)](
        qkv,
        table,
        rows,
        qkv.stride(0),
        HEADS=heads,
        HALF=half,
        HEAD=head,
        TAIL=tail,
        LINES=lines,
        **overlapping(qkv),
        num_warps=4,
        **OPTIONS,
    )
