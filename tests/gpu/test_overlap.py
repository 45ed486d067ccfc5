"""Kernels launched while the kernel ahead still runs read only what it has written by its end: ours and QuACK's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="the kernels are Triton's")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer  # noqa: E402

from encoder.fused.affine import ScaledRows  # noqa: E402
from encoder.fused.gemm import Epilogue, Gemm  # noqa: E402
from encoder.fused.rope_in_gemm import adjacent_pairs, pair_frequencies, rotation  # noqa: E402
from encoder.kernels.norm import norm  # noqa: E402
from encoder.kernels.overlap import FIRST_CAPABILITY  # noqa: E402
from encoder.kernels.scaled import scaled_rows  # noqa: E402
from tests.gpu.test_kernels import random  # noqa: E402
from tests.gpu.test_products import layer  # noqa: E402
from tests.unit.encoder.kernels.scaled_norm import norm_scaled  # noqa: E402

BFLOAT16, CUDA = torch.bfloat16, torch.device("cuda")
# Longer than a host takes for the launch that follows.
LATE_NANOSECONDS = 20_000_000
WIDTH, INNER, HEADS = 1152, 4608, 16


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() < FIRST_CAPABILITY:
        pytest.skip(f"kernels overlap from compute capability {FIRST_CAPABILITY} on")


@triton.jit
def _late_kernel(from_ptr: tl.tensor, to_ptr: tl.tensor, numel: int, NANOSECONDS: tl.constexpr) -> None:
    """Copies bytes, after it has let the next kernel start and waited."""
    gdc_launch_dependents()
    begin = globaltimer()
    while globaltimer() - begin < NANOSECONDS:
        pass
    for first in range(0, numel, 1024):
        place = first + tl.arange(0, 1024)
        tl.store(to_ptr + place, tl.load(from_ptr + place, mask=place < numel), mask=place < numel)


@triton.jit
def _hasty_kernel(from_ptr: tl.tensor, to_ptr: tl.tensor) -> None:
    place = tl.arange(0, 32)
    read = tl.load(from_ptr + place, volatile=True)
    gdc_wait()
    tl.store(to_ptr + place, read)


def write_late(source: Tensor, target: Tensor) -> None:
    source, target = source.view(torch.uint8).flatten(), target.view(torch.uint8).flatten()
    _late_kernel[(1,)](source, target, source.numel(), NANOSECONDS=LATE_NANOSECONDS)


def reads_in_time(run: Callable[[], Tensor], *operands: Tensor) -> None:
    """Asserts that `run` gives the same where each operand in turn is written just before it by a kernel that lets it
    start early. `run` compiles at its first call."""
    held = [operand.clone() for operand in operands]
    expected = run().clone()
    for operand, true in zip(operands, held, strict=True):
        for other, kept in zip(operands, held, strict=True):
            other.copy_(kept)
        operand.zero_()
        write_late(true, operand)  # compiles
        operand.zero_()
        torch.cuda.synchronize()
        write_late(true, operand)
        found = run().clone()
        torch.cuda.synchronize()
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def quack() -> Gemm:
    pytest.importorskip("quack", reason="quack-kernels comes with FlashAttention-4")
    from encoder.fused.quack_gemm import QuackGemm

    return QuackGemm(CUDA)


def test_a_kernel_that_reads_before_its_wait_is_found() -> None:
    """Without this the other tests could pass since nothing overlaps."""
    true, found = torch.ones(32, dtype=torch.int32, device=CUDA), torch.zeros(32, dtype=torch.int32, device=CUDA)

    def run() -> Tensor:
        _hasty_kernel[(1,)](operand, found, launch_pdl=True)
        return found

    operand = true.clone()
    with pytest.raises(AssertionError):
        reads_in_time(run, operand)


def test_our_kernels_read_in_time() -> None:
    x, weight, bias = random(600, WIDTH, dtype=BFLOAT16), random(WIDTH, dtype=BFLOAT16), random(WIDTH, dtype=BFLOAT16)
    reads_in_time(lambda: norm(x, weight, bias, 1e-6), x, weight, bias)
    reads_in_time(lambda: norm_scaled(x, weight, bias, 1e-6)[0], x)
    reads_in_time(lambda: scaled_rows(x)[1], x)


@pytest.mark.parametrize("rows", [196, 4096])
def test_quacks_products_read_in_time(rows: int) -> None:
    """One that reads its residual or the vectors of its epilogue before its dependency wait gives stale sums; QuACK
    0.6.4 waits in the warp that loads the factors, and all the rest follows these."""
    products, stream = quack(), random(rows, WIDTH, dtype=BFLOAT16, seed=3)
    x, first = random(rows, WIDTH, dtype=BFLOAT16), layer(WIDTH, INNER, BFLOAT16)
    reads_in_time(lambda: products(first, x, Epilogue.GELU_TANH), x, first.weight, first.bias)
    between, second = random(rows, INNER, dtype=BFLOAT16), layer(INNER, WIDTH, BFLOAT16)
    residual = stream.clone()

    def add() -> Tensor:
        sums = products.accumulate(second, between, residual)
        return residual if sums is None else sums

    if rows > 256:  # below that nothing is added to the residual
        residual_of_each_run(add, residual, stream, between)
    qkv = adjacent_pairs(layer(WIDTH, 3 * WIDTH, BFLOAT16), HEADS)
    positions = torch.randint(0, 64, (rows, 2), dtype=torch.int32, device=CUDA)
    turn = rotation(positions, pair_frequencies(torch.logspace(0, -3, WIDTH // HEADS // 4, device=CUDA), HEADS))
    reads_in_time(lambda: products.rotated(qkv, x, turn), x, turn.positions, qkv.bias)


def residual_of_each_run(add: Callable[[], Tensor], residual: Tensor, stream: Tensor, *operands: Tensor) -> None:
    """`reads_in_time` of a product that adds to `residual`: it too is written late."""
    residual.copy_(stream)
    expected = add().clone()
    for operand in (residual, *operands):
        true = stream if operand is residual else operand.clone()
        residual.copy_(stream)
        operand.zero_()
        torch.cuda.synchronize()
        write_late(true, operand)
        found = add().clone()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [196, 4096])
def test_quacks_products_of_8_bits_read_in_time(rows: int) -> None:
    """Scales of rows come from the kernel just ahead, like the rows."""
    wide = quack()
    from encoder.fused import quack_epilogues
    from encoder.fused.gemm_tiles import Tile
    from encoder.fused.quack_gemm import multiply

    del wide
    x, weight = (ScaledRows(*scaled_rows(random(count, WIDTH, dtype=BFLOAT16, seed=count))) for count in (rows, INNER))
    out, residual = random(rows, INNER, dtype=BFLOAT16), random(rows, INNER, dtype=BFLOAT16)
    scales = {"scale": x.scales.view(1, -1), "weight_scale": weight.scales.view(1, -1)}

    def add() -> Tensor:
        multiply(quack_epilogues.add_scaled, x.values, weight.values, out, Tile(128, 128), scales, residual)
        return out

    reads_in_time(add, x.values, x.scales, weight.scales, residual)
    row = torch.ones(1, INNER, device=CUDA)
    narrow = torch.empty(rows, INNER, dtype=torch.float8_e4m3fn, device=CUDA)

    def gelu() -> Tensor:
        values = {**scales, "bias": row, "hidden_scale": row}
        multiply(quack_epilogues.gelu_scaled, x.values, weight.values, narrow, Tile(128, 128), values)
        return narrow

    reads_in_time(gelu, x.values, x.scales, row)
