"""Packed q, k, v of a layer, their rotary positions and attention.

q and k are rotated by a GEMM, by attention, or by a kernel between them. The choice is made when weights are loaded,
since a GEMM that rotates needs its weights in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.fused.affine import Affine
from encoder.fused.gemm import Gemm, Layer, Rows
from encoder.fused.rope_attention import (
    AttentionPlan,
    SegmentTiles,
    attend_rotated,
    rotary_attention,
    table_dtype,
    tile_segments,
)
from encoder.fused.rope_in_gemm import Rotation, adjacent_pairs, pair_frequencies, rotation
from encoder.kernels.rope import rope_table
from encoder.metadata.segments import Segments


@dataclass(frozen=True)
class QkvLayer:
    """The layer that computes q, k, v, and whether its GEMM rotates q and k."""

    affine: Affine
    rotated: bool


@dataclass(frozen=True)
class Angles:
    """Rotary angles of a batch, in each form that the layers need."""

    table: Tensor | None
    rotation: Rotation | None


class RotaryAttention:
    """Rotary positions and attention of all layers of a tower."""

    def __init__(self, gemm: Gemm, plan: AttentionPlan, frequencies: Tensor, heads: int) -> None:
        """`frequencies`: float32 `[head_dim / 4]`."""
        self._gemm, self._plan, self._heads = gemm, plan, heads
        self._frequencies = frequencies
        self._pair_frequencies = pair_frequencies(frequencies, heads)
        self._forms: set[bool] = set()

    def load(self, qkv: Affine, block: int, longest: int | None = None) -> QkvLayer:
        """Loads a layer of block `block` whose segments have at most `longest` patches (None: no bound).

        Rotation by attention, as it reads q and k, is preferred: it costs less than an epilogue.
        """
        by_attention = longest is not None and self._plan.kernel(longest).rotates
        rotated = self._gemm.rotates and not by_attention
        self._forms.add(rotated)
        layer = adjacent_pairs(qkv, self._heads) if rotated else qkv
        return QkvLayer(self._gemm.load(layer, Layer.QKV, block), rotated)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Returns a batch's angles, once per forward and after all `load` calls. `positions`: int32 `[num_patches, 2]`;
        `dtype`: the heads' dtype."""
        return Angles(
            rope_table(positions, self._frequencies, table_dtype(dtype)) if False in self._forms else None,
            rotation(positions, self._pair_frequencies) if True in self._forms else None,
        )

    def tile(self, segments: Segments, qkv: QkvLayer, rows: int, dtype: torch.dtype) -> SegmentTiles:
        """Returns the segments' tiles for all layers with the rotation of `qkv`, once per forward."""
        return tile_segments(segments, rows, dtype, self._plan, rotated=qkv.rotated)

    def __call__(self, qkv: QkvLayer, normed: Rows, angles: Angles, tiled: SegmentTiles) -> Tensor:
        """`[rows, in]` to attention outputs `[rows, width]`. Rows outside all segments are undefined."""
        if qkv.rotated:
            assert angles.rotation is not None
            return attend_rotated(self._gemm.rotated(qkv.affine, normed, angles.rotation), tiled, self._heads)
        assert angles.table is not None
        return rotary_attention(self._gemm(qkv.affine, normed), angles.table, tiled, self._heads)
