"""Attention within segments that fit one block, such as windows; rotates q and k as it reads them.

A block holds a whole segment of one head: q, k and v are read once, no sum spans blocks, and the rotary positions need
no separate pass. A block reads rows of its own segment only, so other images and padding cannot affect it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from encoder.kernels.flash import LOG2_E, MASKED
from encoder.kernels.launch import OPTIONS, parts
from encoder.kernels.overlap import begin_after, overlapping

# Longest segment in patches: a window of Qwen2.5-VL.
LONGEST = 64


@triton.jit
def _rotated(
    base_ptr: tl.tensor,
    table_ptr: tl.tensor,
    there: tl.tensor,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """Returns features `FIRST` … `FIRST + COUNT` of the heads at `base_ptr` `[rows, 1]`, rotated: `[rows, COUNT]`.

    Each thread reads a feature and its partner, half a head away: from the same cache lines, and without an exchange.
    """
    HALF: tl.constexpr = DIM // 2
    feature = FIRST + tl.arange(0, COUNT)[None, :]
    first_half = feature < HALF
    mask = there[:, None] & (feature < DIM)
    own = tl.load(base_ptr + feature, mask=mask, other=0.0)
    partner = tl.load(base_ptr + tl.where(first_half, feature + HALF, feature - HALF), mask=mask, other=0.0)
    table_ptr += tl.where(first_half, feature, feature - HALF)
    cos = tl.load(table_ptr, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(table_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    rotated = own.to(tl.float32) * cos + partner.to(tl.float32) * tl.where(first_half, -sin, sin)
    return rotated.to(own.dtype)


@triton.jit
def _short_attention_kernel(
    qkv_ptr: tl.tensor,
    table_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: int,
    scale: float,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin_after(OVERLAP)
    # Heads of the same rows are adjacent in the grid: together they read whole rows and one table.
    tile_ptr = tiles_ptr + 4 * tl.program_id(1)
    first, start, end = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS)
    key = start + tl.arange(0, KEYS)
    inside, there = row < end, key < end
    long_row, long_key = row.to(tl.int64)[:, None], key.to(tl.int64)[:, None]
    feature = tl.program_id(0) * DIM
    q_ptr = qkv_ptr + long_row * row_stride + feature
    k_ptr = qkv_ptr + long_key * row_stride + HEADS * DIM + feature
    v_ptr = k_ptr + HEADS * DIM
    q_table_ptr = table_ptr + long_row * DIM
    k_table_ptr = table_ptr + long_key * DIM
    out_ptr += long_row * (HEADS * DIM) + feature

    head = tl.arange(0, HEAD)[None, :]
    v_head = tl.load(v_ptr + head, mask=there[:, None], other=0.0)
    q = _rotated(q_ptr, q_table_ptr, inside, 0, HEAD, DIM)
    k = _rotated(k_ptr, k_table_ptr, there, 0, HEAD, DIM)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if TAIL:
        tail = HEAD + tl.arange(0, TAIL)[None, :]
        v_tail = tl.load(v_ptr + tail, mask=there[:, None] & (tail < DIM), other=0.0)
        q = _rotated(q_ptr, q_table_ptr, inside, HEAD, TAIL, DIM)
        k = _rotated(k_ptr, k_table_ptr, there, HEAD, TAIL, DIM)
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
    scores = tl.where(there[None, :], scores * scale, MASKED)
    weights = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
    share = (1.0 / tl.sum(weights, axis=1))[:, None]
    weights = weights.to(v_head.dtype)
    tl.store(out_ptr + head, tl.dot(weights, v_head, input_precision="ieee") * share, mask=inside[:, None])
    if TAIL:
        out = tl.dot(weights, v_tail, input_precision="ieee") * share
        tl.store(out_ptr + tail, out, mask=inside[:, None] & (tail < DIM))


def attend_with_rope(qkv: Tensor, table: Tensor, tiles: Tensor, heads: int, tile_rows: int) -> Tensor:
    """Full attention within each segment of at most `LONGEST` rows, scaled by 1/√head_dim.

    `qkv`: `[rows, 3 * heads * head_dim]`, q, k, v before rotation, each row contiguous; it is not changed. `table`:
    from `rope_table`; `tiles`: from `segment_tiles` with `tile_rows`. Returns `[rows, heads * head_dim]`; rows outside
    all segments are not written. Longer segments are truncated: the caller checks the bound.
    """
    rows, width = qkv.shape[0], qkv.shape[1] // 3
    dim = width // heads
    head, tail = parts(dim, smallest_tail=16)
    out = qkv.new_empty(rows, width)
    _short_attention_kernel[(heads, tiles.shape[0])](
        qkv,
        table,
        tiles,
        out,
        qkv.stride(0),
        dim**-0.5 * LOG2_E,
        HEADS=heads,
        DIM=dim,
        HEAD=head,
        TAIL=tail,
        ROWS=tile_rows,
        KEYS=LONGEST,
        **overlapping(out),
        num_warps=4,
        **OPTIONS,
    )
    return out
