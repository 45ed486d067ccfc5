"""Rotary positions and attention of a fused tower: from packed q, k, v to attention outputs.

Only the bound on a segment's length selects the kernel, which a graph captures; segment borders are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from encoder.kernels.attention import attend
from encoder.kernels.flash import Tile
from encoder.kernels.rope import rope_
from encoder.kernels.segments import segment_tiles
from encoder.kernels.short_attention import LONGEST, attend_with_rope
from encoder.kernels.tiles import attention_tile, short_rows
from encoder.metadata.segments import AttentionBackend, Segments
from encoder.towers.backends import load

FEW_ROWS = range(257, 1025)
"""Batches for which `AttentionPlan.few_rows` is used. For smaller ones, the fastest kernel differs between a chain of
equal kernels, as measured, and a tower."""


@dataclass(frozen=True)
class AttentionKernel:
    """A backend, and whether it rotates q and k itself (Triton's can, for segments of up to `LONGEST` patches)."""

    backend: AttentionBackend
    rotates: bool = False
    tile: Tile | None = None
    """Tile of Triton's kernel that does not rotate; None is `attention_tile` of the batch."""

    def __post_init__(self) -> None:
        if self.rotates and self.backend is not AttentionBackend.TRITON:
            raise ValueError(f"attention backend {self.backend.value!r} does not rotate q and k itself")

    def __str__(self) -> str:
        name = f"{self.backend.value}+rope" if self.rotates else self.backend.value
        return name if self.tile is None else f"{name} {self.tile.rows}×{self.tile.keys}"


@dataclass(frozen=True)
class AttentionPlan:
    """A kernel per length class: `kernels[i]` for segments of up to `lengths[i]` patches, the last for longer ones.

    AttentionPlan((64,), (AttentionKernel(TRITON, rotates=True), AttentionKernel(FA4)))
    """

    lengths: tuple[int, ...]
    kernels: tuple[AttentionKernel, ...]
    few_rows: AttentionKernel | None = None
    """Kernel for batches of `FEW_ROWS` whose segments may be longer than `LONGEST`: its latency matters there, not its
    throughput. None: as for more rows."""

    def __post_init__(self) -> None:
        if not self.kernels or len(self.lengths) not in (len(self.kernels), len(self.kernels) - 1):
            raise ValueError("a plan needs a kernel for every class of lengths, and at most one more")

    @classmethod
    def single(cls, kernel: AttentionKernel) -> AttentionPlan:
        """Returns a plan with one kernel for all lengths."""
        return cls((), (kernel,))

    def kernel(self, max_seqlen: int, rows: int | None = None) -> AttentionKernel:
        """Returns the kernel for segments of at most `max_seqlen` patches in a batch of `rows`, None for many."""
        if self.few_rows is not None and rows in FEW_ROWS and max_seqlen > LONGEST:
            return self.few_rows
        for length, kernel in zip(self.lengths, self.kernels, strict=False):
            if max_seqlen <= length:
                return kernel
        return self.kernels[-1]

    def __str__(self) -> str:
        names = [f"≤{length}: {kernel}" for length, kernel in zip(self.lengths, self.kernels, strict=False)]
        few = [] if self.few_rows is None else [f"up to {FEW_ROWS[-1]} rows: {self.few_rows}"]
        return ", ".join([*names, f"longer: {self.kernels[-1]}", *few])


@dataclass(frozen=True)
class SegmentTiles:
    """Segments of a batch and the attention kernel for them, shared by all layers that use both."""

    segments: Segments
    kernel: AttentionKernel
    tiles: Tensor | None = None
    """Result of `segment_tiles`, for Triton's kernels only."""


def tile_segments(
    segments: Segments, rows: int, dtype: torch.dtype, plan: AttentionPlan, *, rotated: bool = False
) -> SegmentTiles:
    """Returns a batch's segments and kernel, once per forward. `rotated`: the GEMM before attention rotates q and k."""
    kernel = plan.kernel(segments.max_seqlen, rows)
    if rotated or segments.max_seqlen > LONGEST:
        kernel = replace(kernel, rotates=False)
    if kernel.backend is not AttentionBackend.TRITON:
        return SegmentTiles(segments, kernel)
    if kernel.rotates:
        tile_rows = short_rows(dtype)
    else:
        tile = kernel.tile or attention_tile(rows, dtype)
        kernel, tile_rows = replace(kernel, tile=tile), tile.rows
    return SegmentTiles(segments, kernel, segment_tiles(segments.cu_seqlens, rows, tile_rows))


def rotary_attention(qkv: Tensor, table: Tensor, tiled: SegmentTiles, heads: int) -> Tensor:
    """Attention over `qkv` `[rows, 3 * width]`, q, k, v before rotation; returns `[rows, width]`.

    `table`: from `rope_table`. May rotate q and k in place in `qkv`. Rows outside all segments are undefined.
    """
    if tiled.kernel.rotates:
        assert tiled.tiles is not None
        return attend_with_rope(qkv, table, tiled.tiles, heads, short_rows(qkv.dtype))
    rope_(qkv, table, heads)
    return attend_rotated(qkv, tiled, heads)


def attend_rotated(qkv: Tensor, tiled: SegmentTiles, heads: int) -> Tensor:
    """Attention over `qkv` `[rows, 3 * width]`, q and k rotated already; returns `[rows, width]`."""
    rows, width = qkv.shape[0], qkv.shape[1] // 3
    q, k, v = qkv.view(rows, 3, heads, width // heads).unbind(1)
    if tiled.tiles is not None:
        assert tiled.kernel.tile is not None
        out = attend(q, k, v, tiled.tiles, tiled.kernel.tile)
    else:
        out = load(tiled.kernel.backend)(q, k, v, tiled.segments.cu_seqlens, tiled.segments.max_seqlen)
    return out.view(rows, width)


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of cosines and sines for heads of `dtype`."""
    return torch.float32 if dtype == torch.float32 else torch.float16
