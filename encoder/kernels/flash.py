"""Shared by the attention kernels: tiles and the online softmax."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634

# Score of a masked key. Running maxima start at a finite value instead, since the difference of two infinities is NaN.
MASKED = tl.constexpr(float("-inf"))
BOTTOM = tl.constexpr(-1.0e30)


@dataclass(frozen=True)
class Tile:
    """Rows and keys of a block, its warps, and its pipeline stages: the number of key blocks in flight.

    In 16 bits on Hopper at least two stages are needed: with one, Triton 3.6 overwrites what tensor cores still read.
    """

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def softmax_step(
    scores: tl.tensor, scale: float, top: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns the weights of a block of `scores`, the factor for earlier sums, and the new maxima and sums.

    `scale`, above 0, converts scores to exponents of 2; `top` is scaled.
    """
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    factor = tl.exp2(top - new_top)
    return weights, factor, new_top, total * factor + tl.sum(weights, axis=1)
