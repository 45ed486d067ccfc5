"""Rotary positions turned by the product that makes q and k: what such a product needs of the weights and of a batch.

The two features that turn together, half a head apart, are put side by side, where an epilogue holds both. Attention
does not see the difference: q and k are put in the same new order. It must not know layers or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.products import Affine


@dataclass(frozen=True)
class Rotation:
    """Of a batch."""

    positions: Tensor
    """float32 `[2, rows]`: each patch's row, then each patch's column."""
    frequencies: Tensor
    """Of `pair_frequencies`."""


def adjacent_pairs(qkv: Affine, heads: int) -> Affine:
    """The packed product `[3 * heads * head_dim, in]` with the features of q and k that turn together side by side."""

    def reorder(tensor: Tensor) -> Tensor:
        rest = tensor.shape[1:]
        q_k, v = tensor.view(3, -1, *rest).split((2, 1))
        # Each head: first halves of all pairs, then second halves, to pairs.
        pairs = q_k.reshape(2, heads, 2, -1, *rest).transpose(2, 3)
        return torch.cat((pairs.reshape(2, -1, *rest), v)).flatten(0, 1)

    return Affine(reorder(qkv.weight), reorder(qkv.bias))


def pair_frequencies(frequencies: Tensor, heads: int) -> Tensor:
    """`[head_dim / 4]` to float32 `[1, 3 * heads * head_dim]`: for each pair of features, what its angle grows by.

    The first of the two grows with the row, the second with the column; one of them is 0, and for v both are, which
    turns nothing.
    """
    count = frequencies.shape[0]
    head = frequencies.new_zeros(2 * count, 2, dtype=torch.float32)
    head[:count, 0] = frequencies
    head[count:, 1] = frequencies
    turned = head.flatten().repeat(2 * heads)
    return torch.cat((turned, turned.new_zeros(turned.shape[0] // 2)))[None]


def rotation(rope_positions: Tensor, frequencies: Tensor) -> Rotation:
    """`rope_positions`: int32 `[rows, 2]`; `frequencies`: of `pair_frequencies`."""
    rows = rope_positions.shape[0]
    # Each of the two begins on 16 bytes.
    positions = torch.empty(2, -(-rows // 4) * 4, device=rope_positions.device)[:, :rows]
    return Rotation(positions.copy_(rope_positions.t()), frequencies)
