"""Gated activation over a packed product: SiLU of each even feature times the odd feature after it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from encoder.kernels.launch import OPTIONS
from encoder.kernels.overlap import begin_after, overlapping


@triton.jit
def _swiglu_kernel(
    packed_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: int,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin_after(OVERLAP)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    first = tl.program_id(0) * COLUMNS
    start = row.to(tl.int64) * WIDTH
    feature = 2 * first + tl.arange(0, 2 * COLUMNS)[None, :]
    packed = tl.load(packed_ptr + 2 * start + feature, mask=(row < rows) & (feature < 2 * WIDTH), other=0.0)
    gate, up = tl.split(tl.reshape(packed.to(tl.float32), [ROWS, COLUMNS, 2]))
    column = first + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + start + column, gate * tl.sigmoid(gate) * up, mask=(row < rows) & (column < WIDTH))


def swiglu(packed: Tensor) -> Tensor:
    """`[rows, 2 * width]`, alternating gate and gated feature, contiguous, to `[rows, width]`; computed in float32."""
    rows, width = packed.shape[0], packed.shape[1] // 2
    out = packed.new_empty(rows, width)
    columns, few = 128, rows <= 512
    rows_each = 2 if few else 16
    _swiglu_kernel[(triton.cdiv(width, columns), triton.cdiv(rows, rows_each))](
        packed,
        out,
        rows,
        WIDTH=width,
        ROWS=rows_each,
        COLUMNS=columns,
        **overlapping(packed),
        num_warps=2 if few else 4,
        **OPTIONS,
    )
    return out
