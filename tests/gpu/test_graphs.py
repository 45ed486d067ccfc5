"""Graphs by budget against the forward they were captured from: layouts, padding, limits, memory."""

from __future__ import annotations

import pytest
import torch

from encoder.graph_inputs import GraphClass
from encoder.graphs import EncoderGraphs, GraphRefusedError, trial_batch
from encoder.metadata import TowerMetadata
from encoder.weights import VisionTower, load_tower
from tests.parity.reference_towers import Grid, make_reference, random_patches, relative_error

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BUDGETS = (1024, 512, 256, 64)
MAX_IMAGES = 8
# bfloat16: products of other row counts may be split otherwise, which changes single roundings.
TOLERANCE = 2e-2


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    path = make_reference(request.param, tmp_path_factory.mktemp(request.param)).path
    return load_tower(path, dtype=torch.bfloat16, device=CUDA)


def make_graphs(tower: VisionTower, tolerance: float = TOLERANCE) -> EncoderGraphs:
    return EncoderGraphs(
        tower,
        tower.prepare,
        tower.config,
        largest_budget=BUDGETS[0],
        max_images=MAX_IMAGES,
        tolerance=tolerance,
        dtype=torch.bfloat16,
        device=CUDA,
    )


@pytest.fixture(scope="module")
def graphs(tower: VisionTower) -> EncoderGraphs:
    made = make_graphs(tower)
    for budget in BUDGETS:
        made.capture(budget)
    return made


def batch(tower: VisionTower, grids: list[Grid], seed: int = 0) -> tuple[torch.Tensor, TowerMetadata]:
    torch.manual_seed(seed)
    return random_patches(grids, tower.config.patch_dim).to(CUDA), tower.prepare(grids)


def replayed(graphs: EncoderGraphs, patches: torch.Tensor, metadata: TowerMetadata) -> torch.Tensor:
    captured = graphs.fitting(metadata, metadata.num_tokens)
    assert captured is not None
    return graphs.replay(captured, patches, metadata).clone()


LAYOUTS: list[list[Grid]] = [
    [(1, 4, 4)],
    [(1, 16, 16)],
    [(1, 32, 128)],  # fills the largest budget
    [(1, 64, 64)],  # the same sum, another layout
    [(1, 8, 8)] * 8,
    [(1, 2, 2), (1, 2, 120), (1, 50, 6), (1, 6, 10)],
    [(3, 8, 12), (1, 10, 10)],
]


@torch.inference_mode()
def test_every_layout_equals_eager(tower: VisionTower, graphs: EncoderGraphs) -> None:
    for seed, grids in enumerate(LAYOUTS * 2):  # twice: what the first round left in the buffers must not matter
        patches, metadata = batch(tower, grids, seed)
        assert relative_error(replayed(graphs, patches, metadata), tower(patches, metadata)) <= TOLERANCE, grids


@torch.inference_mode()
def test_padding_is_inert(tower: VisionTower, graphs: EncoderGraphs) -> None:
    patches, metadata = batch(tower, [(1, 6, 10), (1, 8, 8)])
    captured = graphs.fitting(metadata, 64)
    assert captured is not None
    clean = graphs.replay(captured, patches, metadata).clone()
    graphs._inputs.spoil_padding(metadata, captured.shape)
    captured.graph.replay()
    spoiled = captured.output[: metadata.num_tokens]
    assert torch.isfinite(spoiled).all()
    assert torch.equal(spoiled, clean)


@torch.inference_mode()
def test_a_replay_does_not_reach_into_an_earlier_output(tower: VisionTower, graphs: EncoderGraphs) -> None:
    first, second = batch(tower, [(1, 16, 16)], 1), batch(tower, [(1, 64, 64)], 2)
    kept = replayed(graphs, *first)
    replayed(graphs, *second)
    assert relative_error(kept, tower(*first)) <= TOLERANCE


@torch.inference_mode()
def test_what_does_not_fit_is_refused(tower: VisionTower, graphs: EncoderGraphs) -> None:
    _, too_many = batch(tower, [(1, 4, 4)] * (MAX_IMAGES + 1))
    assert graphs.fitting(too_many, 1) is None
    patches, too_large = batch(tower, [(1, 66, 64)])
    assert graphs.fitting(too_large, 1) is None
    with pytest.raises(ValueError, match="does not fit"):
        graphs.replay(graphs.captured[1024], patches, too_large)


def test_a_graph_that_differs_is_not_used(tower: VisionTower) -> None:
    strict = make_graphs(tower, tolerance=-1.0)
    with pytest.raises(GraphRefusedError, match="budget 64"):
        strict.capture(64)
    assert strict.captured == {}


def test_trial_batches_leave_padding_and_use_several_images(tower: VisionTower) -> None:
    for budget in (64, 1024, 8192):
        shape = GraphClass.of(budget, 16, tower.config)
        metadata = tower.prepare(trial_batch(shape, tower.config))
        assert shape.holds(metadata)
        assert len(metadata.image_tokens) > 1
        assert metadata.num_tokens < budget


@torch.inference_mode()
def test_ten_thousand_random_batches(tower: VisionTower, graphs: EncoderGraphs) -> None:
    """No NaN, and memory does not grow."""
    generator = torch.Generator().manual_seed(3)

    def some(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    values = random_patches([(1, 64, 64)], tower.config.patch_dim).to(CUDA)
    bad = torch.zeros((), dtype=torch.int64, device=CUDA)
    memory = 0
    for number in range(10_000):
        grids = [(1, 2 * some(1, 8), 2 * some(1, 8)) for _ in range(some(1, MAX_IMAGES))]
        metadata = tower.prepare(grids)
        captured = graphs.fitting(metadata, metadata.num_tokens)
        assert captured is not None
        output = graphs.replay(captured, values[: metadata.num_patches], metadata)
        bad += (~torch.isfinite(output)).sum()
        if number == 1_000:
            torch.cuda.synchronize()
            memory = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert int(bad) == 0
    assert torch.cuda.memory_allocated() <= memory + 2**20
