"""A layer's packed q, k, v, their rotary positions and attention: turned by the product, by attention, or in between.

Which it is is settled when weights are loaded, since the product that turns wants them in another order. It must not
know norms or what follows attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.attention import Segments
from encoder.fused_attention import AttentionPlan, CutRows, cut_rows, rotary_attention, table_dtype, turned_attention
from encoder.kernels.rope import rope_table
from encoder.products import Affine, Part, Rows, TorchProducts
from encoder.rotation import Rotation, adjacent_pairs, pair_frequencies, rotation


@dataclass(frozen=True)
class RotaryProduct:
    """The product that makes q, k, v of a layer, and whether it turns q and k itself."""

    affine: Affine
    turned: bool


@dataclass(frozen=True)
class Angles:
    """Of a batch, in each of the forms that the layers ask for."""

    table: Tensor | None
    rotation: Rotation | None


class RotaryAttention:
    """Of all layers of a tower."""

    def __init__(self, products: TorchProducts, plan: AttentionPlan, frequencies: Tensor, heads: int) -> None:
        """`frequencies`: float32 `[head_dim / 4]`."""
        self._products, self._plan, self._heads = products, plan, heads
        self._frequencies = frequencies
        self._pair_frequencies = pair_frequencies(frequencies, heads)
        self._forms: set[bool] = set()

    def product(self, qkv: Affine, block: int, longest: int | None = None) -> RotaryProduct:
        """For a layer of block `block` with segments of at most `longest` patches, None if they may be any.

        Attention that turns as it reads is left to it: that costs less than an epilogue.
        """
        by_attention = longest is not None and self._plan.way(longest).turns
        turned = self._products.turns and not by_attention
        self._forms.add(turned)
        layer = adjacent_pairs(qkv, self._heads) if turned else qkv
        return RotaryProduct(self._products.load(layer, Part.QKV, block), turned)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """`positions`: int32 `[num_patches, 2]`; `dtype`: of the heads. Once a forward, after all `product` calls."""
        return Angles(
            rope_table(positions, self._frequencies, table_dtype(dtype)) if False in self._forms else None,
            rotation(positions, self._pair_frequencies) if True in self._forms else None,
        )

    def cut(self, segments: Segments, qkv: RotaryProduct, rows: int, dtype: torch.dtype) -> CutRows:
        """Of the layers whose product is like `qkv`, once a forward."""
        return cut_rows(segments, rows, dtype, self._plan, turned=qkv.turned)

    def __call__(self, qkv: RotaryProduct, normed: Rows, angles: Angles, cut: CutRows) -> Tensor:
        """`[rows, in]` to attended rows `[rows, width]`. Rows of no segment come out as anything."""
        if qkv.turned:
            assert angles.rotation is not None
            return turned_attention(self._products.turned(qkv.affine, normed, angles.rotation), cut, self._heads)
        assert angles.table is not None
        return rotary_attention(self._products(qkv.affine, normed), angles.table, cut, self._heads)
