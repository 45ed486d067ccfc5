"""Rotary positions in the epilogue of the GEMM that computes q and k: the order of its weights, and a batch's angles.

The two features of a rotated pair, half a head apart, are made adjacent, so that one epilogue call has both. Attention
is unaffected: q and k have the same new order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.fused.affine import Affine


@dataclass(frozen=True)
class Rotation:
    """Arguments of the rotation for one batch."""

    positions: Tensor
    """float32 `[2, rows]`: each patch's row, then each patch's column."""
    frequencies: Tensor
    """Result of `pair_frequencies`."""


def adjacent_pairs(qkv: Affine, heads: int) -> Affine:
    """Reorders the packed qkv layer `[3 * heads * head_dim, in]`: features of a rotated pair become adjacent."""

    def reorder(tensor: Tensor) -> Tensor:
        rest = tensor.shape[1:]
        q_k, v = tensor.view(3, -1, *rest).split((2, 1))
        # Per head: from the first features of all pairs followed by the second ones, to adjacent pairs.
        pairs = q_k.reshape(2, heads, 2, -1, *rest).transpose(2, 3)
        return torch.cat((pairs.reshape(2, -1, *rest), v)).flatten(0, 1)

    return Affine(reorder(qkv.weight), reorder(qkv.bias))


def pair_frequencies(frequencies: Tensor, heads: int) -> Tensor:
    """`[head_dim / 4]` to float32 `[1, 3 * heads * head_dim]`: the two frequencies of each pair of features.

    The first multiplies the patch's row, the second its column; one of them is 0, and both for v, which is not rotated.
    """
    count = frequencies.shape[0]
    head = frequencies.new_zeros(2 * count, 2, dtype=torch.float32)
    head[:count, 0] = frequencies
    head[count:, 1] = frequencies
    rotated = head.flatten().repeat(2 * heads)
    return torch.cat((rotated, rotated.new_zeros(rotated.shape[0] // 2)))[None]


def rotation(rope_positions: Tensor, frequencies: Tensor) -> Rotation:
    """Returns a batch's rotation. `rope_positions`: int32 `[rows, 2]`; `frequencies`: from `pair_frequencies`."""
    rows = rope_positions.shape[0]
    # Both rows begin on 16 bytes.
    positions = torch.empty(2, -(-rows // 4) * 4, device=rope_positions.device)[:, :rows]
    return Rotation(positions.copy_(rope_positions.t()), frequencies)
