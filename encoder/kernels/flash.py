"""What the attention kernels share: the blocks they work in, and the online softmax."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634

# The score of a key that a row must not see. The maxima start at a finite bottom instead, so that a mask never meets
# another: the difference of two infinities is not a number.
MASKED = tl.constexpr(float("-inf"))
BOTTOM = tl.constexpr(-1.0e30)


@dataclass(frozen=True)
class Tile:
    """Rows and keys of a block, its warps, and how many blocks of keys are on their way.

    In 16 bits on Hopper at least two must be: Triton 3.6 lets single ones overwrite what the tensor cores still read.
    """

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def softmax_step(
    scores: tl.tensor, scale: float, top: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Weights of a block of `scores`, the factor for what was summed before, and the new maxima and sums.

    `scale`, above 0, takes the scores to powers of two; `top` is scaled.
    """
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    factor = tl.exp2(top - new_top)
    return weights, factor, new_top, total * factor + tl.sum(weights, axis=1)
