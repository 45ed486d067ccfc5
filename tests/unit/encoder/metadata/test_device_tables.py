"""Metadata laid out on the device from a batch's description equals what is built on the host; its padding is inert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from encoder.checkpoint.vision_config import VisionConfig
from encoder.forwards import TowerForward
from encoder.metadata.builder import MetadataBuilder
from encoder.metadata.device_tables import GridTables, Layout
from encoder.metadata.expand import Expand, expand
from encoder.metadata.geometry import Grid
from encoder.metadata.segments import AttentionBackend
from encoder.metadata.tower_metadata import TowerMetadata
from tests.unit.encoder.interpreter import Interpreted

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


def never_run(patches: Tensor, metadata: TowerMetadata) -> Tensor:
    raise AssertionError("only the metadata is built")


def check_equal(found: TowerMetadata, expected: TowerMetadata, tokens: int) -> None:
    """The batch's part of `found` is `expected`, and the rest is inert: zeros, places of their own, the last border."""
    patches, total = expected.num_patches, expected.num_tokens
    for name in ("rope_positions", "position_indices", "position_weights"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            assert ours.is_contiguous()
            assert torch.equal(ours[:patches], theirs), name
            assert not ours[patches:].any()
    for name in ("window_order", "window_inverse"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours[:total], theirs), name
            assert ours[total:].tolist() == list(range(total, tokens))
    for ours, theirs in ((found.frames, expected.frames), (found.windows, expected.windows)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            count = len(theirs.cu_seqlens)
            assert torch.equal(ours.cu_seqlens[:count], theirs.cu_seqlens)
            assert set(ours.cu_seqlens[count:].tolist()) <= {patches}
            assert ours.max_seqlen >= theirs.max_seqlen


def check(config: VisionConfig, way: Expand, spare_tokens: int, spare_slots: int) -> None:
    tables, builder, backend = tables_for(config), MetadataBuilder(config), AttentionBackend.VARLEN
    forward = TowerForward("eager", never_run, config, torch.float32, CPU, backend, backend.value, way)
    for grids in BATCHES * 2:
        layout = laid_out(tables, grids)
        slots, tokens = layout.slots + spare_slots, layout.num_tokens + spare_tokens
        description = layout.device_description(slots, CPU)
        assert description.shape[0] == 4
        assert slots < description.shape[1] <= slots + 4
        assert description.stride(0) % 4 == 0, "rows begin on 16 bytes"
        found = forward.metadata(
            tables.arena,
            description,
            tokens=tokens,
            frames=layout.num_frames + spare_slots,
            windows=layout.num_windows + spare_slots,
            max_seqlen=layout.max_seqlen,
            image_tokens=layout.image_tokens,
        )
        expected = builder.build(grids, device=CPU, backend=backend)
        assert (layout.num_patches, layout.num_tokens) == (expected.num_patches, expected.num_tokens)
        assert layout.image_tokens == expected.image_tokens
        assert layout.num_windows == (0 if expected.windows is None else expected.windows.cu_seqlens.numel() - 1)
        assert (layout.num_frames, layout.max_seqlen) == (
            expected.frames.cu_seqlens.numel() - 1,
            expected.frames.max_seqlen,
        )
        check_equal(found, expected, tokens)


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
        found = expand(tables.arena, description, config, layout.num_tokens, 0)
        expected = MetadataBuilder(config).build(grids, device=CPU, backend=AttentionBackend.VARLEN)
        assert torch.equal(found.rope, expected.rope_positions)
    assert tables.arena is arena
    assert tables.layout([(1, 10, 10), (1, 2, 2)]) is None, "more than all of it"
    laid_out(tables, [(1, 10, 10)])


def test_an_impossible_grid_is_refused() -> None:
    tables = tables_for(CONFIGS["qwen3_vl"])
    with pytest.raises(ValueError, match=r"grid \(1, 4, 5\)"):
        tables.layout([(1, 4, 4), (1, 4, 5)])
    with pytest.raises(ValueError, match="grid_thw is empty"):
        tables.layout([])
