"""The Triton kernels against plain PyTorch: odd sizes, bfloat16 and float32, garbage where nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="the kernels are Triton's")

from encoder.kernels.attention import attend  # noqa: E402
from encoder.kernels.norm import norm  # noqa: E402
from encoder.kernels.positions import add_positions_  # noqa: E402
from encoder.kernels.rope import rope_, rope_table  # noqa: E402
from encoder.kernels.segments import segment_tiles  # noqa: E402
from encoder.kernels.short_attention import LONGEST, attend_with_rope  # noqa: E402
from encoder.kernels.swiglu import swiglu  # noqa: E402
from encoder.kernels.tiles import FEW_ROWS_TILES, attention_tile, short_rows  # noqa: E402
from tests.parity.reference_towers import relative_error  # noqa: E402

CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16]
# One rounding to bfloat16 is 1.7e-3 on average; attention rounds its weights too. float32 differs in the order of sums.
ROUNDED_ONCE = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3}
ATTENDED = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
NAN = float("nan")

WIDTHS = [144, 160, 1152, 1280, 4608, 64, 100]
# (heads, head_dim): the towers', small ones, and one that is a power of two.
HEADS = [(2, 72), (3, 80), (16, 72), (16, 80), (2, 64), (1, 16), (1, 128)]
# Borders that fall anywhere in a block, empty segments, segments of one row.
LENGTHS = {
    "one": [196],
    "several": [1, 64, 0, 63, 129, 300, 2, 128],
    "blocks": [128, 128, 256],
    "long": [1030, 7],
}
SHORT = {"windows": [64] * 9, "borders": [64, 16, 64, 4, 32, 0, 64, 1, 63], "tiny": [4]}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(CUDA, dtype)


def borders(lengths: Sequence[int], padding: int = 0) -> Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat((ends, ends[-1:].expand(padding))).to(CUDA, torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 7, 700])
def test_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight, bias = (
        random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(rows, width), (width,), (width,)])
    )
    shift = random(width, seed=3)
    shifted = x.float() + shift
    layer = F.layer_norm(shifted, (width,), weight.float(), bias.float(), 1e-6)
    assert relative_error(norm(x, weight, bias, 1e-6, shift=shift), layer) < ROUNDED_ONCE[dtype]
    rms = F.rms_norm(shifted, (width,), weight.float(), 1e-6)
    assert relative_error(norm(x, weight, None, 1e-6, shift=shift), rms) < ROUNDED_ONCE[dtype]
    plain = F.rms_norm(x.float(), (width,), weight.float(), 1e-6)
    assert relative_error(norm(x, weight, None, 1e-6), plain) < ROUNDED_ONCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [9, 2000])
def test_norm_leaves_zeros_in_rows_that_do_not_count(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = (random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(rows, 160), (160,), (160,)]))
    counted = rows - 4
    valid = torch.tensor([counted], device=CUDA, dtype=torch.int32)
    clean = norm(x, weight, bias, 1e-6)
    x[counted:] = NAN
    found = norm(x, weight, bias, 1e-6, valid=valid)
    assert torch.equal(found[:counted], clean[:counted])
    assert not found[counted:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 160), (196, 1152), (600, 1280)])
def test_norm_adds_the_parts_of_a_sum_to_the_stream_first(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight, bias = (
        random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(rows, width), (width,), (width,)])
    )
    sums = random(3, rows, width, seed=4)
    stream = (x.float() + sums.sum(0)).to(dtype)
    found = norm(x, weight, bias, 1e-6, sums=sums)
    assert relative_error(x, stream) < ROUNDED_ONCE[dtype] / 2
    expected = F.layer_norm(x.float(), (width,), weight.float(), bias.float(), 1e-6)
    assert relative_error(found, expected) < ROUNDED_ONCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 90), (600, 3456), (1000, 130)])
def test_swiglu(rows: int, width: int, dtype: torch.dtype) -> None:
    packed = random(rows, 2 * width, dtype=dtype)
    expected = F.silu(packed[:, 0::2].float()) * packed[:, 1::2].float()
    assert relative_error(swiglu(packed), expected) < ROUNDED_ONCE[dtype] * 1.2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 144), (37, 1152), (1100, 100)])
def test_positions(rows: int, width: int, dtype: torch.dtype) -> None:
    x, table = random(rows, width, dtype=dtype), random(2304, width, dtype=dtype, seed=1)
    indices = torch.randint(2304, (rows, 4), device=CUDA, dtype=torch.int32)
    weights = torch.rand(rows, 4, device=CUDA)
    expected = x.float() + (table.float()[indices.long()] * weights.unsqueeze(-1)).sum(1)
    add_positions_(x, table, indices, weights)
    assert relative_error(x, expected) < ROUNDED_ONCE[dtype]


def turned(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def make_angles(rows: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.randint(200, (rows, 2), generator=torch.Generator().manual_seed(5)).to(CUDA, torch.int32)
    frequencies = (1 / 10000 ** (torch.arange(0, dim // 2, 2) / (dim // 2))).to(CUDA)
    return positions, frequencies, (positions.unsqueeze(-1).float() * frequencies).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), HEADS)
@pytest.mark.parametrize("rows", [1, 333])
def test_rope(rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    positions, frequencies, angles = make_angles(rows, dim)
    table = rope_table(positions, frequencies, torch.float32)
    assert (table - torch.stack((angles.cos(), angles.sin()), 1)).abs().max() < 1e-6
    qkv = random(rows, 3 * heads * dim, dtype=dtype)
    before = qkv.clone().view(rows, 3, heads, dim)
    rope_(qkv, rope_table(positions, frequencies, torch.float16 if dtype == torch.bfloat16 else torch.float32), heads)
    after = qkv.view(rows, 3, heads, dim)
    for part in range(2):
        assert relative_error(after[:, part], turned(before[:, part], angles)) < ROUNDED_ONCE[dtype]
    assert torch.equal(after[:, 2], before[:, 2])


@pytest.mark.parametrize("tile_rows", [32, 64, 128])
@pytest.mark.parametrize("lengths", [*LENGTHS.values(), *SHORT.values(), [0, 0, 5]])
@pytest.mark.parametrize("padding", [0, 13])
def test_tiles_hold_every_row_once_and_one_segment_each(lengths: list[int], padding: int, tile_rows: int) -> None:
    total = sum(lengths)
    seen = torch.zeros(total + 50, dtype=torch.int32)
    ends = borders(lengths, padding)
    segments = set(pairwise(ends.tolist()))
    for first, start, end, _ in segment_tiles(ends, total + 50, tile_rows).tolist():
        if first < end:
            assert (start, end) in segments
            assert start <= first
            seen[first : min(first + tile_rows, end)] += 1
    assert (seen[:total] == 1).all()
    assert not seen[total:].any()


def expected_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    parts = []
    lengths = [length for length in lengths if length]
    for q_part, k_part, v_part in zip(*(x.float().split(list(lengths)) for x in (q, k, v)), strict=True):
        heads_first = [x.transpose(0, 1).double() for x in (q_part, k_part, v_part)]
        parts.append(F.scaled_dot_product_attention(*heads_first).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), HEADS)
@pytest.mark.parametrize("case", LENGTHS)
def test_attention(case: str, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Every tile in use, on rows that are followed by NaN."""
    lengths, padding = LENGTHS[case], 70
    total = sum(lengths)
    qkv = random(total + padding, 3, heads, dim, dtype=dtype)
    qkv[total:] = NAN
    q, k, v = qkv.unbind(1)
    expected = expected_attention(q[:total], k[:total], v[:total], lengths)
    tiles = {attention_tile(rows, dtype) for rows in (1, 100_000)}
    for tile in tiles if dtype == torch.float32 else tiles | set(FEW_ROWS_TILES):
        found = attend(q, k, v, segment_tiles(borders(lengths, 5), total + padding, tile.rows), tile)
        assert relative_error(found[:total], expected) < ATTENDED[dtype], tile


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), HEADS)
@pytest.mark.parametrize("case", SHORT)
def test_short_attention_turns_and_attends(case: str, heads: int, dim: int, dtype: torch.dtype) -> None:
    lengths, padding = SHORT[case], 70
    assert max(lengths) <= LONGEST
    total = sum(lengths)
    positions, frequencies, angles = make_angles(total + padding, dim)
    table = rope_table(positions, frequencies, torch.float16 if dtype == torch.bfloat16 else torch.float32)
    qkv = random(total + padding, 3 * heads * dim, dtype=dtype)
    qkv[total:] = NAN
    before = qkv.clone()
    q, k, v = qkv[:total].view(total, 3, heads, dim).unbind(1)
    expected = expected_attention(turned(q, angles[:total]), turned(k, angles[:total]), v, lengths)
    rows = short_rows(dtype)
    found = attend_with_rope(qkv, table, segment_tiles(borders(lengths, 5), total + padding, rows), heads, rows)
    assert relative_error(found[:total].view(total, heads, dim), expected) < ATTENDED[dtype]
    assert torch.equal(qkv[:total], before[:total])


def test_a_segment_of_nan_harms_no_other() -> None:
    lengths = [40, 30, 64, 5]
    qkv = random(sum(lengths), 3, 2, 72, dtype=torch.bfloat16)
    q, k, v = qkv.unbind(1)
    tile = attention_tile(1, torch.bfloat16)
    tiles = segment_tiles(borders(lengths), sum(lengths), tile.rows)
    clean = attend(q, k, v, tiles, tile)
    qkv[40:70] = NAN
    found = attend(q, k, v, tiles, tile)
    assert torch.equal(found[:40], clean[:40])
    assert torch.equal(found[70:], clean[70:])
