"""Rotary positions and attention of a fused tower: from the packed product to the attended rows.

Which kernel runs depends on the bound on a segment's length alone, which a graph bakes in; how rows are cut is read on
the device. It must not know layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.attention import AttentionBackend, Segments
from encoder.attention_backends import load
from encoder.kernels.attention import attend
from encoder.kernels.rope import rope_
from encoder.kernels.segments import segment_tiles
from encoder.kernels.short_attention import LONGEST, attend_turning
from encoder.kernels.tiles import attention_tile, short_rows


@dataclass(frozen=True)
class Way:
    """A backend, and whether it turns q and k itself (ours can, for segments of up to `LONGEST` patches)."""

    backend: AttentionBackend
    turns: bool = False

    def __post_init__(self) -> None:
        if self.turns and self.backend is not AttentionBackend.TRITON:
            raise ValueError(f"attention backend {self.backend.value!r} does not turn q and k itself")

    def __str__(self) -> str:
        return f"{self.backend.value}+rope" if self.turns else self.backend.value


@dataclass(frozen=True)
class AttentionPlan:
    """A way for each class of lengths: `ways[i]` for segments of up to `lengths[i]` patches, the last for longer."""

    lengths: tuple[int, ...]
    ways: tuple[Way, ...]

    def __post_init__(self) -> None:
        if not self.ways or len(self.lengths) not in (len(self.ways), len(self.ways) - 1):
            raise ValueError("a plan needs a way for every class of lengths, and at most one more")

    @classmethod
    def single(cls, way: Way) -> AttentionPlan:
        """One way for all lengths."""
        return cls((), (way,))

    def way(self, max_seqlen: int) -> Way:
        """The way for segments of at most `max_seqlen` patches."""
        for length, way in zip(self.lengths, self.ways, strict=False):
            if max_seqlen <= length:
                return way
        return self.ways[-1]

    def __str__(self) -> str:
        names = [f"≤{length}: {way}" for length, way in zip(self.lengths, self.ways, strict=False)]
        rest = f"longer: {self.ways[-1]}"
        return ", ".join([*names, rest])


@dataclass(frozen=True)
class CutRows:
    """One way of cutting the rows of a batch, ready for every layer that attends along it."""

    segments: Segments
    way: Way
    tiles: Tensor | None = None
    """Of `segment_tiles`: for our kernels alone."""


def cut_rows(
    segments: Segments, rows: int, dtype: torch.dtype, plan: AttentionPlan, *, turned: bool = False
) -> CutRows:
    """Once a forward, not once a layer. `turned`: q and k come with their rotary positions turned."""
    way = plan.way(segments.max_seqlen)
    if turned:
        way = Way(way.backend)
    if way.backend is not AttentionBackend.TRITON:
        return CutRows(segments, way)
    if way.turns and segments.max_seqlen > LONGEST:
        way = Way(way.backend)
    tile_rows = short_rows(dtype) if way.turns else attention_tile(rows, dtype).rows
    return CutRows(segments, way, segment_tiles(segments.cu_seqlens, rows, tile_rows))


def rotary_attention(qkv: Tensor, table: Tensor, cut: CutRows, heads: int) -> Tensor:
    """`[rows, 3 * width]`, q, k, v before their rotary positions, to attended rows `[rows, width]`.

    `table`: of `rope_table`. May turn q and k in `qkv` itself. Rows of no segment come out as anything.
    """
    if cut.way.turns:
        assert cut.tiles is not None
        return attend_turning(qkv, table, cut.tiles, heads, short_rows(qkv.dtype))
    rope_(qkv, table, heads)
    return turned_attention(qkv, cut, heads)


def turned_attention(qkv: Tensor, cut: CutRows, heads: int) -> Tensor:
    """`[rows, 3 * width]`, q and k with their rotary positions turned, to attended rows `[rows, width]`."""
    rows, width = qkv.shape[0], qkv.shape[1] // 3
    q, k, v = qkv.view(rows, 3, heads, width // heads).unbind(1)
    if cut.tiles is not None:
        out = attend(q, k, v, cut.tiles, attention_tile(rows, qkv.dtype))
    else:
        out = load(cut.way.backend)(q, k, v, cut.segments.cu_seqlens, cut.segments.max_seqlen)
    return out.view(rows, width)


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of cosines and sines beside heads of `dtype`."""
    return torch.float32 if dtype == torch.float32 else torch.float16
