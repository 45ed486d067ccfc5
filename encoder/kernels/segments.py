"""Computes on the device, from the borders of packed segments, the tiles of rows that attention kernels process.

The number of tiles depends only on the numbers of rows and segments: one graph serves every layout, and tiles that a
layout does not need are empty.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from encoder.kernels.launch import OPTIONS


@triton.jit
def _tiles_kernel(
    borders_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    tiles: int,
    segments: int,
    STEPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Segment s owns the tiles from borders[s] // TILE_ROWS + s on, which are enough for its rows wherever it begins.
    # Bisection finds the last segment whose tiles begin at or before this tile.
    low = tl.zeros([BLOCK], tl.int32)
    high = low + segments
    for _ in tl.static_range(STEPS):
        open_ = low < high
        middle = (low + high) // 2
        first_tile = tl.load(borders_ptr + middle, mask=open_, other=0) // TILE_ROWS + middle
        low = tl.where(open_ & (first_tile <= tile), middle + 1, low)
        high = tl.where(open_ & (first_tile > tile), middle, high)
    segment = low - 1
    inside = tile < tiles
    start = tl.load(borders_ptr + segment, mask=inside, other=0)
    end = tl.load(borders_ptr + segment + 1, mask=inside, other=0)
    row = start + (tile - start // TILE_ROWS - segment) * TILE_ROWS
    tl.store(tiles_ptr + 4 * tile, row, mask=inside)
    tl.store(tiles_ptr + 4 * tile + 1, start, mask=inside)
    tl.store(tiles_ptr + 4 * tile + 2, end, mask=inside)


def segment_tiles(cu_seqlens: Tensor, rows: int, tile_rows: int) -> Tensor:
    """Returns tiles of up to `tile_rows` rows of one segment: int32 `[tiles, 4]`, first row, segment's start and end.

    The fourth number is unused. A tile whose first row is not before its segment's end is empty. Every row up to the
    last border is in exactly one tile. `cu_seqlens`: int32 `[segments + 1]`, ascending from 0, at most `rows`; repeated
    borders (padding) are empty segments.
    """
    segments = cu_seqlens.shape[0] - 1
    count = rows // tile_rows + segments
    tiles = torch.empty(count, 4, dtype=torch.int32, device=cu_seqlens.device)
    block = 128
    _tiles_kernel[(triton.cdiv(count, block),)](
        cu_seqlens,
        tiles,
        count,
        segments,
        STEPS=segments.bit_length(),
        TILE_ROWS=tile_rows,
        BLOCK=block,
        num_warps=4,
        **OPTIONS,
    )
    return tiles
