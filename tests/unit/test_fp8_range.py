"""What is seen between the MLP's layers, and the factor that takes it to 8 bits."""

from __future__ import annotations

import math

import pytest
import torch

from encoder.fp8_range import WatchedProducts, between_factor
from encoder.products import Affine, After, Part, TorchProducts


def layer(inputs: int, outputs: int, seed: int) -> Affine:
    generator = torch.Generator().manual_seed(seed)
    return Affine(torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator))


def test_watched_products_give_what_they_watch_and_the_largest_of_each_block() -> None:
    plain, watched = TorchProducts(), WatchedProducts(TorchProducts())
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    expected = []
    for block in range(2):
        first, second = layer(8, 16, block), layer(16, 8, block + 5)
        ours, theirs = torch.zeros(6, 8), torch.zeros(6, 8)
        loaded = watched.load(first, Part.UP, block), watched.load(second, Part.DOWN, block)
        assert watched.add_both_later(*loaded, x, After.GELU_TANH, ours) is None
        assert plain.add_both_later(first, second, x, After.GELU_TANH, theirs) is None
        assert torch.equal(ours, theirs)
        expected.append(float(plain(first, x, After.GELU_TANH).abs().max()))
    assert watched.largest() == tuple(expected)
    assert watched.inner_width(3420, torch.bfloat16) == plain.inner_width(3420, torch.bfloat16)


@pytest.mark.parametrize("largest", [1e-6, 0.03, 1.0, 7.0, 55.9, 56.1, 1e4])
def test_eight_times_the_largest_fits_and_a_sixteenth_of_the_range_is_used(largest: float) -> None:
    factor = between_factor(largest)
    assert math.log2(factor).is_integer()
    assert 448 / 2 < 8 * largest * factor <= 448


@pytest.mark.parametrize("largest", [0.0, math.inf, math.nan])
def test_where_nothing_was_seen_the_factor_is_one(largest: float) -> None:
    assert between_factor(largest) == 1.0
