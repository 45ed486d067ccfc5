"""The factors that take what is between the MLP's layers to 8 bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.fp8.activation_range import hidden_scales
from encoder.fused.affine import Affine, ScaledRows

WIDTH, OUT = 64, 96


def in_8_bits(rows: Tensor) -> ScaledRows:
    scales = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / 448
    return ScaledRows((rows / scales).to(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("massive", [1.0, 100.0, 1e4])
def test_no_image_is_clipped_between_the_layers(massive: float) -> None:
    """One factor a block came from seven images with a headroom of 8: what was larger was clipped, uncounted.

    The worst rows are those along a feature's weights, and those of one massive channel."""
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(WIDTH, generator=random), torch.randn(WIDTH, generator=random)
    weight[3], bias[5] = massive, massive
    first = Affine(torch.randn(OUT, WIDTH, generator=random), torch.randn(OUT, generator=random))
    first.weight[7] *= massive
    first = Affine(first.weight, first.bias, in_8_bits(first.weight))
    assert first.scaled is not None
    factors = hidden_scales(first, weight, bias)
    assert torch.equal(torch.frexp(factors).mantissa, torch.full((OUT,), 0.5))
    along = torch.cat((first.weight * weight, -first.weight * weight, massive * 1e3 * torch.eye(WIDTH)))
    streams = torch.cat((along, torch.randn(500, WIDTH, generator=random)))
    rows = in_8_bits(F.layer_norm(streams, (WIDTH,), weight, bias, 1e-6))
    products = (rows.values.double() * rows.scales) @ (first.scaled.values.double() * first.scaled.scales).t()
    between = (products + first.bias) * factors
    assert between.abs().max() <= 448
    # The range is not given away: some row comes within a factor of four of it in every feature.
    assert between.abs().amax(0).min() > 448 / 4


def test_features_that_are_always_zero_have_a_finite_factor() -> None:
    first = Affine(torch.zeros(2, WIDTH), torch.zeros(2), in_8_bits(torch.zeros(2, WIDTH)))
    assert hidden_scales(first, torch.ones(WIDTH), torch.zeros(WIDTH)).isfinite().all()
