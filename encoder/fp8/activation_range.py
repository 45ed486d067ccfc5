"""Bounds the MLP's hidden features, to scale them to 8 bits without clipping.

A norm bounds the length of its output, and thereby each feature of the next layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from encoder.fused.affine import Affine

_LARGEST = 448.0
# Rounding of the rows: half a step of e4m3. Slack for the rows' smallest numbers, fast accumulation and float32.
_ROUNDED, _SLACK = 1 / 16, 1.01


def hidden_scales(first: Affine, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns powers of two, float32 `[out]`, that scale every output of `first`, and its GELU, into e4m3's range.

    `weight`, `bias`: those of the preceding LayerNorm, `[in]`. For every image, also with massive activations in a
    channel, the length of the LayerNorm's output before these two is at most the square root of its width.
    """
    assert first.scaled is not None
    weights = first.scaled.values.float() * first.scaled.scales
    shifted = weights * bias.float()
    spread = (weights * weight.float()).norm(dim=1) * weights.shape[1] ** 0.5
    rounded = _ROUNDED * (spread + shifted.abs().sum(1))
    bound = _SLACK * (spread + (shifted.sum(1) + first.bias.float()).abs() + rounded)
    # Features that are always 0 may have any factor.
    return torch.exp2(torch.floor(torch.log2(_LARGEST / bound.clamp(min=1e-6))))
