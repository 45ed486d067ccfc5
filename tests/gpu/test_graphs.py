"""Graphs by budget against the forward they were captured from: layouts, padding, limits, memory."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import pytest
import torch

from configs.encoder_config import EncoderConfig
from encoder.forwards import TowerForward, choose_forward
from encoder.graphs.buffers import GraphCapacity, GraphKey, whole
from encoder.graphs.captured import EncoderGraphs, GraphRefusedError
from encoder.graphs.trial_batches import trial_batch
from encoder.metadata.device_tables import GridTables, Layout
from encoder.metadata.tower_metadata import TowerMetadata
from encoder.towers.tower import VisionTower
from encoder.towers.weights import load_tower
from tests.gpu.test_towers_gpu import synchronisation_is_an_error
from tests.parity.reference_towers import Grid, make_reference, random_patches, relative_error
from tests.unit.encoder.metadata.host_metadata import host_metadata

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


@pytest.fixture(scope="module", params=[False, "auto"])
def forward(request: pytest.FixtureRequest, tower: VisionTower) -> TowerForward:
    return choose_forward(tower, EncoderConfig(fused_kernels=request.param))


class Captured:
    """Graphs of every budget, and one of short images."""

    def __init__(self, forward: TowerForward, tolerance: float = TOLERANCE) -> None:
        self.forward = dataclasses.replace(forward, tolerance=tolerance)
        self.tables = GridTables(forward.config, CUDA, 2**22)
        self.graphs = EncoderGraphs(self.forward, self.tables, largest_budget=BUDGETS[0], max_images=MAX_IMAGES)

    def capture_all(self) -> Captured:
        for budget in BUDGETS:
            self.graphs.capture(whole(budget, self.forward.config))
        self.graphs.capture(GraphKey(512, 256))
        return self

    def batch(self, grids: list[Grid], seed: int = 0) -> tuple[torch.Tensor, Layout]:
        torch.manual_seed(seed)
        layout = self.tables.layout(grids)
        assert layout is not None
        return random_patches(grids, self.forward.config.patch_dim).to(CUDA), layout

    def replayed(self, patches: torch.Tensor, layout: Layout) -> torch.Tensor:
        key = self.graphs.find_graph(layout, layout.num_tokens)
        assert key is not None
        return self.graphs.replay(key, patches, layout).clone()


@pytest.fixture(scope="module")
def captured(forward: TowerForward) -> Captured:
    return Captured(forward).capture_all()


LAYOUTS: list[list[Grid]] = [
    [(1, 4, 4)],
    [(1, 16, 16)],
    [(1, 32, 128)],  # fills the largest budget
    [(1, 64, 64)],  # the same sum, another layout
    [(1, 8, 8)] * 8,
    [(1, 16, 16)] * 8,  # for the graph of short images
    [(1, 2, 2), (1, 2, 120), (1, 50, 6), (1, 6, 10)],
    [(3, 8, 12), (1, 10, 10)],
]


@torch.inference_mode()
def test_every_layout_equals_eager(tower: VisionTower, captured: Captured) -> None:
    for seed, grids in enumerate(LAYOUTS * 2):  # twice: what the first round left in the buffers must not matter
        patches, layout = captured.batch(grids, seed)
        expected = tower(patches, tower.prepare(grids))
        assert relative_error(captured.replayed(patches, layout), expected) <= 2 * TOLERANCE, grids


@torch.inference_mode()
def test_metadata_laid_out_on_the_device_is_the_hosts(captured: Captured) -> None:
    """The kernel, or plain torch for the eager tower: bit for bit."""
    for grids in LAYOUTS:
        layout = captured.tables.layout(grids)
        assert layout is not None
        found = captured.forward.exact_metadata(captured.tables, layout)
        expected = host_metadata(grids, captured.forward.config)
        for name in ("rope_positions", "position_indices", "position_weights", "window_order", "window_inverse"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours.cpu(), theirs), name
        assert torch.equal(found.frames.cu_seqlens.cpu(), expected.frames.cu_seqlens)
        if found.windows is not None and expected.windows is not None:
            assert torch.equal(found.windows.cu_seqlens.cpu(), expected.windows.cu_seqlens)


@torch.inference_mode()
def test_padding_is_inert(captured: Captured) -> None:
    patches, layout = captured.batch([(1, 6, 10), (1, 8, 8)])
    key = whole(64, captured.forward.config)
    clean = captured.graphs.replay(key, patches, layout).clone()
    graph, buffers = captured.graphs.captured[key], captured.graphs._buffers
    buffers.spoil_padding(layout, graph.shape)
    graph.graph.replay()
    spoiled = buffers.output(layout.num_tokens).clone()
    buffers.clear()
    assert torch.isfinite(spoiled).all()
    assert torch.equal(spoiled, clean)


@torch.inference_mode()
def test_a_replay_does_not_reach_into_an_earlier_output(tower: VisionTower, captured: Captured) -> None:
    first, second = captured.batch([(1, 16, 16)], 1), captured.batch([(1, 64, 64)], 2)
    kept = captured.replayed(*first)
    captured.replayed(*second)
    assert relative_error(kept, tower(first[0], tower.prepare([(1, 16, 16)]))) <= 2 * TOLERANCE


@torch.inference_mode()
def test_a_replay_of_known_grids_waits_for_nothing(captured: Captured) -> None:
    grids: list[Grid] = [(1, 16, 16), (1, 8, 8)]
    patches, layout = captured.batch(grids)
    before = captured.replayed(patches, layout)
    with synchronisation_is_an_error():
        again = captured.tables.layout(grids)
        assert again is not None
        output = captured.replayed(patches, again)
    assert torch.equal(before, output)


@torch.inference_mode()
def test_what_does_not_fit_is_refused(captured: Captured) -> None:
    graphs = captured.graphs
    _, too_many = captured.batch([(1, 4, 4)] * (MAX_IMAGES + 1))
    assert graphs.find_graph(too_many, 1) is None
    patches, too_large = captured.batch([(1, 66, 64)])
    assert graphs.find_graph(too_large, 1) is None
    with pytest.raises(ValueError, match="does not fit"):
        graphs.replay(whole(1024, captured.forward.config), patches, too_large)
    _, long = captured.batch([(1, 32, 40)])
    assert graphs.find_graph(long, 300) == whole(512, captured.forward.config), "not the graph of short images"
    _, short = captured.batch([(1, 16, 16)] * 5)
    assert graphs.find_graph(short, 300) == GraphKey(512, 256)


def test_a_graph_that_differs_is_not_used(forward: TowerForward) -> None:
    strict = Captured(forward, tolerance=-1.0).graphs
    with pytest.raises(GraphRefusedError, match="budget 64"):
        strict.capture(whole(64, forward.config))
    assert strict.captured == {}


@torch.inference_mode()
def test_a_capture_that_breaks_off_leaves_the_device_usable(forward: TowerForward) -> None:
    """After one the pool stayed with it, and random numbers could not be drawn in the whole process."""
    calls = itertools.count(1)

    def breaking(patches: torch.Tensor, metadata: TowerMetadata) -> torch.Tensor:
        if next(calls) == 2:  # the first is what the graph is compared with, the second is captured
            torch.cuda.synchronize()
        return forward.run(patches, metadata)

    broken = Captured(dataclasses.replace(forward, run=breaking, run_into=None))
    for budget in (512, 64):
        broken.graphs.capture(whole(budget, forward.config))
    assert (len(broken.graphs.captured), broken.graphs.runs_before_capture) == (2, 1)
    assert torch.randn(8, device=CUDA).isfinite().all()
    patches, layout = broken.batch([(1, 8, 8)])
    expected = forward.run(patches, forward.exact_metadata(broken.tables, layout))
    assert relative_error(broken.replayed(patches, layout), expected) <= TOLERANCE


@torch.inference_mode()
def test_memory_of_other_threads_is_not_counted_as_the_graphs(forward: TowerForward) -> None:
    """It was: a graph's bytes were the growth of all memory that the process had reserved."""
    kept: list[torch.Tensor] = []

    def allocate() -> None:
        kept.append(torch.empty(2**28, dtype=torch.uint8, device=CUDA))

    def beside_another(patches: torch.Tensor, metadata: TowerMetadata) -> torch.Tensor:
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        return forward.run(patches, metadata)

    captured = Captured(dataclasses.replace(forward, run=beside_another, run_into=None))
    grown = captured.graphs.begin(whole(512, forward.config))
    assert len(kept) == 2, "once beside the forward itself and once beside the capture"
    assert 0 < grown < 2**28


def test_trial_batches_leave_padding_and_use_several_images(tower: VisionTower) -> None:
    tables = GridTables(tower.config, CUDA, 2**22)
    for key in (whole(64, tower.config), whole(1024, tower.config), whole(8192, tower.config), GraphKey(1024, 256)):
        shape = GraphCapacity.for_key(key, 16, tower.config)
        layout = tables.layout(trial_batch(shape, tower.config))
        assert layout is not None
        assert shape.fits(layout)
        assert len(layout.image_tokens) > 1
        assert layout.num_tokens < key.budget


@torch.inference_mode()
def test_ten_thousand_random_batches(captured: Captured) -> None:
    """No NaN, and memory does not grow, though the arena is forgotten and filled anew on the way."""
    generator = torch.Generator().manual_seed(3)

    def some(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    values = random_patches([(1, 64, 64)], captured.forward.config.patch_dim).to(CUDA)
    bad = torch.zeros((), dtype=torch.int64, device=CUDA)
    memory = 0
    for number in range(10_000):
        grids = [(1, 2 * some(1, 8), 2 * some(1, 8)) for _ in range(some(1, MAX_IMAGES))]
        layout = captured.tables.layout(grids)
        assert layout is not None
        key = captured.graphs.find_graph(layout, layout.num_tokens)
        assert key is not None
        output = captured.graphs.replay(key, values[: layout.num_patches], layout)
        bad += (~torch.isfinite(output)).sum()
        if number == 1_000:
            torch.cuda.synchronize()
            memory = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert int(bad) == 0
    assert torch.cuda.memory_allocated() <= memory + 2**20
