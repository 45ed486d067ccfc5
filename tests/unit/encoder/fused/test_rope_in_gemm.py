"""Pairs side by side, rotated as an epilogue rotates them, against heads cut in halves."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from encoder.fused.affine import Affine
from encoder.fused.rope_in_gemm import adjacent_pairs, pair_frequencies, rotation

HEADS, HEAD_DIM, ROWS = 2, 8, 5
WIDTH = HEADS * HEAD_DIM


def test_scores_and_values_are_those_of_heads_cut_in_halves() -> None:
    random = torch.Generator().manual_seed(0)
    affine = Affine(torch.randn(3 * WIDTH, 12, generator=random), torch.randn(3 * WIDTH, generator=random))
    x = torch.randn(ROWS, 12, generator=random)
    positions = torch.randint(0, 30, (ROWS, 2), generator=random, dtype=torch.int32)
    frequencies = torch.tensor([1.0, 0.1])

    q, k, v = F.linear(x, affine.weight, affine.bias).view(ROWS, 3, HEADS, HEAD_DIM).unbind(1)
    angles = (positions[:, :, None] * frequencies).flatten(1)[:, None]

    def halves(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, -1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )

    expected = torch.einsum("qhd,khd->hqk", halves(q), halves(k))

    paired = adjacent_pairs(affine, HEADS)
    turning = rotation(positions, pair_frequencies(frequencies, HEADS))
    assert turning.positions.shape == (2, ROWS)
    assert turning.positions.stride() == (8, 1)  # rows on 16 bytes
    by_row, by_column = turning.frequencies.view(-1, 2).unbind(1)
    angle = turning.positions[0, :, None] * by_row + turning.positions[1, :, None] * by_column
    first, second = F.linear(x, paired.weight, paired.bias).view(ROWS, -1, 2).unbind(-1)
    packed = torch.stack(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
    ).view(ROWS, 3, HEADS, HEAD_DIM)
    found = torch.einsum("qhd,khd->hqk", packed[:, 0], packed[:, 1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(packed[:, 2], v)
