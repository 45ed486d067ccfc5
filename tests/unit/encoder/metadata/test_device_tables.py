"""Metadata laid out on the device from a batch's description equals what is built on the host; its padding is inert."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from encoder.checkpoint.vision_config import VisionConfig
from encoder.metadata.device_tables import GridTables, Layout, batch_metadata
from encoder.metadata.expand import Expand, expand
from encoder.metadata.geometry import Grid
from encoder.metadata.segments import AttentionBackend, SegmentGroup, Segments
from encoder.metadata.tower_metadata import expanded_metadata
from tests.unit.encoder.interpreter import Interpreted
from tests.unit.encoder.metadata.host_metadata import check_equal, host_metadata

CPU = torch.device("cpu")
CONFIGS = {
    "qwen2_5_vl": VisionConfig.from_dict({"model_type": "qwen2_5_vl"}),
    "qwen3_vl": VisionConfig.from_dict({"model_type": "qwen3_vl"}),
}
BATCHES: list[list[Grid]] = [
    [(1, 6, 10)],
    [(1, 2, 2), (2, 10, 12), (1, 18, 34)],
    [(1, 34, 22)] * 3 + [(3, 4, 18)],
    [(1, 2, 120), (1, 50, 6), (1, 2, 2)],
]


def tables_for(config: VisionConfig, max_bytes: int = 2**20) -> GridTables:
    return GridTables(config, CPU, max_bytes)


def laid_out(tables: GridTables, grids: list[Grid]) -> Layout:
    layout = tables.layout(grids)
    assert layout is not None
    return layout


def check(config: VisionConfig, way: Expand, spare_tokens: int, spare_slots: int) -> None:
    tables = tables_for(config)
    for grids in BATCHES * 2:
        layout = laid_out(tables, grids)
        slots, tokens = layout.slots + spare_slots, layout.num_tokens + spare_tokens
        description = layout.device_description(slots, CPU)
        assert description.shape[0] == 4
        assert slots < description.shape[1] <= slots + 4
        assert description.stride(0) % 4 == 0, "rows begin on 16 bytes"
        found = expanded_metadata(
            way,
            tables.arena,
            description,
            config,
            AttentionBackend.VARLEN,
            tokens=tokens,
            frames=layout.num_frames + spare_slots,
            windows=layout.num_windows + spare_slots,
            max_seqlen=layout.max_seqlen,
            image_tokens=layout.image_tokens,
        )
        expected = host_metadata(grids, config)
        assert (layout.num_patches, layout.num_tokens) == (expected.num_patches, expected.num_tokens)
        assert layout.image_tokens == expected.image_tokens
        assert layout.num_windows == (0 if expected.windows is None else expected.windows.cu_seqlens.numel() - 1)
        assert (layout.num_frames, layout.max_seqlen) == (
            expected.frames.cu_seqlens.numel() - 1,
            expected.frames.max_seqlen,
        )
        check_equal(found, expected)


@pytest.mark.parametrize(("spare_tokens", "spare_slots"), [(0, 0), (50, 5)])
@pytest.mark.parametrize("arch", CONFIGS)
def test_equals_what_the_host_builds(arch: str, spare_tokens: int, spare_slots: int) -> None:
    check(CONFIGS[arch], expand, spare_tokens, spare_slots)


@pytest.mark.slow
def test_the_kernel_equals_plain_torch(interpreted: Interpreted) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton", reason="the kernel is Triton's")
    program = (
        "from tests.unit.encoder.metadata.test_device_tables import CONFIGS, check\n"
        "from encoder.metadata.expand_kernel import expand\n"
        "for config in CONFIGS.values():\n"
        "    for spare in ((0, 0), (50, 5)):\n"
        "        check(config, expand, *spare)\n"
        "print('equal')"
    )
    assert interpreted(program) == "equal"


@pytest.mark.parametrize("backend", [AttentionBackend.VARLEN, AttentionBackend.SDPA])
@pytest.mark.parametrize("arch", CONFIGS)
def test_metadata_of_a_batch_equals_the_hosts(arch: str, backend: AttentionBackend) -> None:
    """In an arena that holds this batch alone, and in one with other grids."""
    config, tables = CONFIGS[arch], tables_for(CONFIGS[arch])
    for grids in [*BATCHES, [(1, 2, 2)], [(4, 2, 2)] * 3, [(1, 64, 64)]]:
        expected = host_metadata(grids, config)
        for found in (batch_metadata(grids, config, CPU, backend), tables.metadata(laid_out(tables, grids), backend)):
            check_equal(found, expected)
            assert (found.num_patches, found.num_tokens) == (expected.num_patches, expected.num_tokens)
            assert found.image_tokens == expected.image_tokens
            for ours, theirs in ((found.frames, expected.frames), (found.windows, expected.windows)):
                if ours is not None and theirs is not None:
                    assert torch.equal(ours.cu_seqlens, theirs.cu_seqlens)
                    assert ours.backend is backend
                    check_groups(ours.groups, theirs if backend is AttentionBackend.SDPA else None)


def check_groups(groups: tuple[SegmentGroup, ...], segments: Segments | None) -> None:
    """Asserts that each segment is one row of its length's group, in order; without `segments`, no group."""
    expected: dict[int, list[int]] = {}
    if segments is not None:
        for start, end in pairwise(segments.cu_seqlens.tolist()):
            expected.setdefault(end - start, []).extend(range(start, end))
    assert [(length, rows.tolist()) for length, rows in groups] == list(expected.items())


def test_known_grids_cost_no_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = tables_for(CONFIGS["qwen3_vl"])
    tables.warm([(1, 6, 10)])
    assert (tables.hits, tables.misses) == (0, 0)
    laid_out(tables, [(1, 6, 10), (1, 4, 4), (1, 4, 4)])
    assert (tables.hits, tables.misses) == (2, 1)

    def computed(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("encoder.metadata.device_tables.grid_numbers", computed)
    laid_out(tables, [(1, 4, 4), (1, 6, 10)])
    assert (tables.hits, tables.misses) == (4, 1)


def test_a_full_arena_begins_anew_within_its_bytes() -> None:
    config = CONFIGS["qwen3_vl"]
    tables = tables_for(config, max_bytes=4 * 10 * 100)  # 100 patches
    arena: Tensor = tables.arena
    for grids in ([(1, 6, 10)], [(1, 4, 8)], [(1, 6, 8), (1, 2, 2)], [(1, 6, 10), (1, 2, 2)]):
        layout = laid_out(tables, grids)
        description = layout.device_description(layout.slots, CPU)
        found, _ = expand(tables.arena, description, config, layout.num_tokens, 0)
        assert torch.equal(found.rope_positions, host_metadata(grids, config).rope_positions)
    assert tables.arena is arena
    assert tables.layout([(1, 10, 10), (1, 2, 2)]) is None, "more than all of it"
    laid_out(tables, [(1, 10, 10)])


def test_an_impossible_grid_is_refused() -> None:
    tables = tables_for(CONFIGS["qwen3_vl"])
    with pytest.raises(ValueError, match=r"grid \(1, 4, 5\)"):
        tables.layout([(1, 4, 4), (1, 4, 5)])
    with pytest.raises(ValueError, match="grid_thw is empty"):
        tables.layout([])
