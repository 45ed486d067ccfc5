"""Interpolates learned positions and adds them to the embedded patches of all images, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from encoder.kernels.launch import OPTIONS


@triton.jit
def _positions_kernel(
    x_ptr: tl.tensor,
    table_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    rows: int,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = row < rows
    covered = inside & (column < WIDTH)
    total = tl.load(x_ptr + row * WIDTH + column, mask=covered, other=0.0).to(tl.float32)
    for tap in tl.static_range(4):
        place = tl.load(indices_ptr + 4 * row + tap, mask=inside, other=0).to(tl.int64)
        weight = tl.load(weights_ptr + 4 * row + tap, mask=inside, other=0.0)
        total += weight * tl.load(table_ptr + place * WIDTH + column, mask=covered, other=0.0).to(tl.float32)
    # If a block has fewer elements than threads, several threads load the same one: all loads must precede the stores.
    tl.debug_barrier()
    tl.store(x_ptr + row * WIDTH + column, total, mask=covered)


def add_positions_(x: Tensor, table: Tensor, indices: Tensor, weights: Tensor) -> None:
    """Adds to each row of `x` `[rows, width]`, in place, the weighted sum of four rows of `table` `[places, width]`.

    `indices`: int32 `[rows, 4]`; `weights`: float32 `[rows, 4]`. Computed in float32, rounded once.
    """
    rows, width = x.shape
    rows_each, columns = 4 if rows <= 1024 else 16, 128
    _positions_kernel[(triton.cdiv(rows, rows_each), triton.cdiv(width, columns))](
        x, table, indices, weights, rows, WIDTH=width, ROWS=rows_each, COLUMNS=columns, num_warps=2, **OPTIONS
    )
