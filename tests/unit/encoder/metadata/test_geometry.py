"""Grid arithmetic, metadata and segment attention against slow, literal definitions of the same things."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from encoder.checkpoint.vision_config import VisionConfig
from encoder.metadata import geometry
from encoder.metadata.device_tables import batch_metadata
from encoder.metadata.geometry import Grid
from encoder.metadata.segments import AttentionBackend, Segments, group_segments
from encoder.towers.attention import attention, choose_backend
from tests.unit.encoder.metadata.host_metadata import cu_seqlens

MERGE = 2
CPU = torch.device("cpu")

# No deadline: tests do not time.
examples = settings(max_examples=50, deadline=None)

grids = st.tuples(
    st.integers(1, 3), st.integers(1, 20).map(lambda n: MERGE * n), st.integers(1, 20).map(lambda n: MERGE * n)
)


def _blocks(grid: Grid) -> list[tuple[int, int, int]]:
    """(frame, row, column) of each patch in merge-block order, by the definition."""
    t, h, w = grid
    return [
        (frame, block_row * MERGE + row, block_column * MERGE + column)
        for frame in range(t)
        for block_row in range(h // MERGE)
        for block_column in range(w // MERGE)
        for row in range(MERGE)
        for column in range(MERGE)
    ]


@given(grids)
@examples
def test_rope_positions_follow_the_merge_blocks(grid: Grid) -> None:
    assert geometry.rope_positions(grid, MERGE).tolist() == [[row, column] for _, row, column in _blocks(grid)]


@given(grids, st.integers(1, 48))
@examples
def test_position_taps_interpolate_as_torch_does(grid: Grid, side: int) -> None:
    t, h, w = grid
    table = torch.randn(side, side, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(side))
    indices, weights = geometry.position_taps(grid, side, MERGE)
    assert indices.shape == weights.shape == (t * h * w, 4)
    found = (table.view(-1, 3)[indices] * weights.unsqueeze(-1)).sum(1)
    resized = F.interpolate(table.permute(2, 0, 1)[None], (h, w), mode="bilinear", align_corners=True)[0]
    expected = torch.stack([resized[:, row, column] for _, row, column in _blocks(grid)])
    # The weights are float32, their sums are exact to a few units of its last place.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@given(st.integers(1, 64), st.integers(1, 64))
@examples
def test_positions_that_fall_on_the_table_take_its_rows_exactly(blocks: int, stretch: int) -> None:
    """With side - 1 a multiple of h - 1 every patch lies on a row: float arithmetic would put some just below it."""
    h = MERGE * blocks
    side = (h - 1) * stretch + 1
    indices, weights = geometry.position_taps((1, h, MERGE), side, MERGE)
    row = torch.tensor([row for _, row, _ in _blocks((1, h, MERGE))])
    assert torch.equal(indices[:, 0] // side, row * stretch)
    assert torch.equal(weights[:, :2].sum(-1), torch.ones(h * MERGE))


@given(grids, st.integers(1, 6))
@examples
def test_window_order_lists_the_tokens_of_each_window_in_turn(grid: Grid, window: int) -> None:
    t, h, w = grid
    rows, columns = h // MERGE, w // MERGE
    order, lengths = geometry.window_order(grid, MERGE, window)
    expected = [
        [
            (frame * rows + row) * columns + column
            for row in range(top, min(top + window, rows))
            for column in range(left, min(left + window, columns))
        ]
        for frame in range(t)
        for top in range(0, rows, window)
        for left in range(0, columns, window)
    ]
    assert order.tolist() == [token for tokens in expected for token in tokens]
    assert lengths == tuple(len(tokens) * MERGE**2 for tokens in expected)
    assert torch.equal(order[geometry.inverse_permutation(order)], torch.arange(len(order)))


def test_each_frame_is_a_segment() -> None:
    assert geometry.frame_lengths((2, 4, 6)) == (24, 24)


@pytest.mark.parametrize("grid", [(0, 4, 4), (1, 0, 4), (1, 4, 3), (1, 3, 4), (1, -2, 4), (1, 1, 2)])
def test_impossible_grids_are_refused(grid: Grid) -> None:
    with pytest.raises(ValueError, match=r"grid .* multiples of the merge size 2"):
        geometry.check_grid(grid, MERGE)


lengths_lists = st.lists(st.sampled_from([1, 4, 12, 16, 64]), min_size=1, max_size=12)


@given(lengths_lists)
@examples
def test_segment_groups_hold_each_row_once(lengths: list[int]) -> None:
    groups = group_segments(lengths, CPU)
    assert len({length for length, _ in groups}) == len(groups)
    assert sorted(row for _, rows in groups for row in rows.tolist()) == list(range(sum(lengths)))


@given(lengths_lists)
@examples
def test_attention_stays_within_its_segment(lengths: list[int]) -> None:
    total, heads, head_dim = sum(lengths), 2, 8
    generator = torch.Generator().manual_seed(total)
    qkv = torch.randn(total, 3, heads, head_dim, generator=generator, dtype=torch.float64)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    scores = torch.einsum("qhd,khd->hqk", qkv[:, 0], qkv[:, 1]) / head_dim**0.5
    weights = scores.masked_fill(segment[:, None] != segment, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, qkv[:, 2])
    cut = Segments(AttentionBackend.SDPA, cu_seqlens(lengths), max(lengths)).grouped(lengths)
    q, k, v = qkv.unbind(1)
    torch.testing.assert_close(attention(q, k, v, cut), expected, rtol=1e-10, atol=1e-10)


def test_a_cpu_uses_dense_attention() -> None:
    assert choose_backend(CPU, torch.float32, 72) is AttentionBackend.SDPA


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 72), (torch.bfloat16, 20)])
def test_a_gpu_uses_dense_attention_where_it_has_no_other(dtype: torch.dtype, head_dim: int) -> None:
    assert choose_backend(torch.device("cuda"), dtype, head_dim) is AttentionBackend.SDPA


def _config(architecture: str) -> VisionConfig:
    return VisionConfig.from_dict({"model_type": architecture, "vision_config": {"hidden_size": 64, "num_heads": 4}})


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "qwen3_vl"])
def test_metadata_of_a_batch_is_that_of_its_images_one_after_another(architecture: str) -> None:
    config = _config(architecture)
    grid_thw: list[Grid] = [(1, 6, 20), (2, 18, 4), (1, 2, 2)]
    batch = batch_metadata(grid_thw, config, CPU, AttentionBackend.SDPA)
    singles = [batch_metadata([grid], config, CPU, AttentionBackend.SDPA) for grid in grid_thw]
    assert batch.image_tokens == (30, 36, 1)
    assert (batch.num_tokens, batch.num_patches) == (67, 268)
    assert batch.frames.cu_seqlens.tolist() == [0, 120, 192, 264, 268]
    assert batch.frames.max_seqlen == 120
    for field in ("rope_positions", "position_indices", "position_weights"):
        parts: list[Tensor | None] = [getattr(single, field) for single in singles]
        present = [part for part in parts if part is not None]
        found = getattr(batch, field)
        assert found is None if not present else torch.equal(found, torch.cat(present))
    if architecture == "qwen3_vl":
        assert all(part is None for part in (batch.window_order, batch.window_inverse, batch.windows))
        return
    assert batch.window_order is not None
    assert batch.window_inverse is not None
    assert batch.windows is not None
    assert torch.equal(batch.window_order[batch.window_inverse.long()], torch.arange(67, dtype=torch.int32))
    # Each image's tokens keep to its own places.
    assert [sorted(part.tolist())[0] for part in batch.window_order.split([30, 36, 1])] == [0, 30, 66]
    assert batch.windows.max_seqlen == config.window_patches == 64
    assert batch.windows.cu_seqlens.tolist() == [0, 48, 96, 120, 152, 184, 192, 224, 256, 264, 268]


def test_a_batch_needs_an_image_and_every_grid_is_checked() -> None:
    config = _config("qwen3_vl")
    with pytest.raises(ValueError, match="grid_thw is empty"):
        batch_metadata([], config, CPU, AttentionBackend.SDPA)
    for grid in ((1, 4, 5), (1, -8, 8), (0, 4, 4)):
        with pytest.raises(ValueError, match=re.escape(f"grid {grid}")):
            batch_metadata([(1, 4, 4), grid], config, CPU, AttentionBackend.SDPA)
