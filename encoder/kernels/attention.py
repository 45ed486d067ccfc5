"""Attention within packed segments of any length, on q and k that are rotated already.

A block reads rows of its own segment only, so other images and padding cannot affect it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from encoder.kernels.flash import BOTTOM, LOG2_E, MASKED, Tile, softmax_step
from encoder.kernels.launch import OPTIONS, parts
from encoder.kernels.overlap import begin_after, overlapping


@triton.jit
def _attend(
    key: tl.tensor,
    q_head: tl.tensor,
    q_tail: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_stride: int,
    v_stride: int,
    end: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc_head: tl.tensor,
    acc_tail: tl.tensor,
    scale: float,
    DIM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    head = tl.arange(0, HEAD)[None, :]
    long_key = key.to(tl.int64)[:, None]
    k_ptr += long_key * k_stride
    v_ptr += long_key * v_stride
    if WHOLE:
        k = tl.load(k_ptr + head)
    else:
        there = (key < end)[:, None]
        k = tl.load(k_ptr + head, mask=there, other=0.0)
    scores = tl.dot(q_head, tl.trans(k), input_precision="ieee")
    if TAIL:
        tail = HEAD + tl.arange(0, TAIL)[None, :]
        covered = tail < DIM
        if not WHOLE:
            covered = covered & there
        k = tl.load(k_ptr + tail, mask=covered, other=0.0)
        scores = tl.dot(q_tail, tl.trans(k), scores, input_precision="ieee")
    if not WHOLE:
        scores = tl.where((key < end)[None, :], scores, MASKED)
    weights, factor, top, total = softmax_step(scores, scale, top, total)
    v = tl.load(v_ptr + head) if WHOLE else tl.load(v_ptr + head, mask=there, other=0.0)
    weights = weights.to(v.dtype)
    acc_head = tl.dot(weights, v, acc_head * factor[:, None], input_precision="ieee")
    if TAIL:
        v = tl.load(v_ptr + tail, mask=covered, other=0.0)
        acc_tail = tl.dot(weights, v, acc_tail * factor[:, None], input_precision="ieee")
    return top, total, acc_head, acc_tail


@triton.jit
def _attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    q_stride: int,
    k_stride: int,
    v_stride: int,
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
    tile_ptr = tiles_ptr + 4 * tl.program_id(0)
    first, start, end = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS)
    inside = (row < end)[:, None]
    first_feature = tl.program_id(1) * DIM
    k_ptr += first_feature
    v_ptr += first_feature

    head = tl.arange(0, HEAD)[None, :]
    q_ptr += row.to(tl.int64)[:, None] * q_stride + first_feature
    q_head = tl.load(q_ptr + head, mask=inside, other=0.0)
    q_tail = q_head
    acc_head = tl.zeros([ROWS, HEAD], tl.float32)
    acc_tail = acc_head
    if TAIL:
        tail = HEAD + tl.arange(0, TAIL)[None, :]
        q_tail = tl.load(q_ptr + tail, mask=inside & (tail < DIM), other=0.0)
        acc_tail = tl.zeros([ROWS, TAIL], tl.float32)
    top = tl.full([ROWS], BOTTOM, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    keys = tl.arange(0, KEYS)
    whole = start + (end - start) // KEYS * KEYS
    for key in tl.range(start, whole, KEYS):
        top, total, acc_head, acc_tail = _attend(
            key + keys, q_head, q_tail, k_ptr, v_ptr, k_stride, v_stride, end, top, total, acc_head, acc_tail,
            scale, DIM, HEAD, TAIL, True,
        )  # fmt: skip
    for key in tl.range(whole, end, KEYS):
        top, total, acc_head, acc_tail = _attend(
            key + keys, q_head, q_tail, k_ptr, v_ptr, k_stride, v_stride, end, top, total, acc_head, acc_tail,
            scale, DIM, HEAD, TAIL, False,
        )  # fmt: skip

    out_ptr += row.to(tl.int64)[:, None] * (HEADS * DIM) + first_feature
    share = 1.0 / total[:, None]
    tl.store(out_ptr + head, acc_head * share, mask=inside)
    if TAIL:
        tl.store(out_ptr + tail, acc_tail * share, mask=inside & (tail < DIM))


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tile: Tile) -> Tensor:
    """Full attention within each segment, scaled by 1/√head_dim.

    `q`, `k`, `v`: `[rows, heads, head_dim]`, the heads of a row contiguous; `tiles`: from `segment_tiles` with
    `tile.rows`. Returns the same shape, contiguous; rows outside all segments are not written.
    """
    rows, heads, dim = q.shape
    head, tail = parts(dim, smallest_tail=16)
    out = q.new_empty(rows, heads, dim)
    _attention_kernel[(tiles.shape[0], heads)](
        q,
        k,
        v,
        tiles,
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        dim**-0.5 * LOG2_E,
        HEADS=heads,
        DIM=dim,
        HEAD=head,
        TAIL=tail,
        ROWS=tile.rows,
        KEYS=tile.keys,
        **overlapping(out),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OPTIONS,
    )
    return out
