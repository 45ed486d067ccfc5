"""Padding and pairing of weights for products are exact; products and what follows them on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton", reason="a product's activation may be a Triton kernel")

from encoder.fused.affine import Affine
from encoder.fused.gemm import CublasGemm, Epilogue, aligned_width


def layer(inputs: int, outputs: int, seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs).requires_grad_(False)


@pytest.mark.parametrize(
    ("width", "dtype", "expected"),
    [
        (3420, torch.bfloat16, 3456),
        (4304, torch.bfloat16, 4304),
        (3420, torch.float32, 3420),
        (90, torch.bfloat16, 128),
        (1, torch.bfloat16, 64),
        (64, torch.bfloat16, 64),
    ],
)
def test_widths_are_padded_only_where_rows_are_not_aligned(width: int, dtype: torch.dtype, expected: int) -> None:
    assert aligned_width(width, dtype) == expected


def test_a_padded_pair_of_layers_is_exact() -> None:
    """What the padding adds is 0 through a gate and through any activation that the next layer's zeros silence."""
    gate, up, down = layer(24, 90, 0), layer(24, 90, 1), layer(90, 16, 2)
    x = torch.randn(7, 24)
    wide = [Affine.of(part).padded(outputs=128) for part in (gate, up)]
    hidden = F.silu(F.linear(x, wide[0].weight, wide[0].bias)) * F.linear(x, wide[1].weight, wide[1].bias)
    assert not hidden[:, 90:].any()
    narrow = Affine.of(down).padded(inputs=128)
    assert torch.equal(narrow.weight[:, :90], down.weight)
    assert not narrow.weight[:, 90:].any()
    assert torch.equal(F.linear(hidden, narrow.weight, narrow.bias), down_of(hidden, narrow))


def down_of(hidden: Tensor, narrow: Affine) -> Tensor:
    """The same sum with the padding poisoned to a finite value: zeros must silence it."""
    poisoned = hidden.clone()
    poisoned[:, 90:] = 3.0
    return F.linear(poisoned, narrow.weight, narrow.bias)


def test_pairs_take_features_in_turn() -> None:
    gate, up = Affine.of(layer(8, 6, 0)), Affine.of(layer(8, 6, 1))
    paired, x = Affine.paired(gate, up), torch.randn(5, 8)
    product = CublasGemm()(paired, x)
    assert torch.allclose(product[:, 0::2], F.linear(x, gate.weight, gate.bias), atol=1e-6)
    assert torch.allclose(product[:, 1::2], F.linear(x, up.weight, up.bias), atol=1e-6)


def test_weights_that_need_no_padding_are_shared() -> None:
    module = layer(8, 6, 0)
    affine = Affine.of(module)
    assert affine.weight.data_ptr() == module.weight.data_ptr()
    assert affine.padded(inputs=8, outputs=6).weight is affine.weight
    assert not Affine.of(nn.Linear(8, 6, bias=False)).bias.any()


@pytest.mark.parametrize(
    ("after", "function"),
    [
        (Epilogue.NONE, lambda y: y),
        (Epilogue.GELU_TANH, lambda y: F.gelu(y, approximate="tanh")),
        (Epilogue.GELU, F.gelu),
        (Epilogue.SILU, F.silu),
    ],
)
def test_what_follows_a_product(after: Epilogue, function: object) -> None:
    assert callable(function)
    affine, x = Affine.of(layer(12, 20, 3)), torch.randn(9, 12)
    assert torch.equal(CublasGemm()(affine, x, after), function(F.linear(x, affine.weight, affine.bias)))


def test_a_residual_is_added_in_place_without_the_bias() -> None:
    affine, x, residual = Affine.of(layer(12, 20, 3)), torch.randn(9, 12), torch.randn(9, 20)
    expected = residual + x @ affine.weight.t()
    CublasGemm().accumulate(affine, x, residual)
    assert torch.allclose(residual, expected, atol=1e-6)
