"""The towers against transformers' own, through checkpoint files, in float32 and in bfloat16."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5Config, Qwen3_5VisionModel

from encoder.checkpoint.vision_config import VisionConfig
from encoder.towers.tower import VisionTower
from encoder.towers.weights import build_tower, load_tower
from tests.parity.reference_towers import (
    MODELS,
    WITHOUT_LEVELS,
    Grid,
    Reference,
    make_reference,
    random_patches,
    randomise,
    relative_error,
    run_reference,
)

CPU = torch.device("cpu")

# The two sides sum the same products in another order; four blocks of that stay near 3e-6 with these weights.
FLOAT32_TOLERANCE = 1e-4
# The same kernels on the same rows, but in a batch of another size, which changes how sums are blocked.
BATCH_TOLERANCE = 1e-5
# Both sides round to 8 bits at the same places but one: our norms round once, after the weight. Errors are random, so
# ours is not always the smaller one; twice as many roundings would show as 1.4.
BFLOAT16_RATIO = 1.25


def _many(count: int, seed: int = 0) -> list[Grid]:
    draw = random.Random(seed)
    return [(1, 2 * draw.randint(1, 9), 2 * draw.randint(1, 9)) for _ in range(count)]


# A window of Qwen2.5-VL is 8 by 8 patches.
GRIDS: dict[str, list[Grid]] = {
    "odd": [(1, 6, 10), (1, 18, 14), (1, 34, 22), (1, 26, 58)],
    "one window": [(1, 8, 8)],
    "two windows of one size": [(1, 8, 16), (1, 16, 8)],
    "smaller than a window": [(1, 2, 2), (1, 4, 6), (1, 6, 2)],
    "one token": [(1, 2, 2)],
    "extreme ratios": [(1, 2, 120), (1, 120, 2), (1, 4, 70)],
    "larger than the position table": [(1, 50, 64)],
    "40 images": _many(40),
    "40 equal images": [(1, 6, 10)] * 40,
    "videos": [(2, 6, 8), (3, 10, 12), (1, 18, 4)],
    "videos among images": [(1, 6, 8), (2, 10, 12), (1, 8, 8), (3, 4, 18), (1, 2, 2), (2, 2, 2)],
}


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tower(reference: Reference) -> VisionTower:
    return load_tower(reference.path, dtype=torch.float32, device=CPU)


def _levels(tower: VisionTower, patches: Tensor, grid_thw: Sequence[Grid]) -> list[Tensor]:
    out = tower(patches, tower.prepare(grid_thw))
    assert out.shape == (sum(t * h * w for t, h, w in grid_thw) // 4, tower.config.width)
    return list(out.float().split(tower.config.out_hidden_size, dim=-1))


def _per_image(levels: Sequence[Tensor], grid_thw: Sequence[Grid]) -> list[tuple[Tensor, ...]]:
    """For each image its rows of every level."""
    rows = [t * h * w // 4 for t, h, w in grid_thw]
    return list(zip(*(level.split(rows) for level in levels), strict=True))


@pytest.mark.parametrize("case", GRIDS)
def test_float32_equals_transformers_for_each_image_and_level(
    reference: Reference, tower: VisionTower, case: str
) -> None:
    grid_thw = GRIDS[case]
    patches = random_patches(grid_thw, tower.config.patch_dim)
    found = _per_image(_levels(tower, patches, grid_thw), grid_thw)
    expected = _per_image(run_reference(reference.tower, patches, grid_thw), grid_thw)
    assert len(found[0]) == len(expected[0]) == (1 if reference.model_type in WITHOUT_LEVELS else 3)
    for grid, ours, theirs in zip(grid_thw, found, expected, strict=True):
        errors = [relative_error(a, b) for a, b in zip(ours, theirs, strict=True)]
        assert max(errors) < FLOAT32_TOLERANCE, f"{case}, grid {grid}: errors by level {errors}"


@pytest.mark.parametrize(("depth", "width", "heads"), [(12, 768, 12), (24, 1024, 16), (27, 1152, 16)])
def test_towers_of_published_sizes_of_qwen3_5(depth: int, width: int, heads: int) -> None:
    section = {"depth": depth, "hidden_size": width, "num_heads": heads, "intermediate_size": 90, "out_hidden_size": 48}
    reference = Qwen3_5VisionModel(Qwen3_5Config(vision_config=section).vision_config).eval().requires_grad_(False)
    randomise(reference, torch.Generator().manual_seed(0))
    config = VisionConfig.from_dict({"model_type": "qwen3_5", "dtype": "float32", "vision_config": section})
    tower = build_tower(config)
    weights = {name: weight.view(tower.get_parameter(name).shape) for name, weight in reference.state_dict().items()}
    tower.load_state_dict(weights, strict=True, assign=True)
    grid_thw = GRIDS["odd"][:2]
    patches = random_patches(grid_thw, config.patch_dim)
    [ours], [theirs] = _levels(tower, patches, grid_thw), run_reference(reference, patches, grid_thw)
    assert relative_error(ours, theirs) < FLOAT32_TOLERANCE


def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16(reference: Reference) -> None:
    grid_thw = GRIDS["odd"] + GRIDS["videos among images"] + GRIDS["extreme ratios"]
    tower = load_tower(reference.path, dtype=torch.bfloat16, device=CPU)
    patches = random_patches(grid_thw, tower.config.patch_dim)
    exact = run_reference(reference.tower, patches, grid_thw)
    theirs = run_reference(reference.in_bfloat16(), patches, grid_thw)
    for level, (a, b, c) in enumerate(zip(_levels(tower, patches, grid_thw), theirs, exact, strict=True)):
        ours_off, theirs_off = relative_error(a, c), relative_error(b, c)
        assert ours_off <= BFLOAT16_RATIO * theirs_off, f"level {level}: {ours_off} against {theirs_off}"


def test_an_image_alone_equals_the_image_among_others(tower: VisionTower) -> None:
    grid_thw = GRIDS["videos among images"] + GRIDS["40 images"][:10]
    patches = random_patches(grid_thw, tower.config.patch_dim)
    together = tower(patches, tower.prepare(grid_thw)).split([t * h * w // 4 for t, h, w in grid_thw])
    for grid, rows, among in zip(grid_thw, patches.split([t * h * w for t, h, w in grid_thw]), together, strict=True):
        alone = tower(rows, tower.prepare([grid]))
        assert relative_error(among, alone) < BATCH_TOLERANCE, f"grid {grid}"


def test_the_order_of_the_images_changes_nothing_but_the_order(tower: VisionTower) -> None:
    grid_thw = GRIDS["odd"] + GRIDS["videos among images"]
    parts = random_patches(grid_thw, tower.config.patch_dim).split([t * h * w for t, h, w in grid_thw])
    order = list(range(len(grid_thw)))
    random.Random(3).shuffle(order)

    def run(indices: Sequence[int]) -> tuple[Tensor, ...]:
        grids = [grid_thw[i] for i in indices]
        out = tower(torch.cat([parts[i] for i in indices]), tower.prepare(grids))
        return out.split([t * h * w // 4 for t, h, w in grids])

    straight, shuffled = run(range(len(grid_thw))), run(order)
    for place, index in enumerate(order):
        assert relative_error(shuffled[place], straight[index]) < BATCH_TOLERANCE, f"grid {grid_thw[index]}"


def test_another_image_gives_another_embedding(tower: VisionTower) -> None:
    """Guards the checks above: weights under which images look alike would let anything pass."""
    grid: list[Grid] = [(1, 16, 12)]
    first, second = (random_patches(grid, tower.config.patch_dim, seed) for seed in (1, 2))
    metadata = tower.prepare(grid)
    assert relative_error(tower(first, metadata), tower(second, metadata)) > 0.1


def test_frames_of_a_video_do_not_see_each_other(tower: VisionTower) -> None:
    grid: Grid = (3, 6, 10)
    patches = random_patches([grid], tower.config.patch_dim)
    changed = patches.clone()
    changed[60:120] += 1.0
    metadata = tower.prepare([grid])
    before, after = tower(patches, metadata).chunk(3), tower(changed, metadata).chunk(3)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert relative_error(after[1], before[1]) > 0.05


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_a_video_in_chunks_gives_the_rows_of_the_whole(tower: VisionTower, per_chunk: int) -> None:
    """Neither windows nor full attention cross temporal patches, so that chunks can be published one by one."""
    t, h, w = grid = (5, 10, 18)
    patches = random_patches([grid], tower.config.patch_dim)
    whole = tower(patches, tower.prepare([grid]))
    parts = []
    for start in range(0, t, per_chunk):
        count = min(per_chunk, t - start)
        rows = patches[start * h * w : (start + count) * h * w]
        image = random_patches([(1, 6, 8)], tower.config.patch_dim, start)
        packed = tower(torch.cat((image, rows)), tower.prepare([(1, 6, 8), (count, h, w)]))
        parts.append(packed[12:])
    assert relative_error(torch.cat(parts), whole) < BATCH_TOLERANCE


def test_patches_of_any_float_dtype_are_taken(tower: VisionTower) -> None:
    grid: list[Grid] = [(1, 6, 10)]
    patches = random_patches(grid, tower.config.patch_dim).to(torch.bfloat16)
    metadata = tower.prepare(grid)
    assert torch.equal(tower(patches, metadata), tower(patches.float(), metadata))


def test_patches_that_do_not_fit_the_grids_are_refused(tower: VisionTower) -> None:
    metadata = tower.prepare([(1, 6, 10)])
    with pytest.raises(ValueError, match=r"patches have shape \(56, \d+\), not \(60, \d+\)"):
        tower(torch.zeros(56, tower.config.patch_dim), metadata)
