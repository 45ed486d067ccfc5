"""Products with what follows them: cuBLAS's and QuACK's against plain PyTorch in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="SwiGLU beside a product is a Triton kernel")

from encoder.fused.affine import Affine  # noqa: E402
from encoder.fused.gemm import CublasGemm, Epilogue, Gemm  # noqa: E402
from encoder.fused.rope_in_gemm import adjacent_pairs, pair_frequencies, rotation  # noqa: E402
from tests.gpu.test_kernels import random  # noqa: E402
from tests.parity.reference_towers import relative_error  # noqa: E402

CUDA = torch.device("cuda")
# One rounding to bfloat16, two where the activation is a pass of its own.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
AFTER = {
    Epilogue.NONE: lambda y: y,
    Epilogue.GELU_TANH: lambda y: F.gelu(y, approximate="tanh"),
    Epilogue.GELU: F.gelu,
    Epilogue.SILU: F.silu,
    Epilogue.SWIGLU: lambda y: F.silu(y[:, 0::2]) * y[:, 1::2],
}


def layer(inputs: int, outputs: int, dtype: torch.dtype) -> Affine:
    return Affine(random(outputs, inputs, dtype=dtype, seed=1) * inputs**-0.5, random(outputs, dtype=dtype, seed=2))


def expected(of: Affine, x: Tensor) -> Tensor:
    return F.linear(x.double(), of.weight.double(), of.bias.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("after", Epilogue)
@pytest.mark.parametrize("rows", [3, 196, 1031])
def test_torch_products(rows: int, after: Epilogue, dtype: torch.dtype) -> None:
    affine, x = layer(144, 432, dtype), random(rows, 144, dtype=dtype)
    found = CublasGemm()(affine, x, after)
    assert relative_error(found, AFTER[after](expected(affine, x))) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_is_added_without_the_bias(dtype: torch.dtype) -> None:
    affine, x, residual = layer(160, 144, dtype), random(77, 160, dtype=dtype), random(77, 144, dtype=dtype, seed=3)
    sum_of_both = residual.double() + expected(affine, x) - affine.bias.double()
    CublasGemm().accumulate(affine, x, residual)
    assert relative_error(residual, sum_of_both) < TOLERANCE[dtype]


def test_an_output_may_be_a_slice_of_wider_rows() -> None:
    affine, x = layer(144, 48, torch.bfloat16), random(20, 144, dtype=torch.bfloat16)
    wide = random(20, 144, dtype=torch.bfloat16, seed=4)
    before = wide.clone()
    CublasGemm()(affine, x, out=wide[:, 48:96])
    assert relative_error(wide[:, 48:96], expected(affine, x)) < TOLERANCE[torch.bfloat16]
    assert torch.equal(wide[:, :48], before[:, :48])
    assert torch.equal(wide[:, 96:], before[:, 96:])


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> Gemm:
    """QuACK's products, which may not leave a product to cuBLAS."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("QuACK's products are for Hopper")
    pytest.importorskip("quack", reason="QuACK comes with FlashAttention-4: pip install 'vitray[fa4]'")
    from encoder.fused.quack_gemm import QuackGemm

    products = QuackGemm(CUDA)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("left to cuBLAS")

    monkeypatch.setattr(CublasGemm, "__call__", refuse)
    return products


# SiLU alone is the merger's, which is left to cuBLAS for few rows.
QUACK_CASES = [
    (rows, after)
    for rows in (4, 196, 4001, 6272)
    for after in (Epilogue.NONE, Epilogue.GELU_TANH, Epilogue.SILU, Epilogue.SWIGLU)
    if rows > 256 or after is not Epilogue.SILU
]


@pytest.mark.parametrize(("rows", "after"), QUACK_CASES)
def test_quack_products(quack: Gemm, rows: int, after: Epilogue) -> None:
    affine, x = layer(1152, 3456, torch.bfloat16), random(rows, 1152, dtype=torch.bfloat16)
    found = quack(affine, x, after)
    assert relative_error(found, AFTER[after](expected(affine, x))) < TOLERANCE[torch.bfloat16]


def test_quack_writes_into_a_slice(quack: Gemm) -> None:
    affine, x = layer(512, 4096, torch.bfloat16), random(4252, 512, dtype=torch.bfloat16)
    wide = torch.zeros(4252, 3 * 4096, device=CUDA, dtype=torch.bfloat16)
    quack(affine, x, out=wide[:, 4096:8192])
    assert relative_error(wide[:, 4096:8192], expected(affine, x)) < TOLERANCE[torch.bfloat16]
    assert not wide[:, :4096].any()
    assert not wide[:, 8192:].any()


@pytest.mark.parametrize("rows", [1, 196, 320, 512, 700, 3136, 4001])
@pytest.mark.parametrize("head_dim", [72, 80])
def test_quack_turns_q_and_k_and_leaves_v(quack: Gemm, rows: int, head_dim: int) -> None:
    heads, width = 16, 16 * head_dim
    affine, x = layer(width, 3 * width, torch.bfloat16), random(rows, width, dtype=torch.bfloat16)
    positions = torch.randint(300, (rows, 2), generator=torch.Generator().manual_seed(5)).to(CUDA, torch.int32)
    frequencies = 1 / 10000 ** (torch.arange(0, head_dim // 2, 2, device=CUDA) / (head_dim // 2))
    turning = rotation(positions, pair_frequencies(frequencies, heads))
    found = quack.rotated(adjacent_pairs(affine, heads), x, turning).view(rows, 3, heads, head_dim)
    plain = expected(affine, x).view(rows, 3, heads, head_dim)
    angles = (positions.unsqueeze(-1).double() * frequencies.double()).flatten(1)[:, None, None]
    first, second = plain[:, :2].chunk(2, dim=-1)
    pairs = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    assert relative_error(found[:, :2], torch.stack(pairs, -1).flatten(-2)) < TOLERANCE[torch.bfloat16]
    assert relative_error(found[:, 2], plain[:, 2]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rows", [4, 196, 256, 512])
@pytest.mark.parametrize(("outputs", "depth", "parts"), [(1152, 4320, 3), (1280, 3456, 3), (1280, 1280, 1)])
def test_quack_leaves_sums_of_few_rows_in_parts(quack: Gemm, rows: int, outputs: int, depth: int, parts: int) -> None:
    affine, x = layer(depth, outputs, torch.bfloat16), random(rows, depth, dtype=torch.bfloat16)
    residual = random(rows, outputs, dtype=torch.bfloat16, seed=3)
    before = residual.clone()
    sums = quack.accumulate(affine, x, residual)
    added = expected(affine, x) - affine.bias.double()
    if sums is None:
        assert relative_error(residual, before.double() + added) < TOLERANCE[torch.bfloat16]
        assert rows > 256 or parts == 1
    else:
        assert sums.shape == (parts, rows, outputs)
        assert relative_error(sums.sum(0), added) < 1e-5
        assert torch.equal(residual, before)


def test_quack_adds_a_residual_where_that_fills_the_device(quack: Gemm, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("left to cuBLAS")

    monkeypatch.setattr(CublasGemm, "accumulate", refuse)
    affine, x = layer(1152, 1280, torch.bfloat16), random(8192, 1152, dtype=torch.bfloat16)
    residual = random(8192, 1280, dtype=torch.bfloat16, seed=3)
    sum_of_both = residual.double() + expected(affine, x) - affine.bias.double()
    quack.accumulate(affine, x, residual)
    assert relative_error(residual, sum_of_both) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rows", [1, 49, 64])
def test_quack_computes_a_merger_of_few_tokens(quack: Gemm, rows: int) -> None:
    """Both layers, the exact GELU between them in the first one's epilogue, into a slice of the output."""
    first, second = layer(4608, 4608, torch.bfloat16), layer(4608, 4096, torch.bfloat16)
    x, wide = random(rows, 4608, dtype=torch.bfloat16), torch.zeros(rows, 3 * 4096, device=CUDA, dtype=torch.bfloat16)
    hidden = quack(first, x, Epilogue.GELU)
    assert relative_error(hidden, F.gelu(expected(first, x))) < TOLERANCE[torch.bfloat16]
    quack(second, hidden, out=wide[:, 4096:8192])
    assert relative_error(wide[:, 4096:8192], expected(second, hidden)) < TOLERANCE[torch.bfloat16]
    assert not wide[:, :4096].any()
    assert not wide[:, 8192:].any()


@pytest.mark.parametrize("rows", [257, 320, 392, 512, 640, 896, 1024, 1568, 2100])
@pytest.mark.parametrize("after", [Epilogue.NONE, Epilogue.GELU_TANH, Epilogue.SWIGLU])
def test_products_with_every_class_of_tiles(rows: int, after: Epilogue) -> None:
    """GEMMs of QuACK and of cuBLAS, to which some of these are left."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("QuACK's products are for Hopper")
    pytest.importorskip("quack", reason="QuACK comes with FlashAttention-4: pip install 'vitray[fa4]'")
    from encoder.fused.quack_gemm import QuackGemm

    outputs = {Epilogue.NONE: 3840, Epilogue.GELU_TANH: 4320, Epilogue.SWIGLU: 6912}[after]
    affine, x = layer(1152, outputs, torch.bfloat16), random(rows, 1152, dtype=torch.bfloat16)
    gemm = QuackGemm(CUDA)
    assert relative_error(gemm(affine, x, after), AFTER[after](expected(affine, x))) < 1.5 * TOLERANCE[torch.bfloat16]
    short, residual = layer(1152, 1152, torch.bfloat16), random(rows, 1152, dtype=torch.bfloat16, seed=3)
    sum_of_both = residual.double() + expected(short, x) - short.bias.double()
    assert gemm.accumulate(short, x, residual) is None
    assert relative_error(residual, sum_of_both) < TOLERANCE[torch.bfloat16]
