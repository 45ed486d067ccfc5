"""This project's Triton kernel over blocks of rows: any segments, float32 too, on compute capability 8.0 and up."""

from __future__ import annotations

from torch import Tensor

from encoder.kernels.attention import attend as attend_rows
from encoder.kernels.segments import segment_tiles
from encoder.kernels.tiles import attention_tile


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """See `VarlenAttention`. Rows outside all segments are not written."""
    tile = attention_tile(q.shape[0], q.dtype)
    return attend_rows(q, k, v, segment_tiles(cu_seqlens, q.shape[0], tile.rows), tile)
