"""GraphCapturer, checking and timing without a device: what is recorded is run again on the CPU (`cpu_graphs`)."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.encoder_config import EncoderConfig
from encoder.forwards import TowerForward
from encoder.graphs.budgets import default_budgets
from encoder.graphs.buffers import GraphCapacity, GraphKey, whole
from encoder.graphs.capture import GraphCapturer
from encoder.graphs.captured import EncoderGraphs, GraphMemoryError, GraphRefusedError
from encoder.graphs.trial_batches import timing_batch, trial_batch
from encoder.metadata.device_tables import GridTables, StaleLayoutError
from encoder.metadata.geometry import Grid
from encoder.metadata.tower_metadata import TowerMetadata
from encoder.packing.run_counts import RunCounts
from encoder.runner import TowerRunner
from encoder.towers.tower import VisionTower
from encoder.towers.weights import load_tower
from tests.unit.encoder.graphs.cpu_graphs import POOL_BYTES, CpuGraphs, without_a_device
from tests.unit.encoder.graphs.fake_graphs import borders_on_the_device, forward_of
from tests.unit.encoder.interpreter import Interpreted
from tests.unit.encoder.metadata.host_metadata import host_metadata
from training.checkpoints import make_checkpoint

CPU = torch.device("cpu")
CONFIG = EncoderConfig(encoder_cudagraph_token_budgets=(32, 64, 96), encoder_cudagraph_max_images_per_batch=6)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    path = make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoints") / request.param)
    return load_tower(path, dtype=torch.float32, device=CPU)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder.towers.backends.load", borders_on_the_device)
    without_a_device(monkeypatch.setattr)


def graphs_of(forward: TowerForward) -> CpuGraphs:
    tables = GridTables(forward.config, CPU, 2**20)
    return CpuGraphs(forward, tables, largest_budget=96, max_images=6)


def test_a_graph_that_equals_its_forward_is_kept_and_timed(tower: VisionTower) -> None:
    graphs = graphs_of(forward_of(tower))
    for key in (whole(96, tower.config), whole(32, tower.config), GraphKey(96, 256)):
        assert graphs.begin(key) == POOL_BYTES
        captured = graphs.finish(key)
        assert captured.shape == GraphCapacity.for_key(key, 6, tower.config)
        assert captured.replay_ms > 0
        assert sum(t * h * w for t, h, w in captured.grids) < 4 * key.budget, "it was checked with padding"
        assert graphs.replay_ms(key, captured.grids) > 0
    assert graphs.eager_ms([(1, 8, 8)]) > 0
    assert not graphs._buffers.patches(96).isnan().any(), "nothing of the check is left behind"


def test_padding_that_reaches_real_rows_is_refused(tower: VisionTower) -> None:
    def leaking(patches: Tensor, metadata: TowerMetadata) -> Tensor:
        return tower(patches, metadata) + 0 * patches.sum()

    graphs = graphs_of(dataclasses.replace(forward_of(tower), run=leaking))
    with pytest.raises(GraphRefusedError, match=r"budget 96 .* differs from its forward by inf"):
        graphs.capture(whole(96, tower.config))
    assert graphs.captured == {}


class OffGraphs(CpuGraphs):
    """Graphs whose replays give 1.1 times what they should."""

    def _record(self, shape: GraphCapacity) -> tuple[torch.cuda.CUDAGraph, int]:
        graph, num_bytes = super()._record(shape)
        recorded = graph.replay

        def replay() -> None:
            recorded()
            self._buffers.output(shape.key.budget).mul_(1.1)

        graph.replay = replay  # type: ignore[method-assign]
        return graph, num_bytes


@pytest.mark.parametrize(("made", "off_by"), [(CpuGraphs, None), (OffGraphs, "1.00e-01, the limit is 1.00e-03")])
def test_a_graph_is_compared_with_its_forward_in_the_same_numerics(
    tower: VisionTower, made: type[CpuGraphs], off_by: str | None
) -> None:
    """With fp8 a graph could differ from its forward by 20 % and was used: a graph of many rows is in 8 bits where its
    forward of fewer is not, and what that allows was the only limit."""

    def numerics_by_rows(patches: Tensor, metadata: TowerMetadata) -> Tensor:
        return tower(patches, metadata) * (1.0 if len(patches) < 4 * 96 else 0.95)

    forward = dataclasses.replace(forward_of(tower), run=numerics_by_rows, tolerance=0.2, same_rows_tolerance=1e-3)
    graphs = made(forward, GridTables(forward.config, CPU, 2**20), largest_budget=96, max_images=6)
    key = whole(96, tower.config)
    if off_by is None:
        assert graphs.capture(key).shape == GraphCapacity.for_key(key, 6, tower.config)
        return
    with pytest.raises(GraphRefusedError, match=off_by):
        graphs.capture(key)


def failing_at(tower: VisionTower, *numbers: int) -> TowerForward:
    """A forward whose calls of these numbers fail. The first is what a graph is compared with."""
    calls = itertools.count(1)

    def run(patches: Tensor, metadata: TowerMetadata) -> Tensor:
        if next(calls) in numbers:
            raise RuntimeError("operation not permitted when stream is capturing")
        return tower(patches, metadata)

    return dataclasses.replace(forward_of(tower), run=run)


def test_what_has_to_run_before_it_can_be_captured_is_run(tower: VisionTower) -> None:
    graphs = graphs_of(failing_at(tower, 2))
    for budget in (96, 32):
        graphs.capture(whole(budget, tower.config))
    assert (len(graphs.captured), graphs.runs_before_capture) == (2, 1)


def test_what_compiles_is_run_before_every_capture(tower: VisionTower) -> None:
    """A compiler within a capture broke it, and with it the pool and the random numbers of the whole process: graphs of
    a compiled tower were all refused, and whatever was made after them failed."""
    forward = dataclasses.replace(failing_at(tower, 3), name="compiled")
    with pytest.raises(GraphRefusedError, match="operation not permitted"):
        graphs_of(forward).capture(whole(96, tower.config))  # the third call is the capture's, after two runs
    graphs = graphs_of(dataclasses.replace(forward_of(tower), name="compiled"))
    for budget in (96, 32):
        graphs.capture(whole(budget, tower.config))
    assert (len(graphs.captured), graphs.runs_before_capture) == (2, 2)


def test_a_forward_that_fails_while_it_is_captured_is_refused(tower: VisionTower) -> None:
    graphs = graphs_of(failing_at(tower, 2, 4))  # as it is captured, and once more after a run
    with pytest.raises(GraphRefusedError, match="budget 96 cannot be captured: operation not permitted"):
        graphs.capture(whole(96, tower.config))

    def full(patches: Tensor, metadata: TowerMetadata) -> Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(GraphMemoryError, match="not enough memory for the graph of budget 96"):
        graphs_of(dataclasses.replace(forward_of(tower), run=full)).capture(whole(96, tower.config))


def test_trial_batches_fit_leave_padding_and_use_several_images(tower: VisionTower) -> None:
    tables = GridTables(tower.config, CPU, 2**22)
    for key in (whole(64, tower.config), whole(1024, tower.config), whole(8192, tower.config), GraphKey(1024, 256)):
        shape = GraphCapacity.for_key(key, 16, tower.config)
        layout = tables.layout(trial_batch(shape, tower.config))
        assert layout is not None
        assert shape.fits(layout)
        assert len(layout.image_tokens) > 1
        assert layout.num_tokens < key.budget


def test_timing_batches_fit_fill_most_and_are_many_images_alike(tower: VisionTower) -> None:
    tables = GridTables(tower.config, CPU, 2**22)
    for budget in default_budgets():
        shape = GraphCapacity.for_key(whole(budget, tower.config), 16, tower.config)
        layout = tables.layout(timing_batch(shape, tower.config))
        assert layout is not None
        assert shape.fits(layout), budget
        assert len(set(layout.image_tokens)) == 1
        assert len(layout.image_tokens) == 16
        assert 0.7 * budget <= layout.num_tokens <= budget


def test_graphs_and_eager_runs_are_timed_in_one_queue(tower: VisionTower) -> None:
    graphs = graphs_of(forward_of(tower))
    keys = [whole(96, tower.config), whole(32, tower.config)]
    for key in keys:
        graphs.capture(key)
    replays, eager = graphs.sustained_ms(keys, [[(1, 8, 8)], [(1, 4, 4)], [(1, 8, 4)]])
    assert (len(replays), len(eager)) == (2, 3)
    assert min(replays + eager) > 0


class _RecordedInPlace:
    """A CUDA graph on the CPU: what is captured runs at once, and its output stays where a replay would put it."""

    def capture_begin(self, **_: object) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...


def test_memory_of_other_threads_is_not_counted_as_the_graphs(
    tower: VisionTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's bytes were the growth of all memory that the process had reserved: what another thread allocated while
    it was captured was counted as the graph's, and later graphs found no room within their bound."""
    pools: dict[tuple[int, int], list[int]] = {(0, 0): [2**20]}
    forward = forward_of(tower)

    def allocating(patches: Tensor, metadata: TowerMetadata) -> Tensor:
        pools[0, 0].append(2**30)  # another thread's
        pools.setdefault(handle, []).append(3 * 2**20)
        return tower(patches, metadata)

    handle = (0, 7)
    for name, stand_in in {
        "CUDAGraph": _RecordedInPlace,
        "graph_pool_handle": lambda: handle,
        "memory_reserved": lambda *_: sum(map(sum, pools.values())),
        "memory_snapshot": lambda pool, include_traces: [{"total_size": size} for size in pools.get(pool, ())],
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    tables = GridTables(tower.config, CPU, 2**20)
    forward = dataclasses.replace(forward, run=allocating, tolerance=float("inf"))
    graphs = EncoderGraphs(forward, tables, largest_budget=96, max_images=6)
    assert graphs.begin(whole(96, tower.config)) == 3 * 2**20


@pytest.mark.parametrize("failing", ["capture_end", "replay"])
def test_a_device_without_memory_refuses_no_graph(
    tower: VisionTower, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The driver's own memory, which torch does not allocate: three such graphs were taken for graphs that cannot be
    captured, and the encoder ran without any."""
    calls: list[str] = []

    class Full(_RecordedInPlace):
        """The device has no memory for what is captured."""

    def fail(_: object) -> None:
        calls.append(failing)
        raise torch.AcceleratorError("CUDA error: out of memory")

    setattr(Full, failing, fail)
    handles = itertools.count()
    for name, stand_in in {
        "CUDAGraph": Full,
        "graph_pool_handle": lambda: (0, next(handles)),
        "memory_snapshot": lambda pool, include_traces: [],
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    tables = GridTables(tower.config, CPU, 2**20)
    graphs = EncoderGraphs(forward_of(tower), tables, largest_budget=96, max_images=6)
    first = graphs.pool
    with pytest.raises(GraphMemoryError, match="not enough memory for the graph of budget 96"):
        graphs.begin(whole(96, tower.config))
    assert calls == [failing], "it is not tried again"
    assert (graphs.pool != first) == (failing == "capture_end")


def test_layouts_are_not_used_after_the_arena_was_overwritten(tower: VisionTower) -> None:
    """Layouts of all eager batches were made before the first graph's own grids were placed. Where these overfilled the
    arena, eager runs read other grids' numbers: window orders past their end, which is a device assertion on a GPU.
    """
    read: list[TowerMetadata] = []

    def reading(patches: Tensor, metadata: TowerMetadata) -> Tensor:
        read.append(metadata)
        return tower(patches, metadata)

    forward = dataclasses.replace(forward_of(tower), run=reading)
    batches: list[list[Grid]] = [[(1, 8, 10), (1, 2, 2)], [(1, 4, 12)], [(1, 6, 20)]]
    keys = [whole(96, tower.config), whole(32, tower.config)]
    # One number short of room for the batches' grids and those that the graphs are timed with.
    timed = [timing_batch(GraphCapacity.for_key(key, 6, tower.config), tower.config)[0] for key in keys]
    grids_in_all = {grid for batch in [*batches, timed] for grid in batch}
    roomy = GridTables(tower.config, CPU, 2**20)
    roomy.warm(sorted(grids_in_all))
    tables = GridTables(tower.config, CPU, 4 * (roomy._end - 1))
    graphs = CpuGraphs(forward, tables, largest_budget=96, max_images=6)
    for key in keys:
        graphs.capture(key)
    read.clear()
    graphs.sustained_ms(keys, batches)
    for grids in batches:
        expected = host_metadata(grids, tower.config)
        (found,) = (one for one in read if one.num_tokens == expected.num_tokens)
        assert torch.equal(found.rope_positions, expected.rope_positions)
        for name in ("position_indices", "window_order", "window_inverse"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert (ours is None and theirs is None) or torch.equal(ours, theirs), name


def test_a_layout_of_an_overwritten_arena_is_refused(tower: VisionTower) -> None:
    tables = GridTables(tower.config, CPU, 4 * 10 * 100)
    layout = tables.layout([(1, 4, 8)])
    assert layout is not None
    layout.device_description(4, CPU)
    number = 4
    while tables.layout([(1, 4, 8)]) is layout:
        number += 2
        tables.layout([(1, 2, number)])
    with pytest.raises(StaleLayoutError, match="overwritten"):
        layout.device_description(4, CPU)
    again = tables.layout([(1, 4, 8)])
    assert again is not None
    again.device_description(4, CPU)


def test_everything_together_captures_plans_and_replays(tower: VisionTower) -> None:
    forward, tally = forward_of(tower), RunCounts()
    tables = GridTables(tower.config, CPU, 2**20)
    graphs = CpuGraphs(forward, tables, largest_budget=96, max_images=6)
    capturing = GraphCapturer(graphs, CONFIG, tower.config, tally, activation_bytes=1000, length_classes=(256,))
    capturing.start()
    assert set(graphs.captured) == {GraphKey(96, 384), GraphKey(64, 256), GraphKey(32, 128), GraphKey(96, 256)}
    assert capturing.costs.knows_work
    table = capturing.costs.table()
    assert table is not None
    assert table.budgets == (32, 64, 96)
    runner = TowerRunner(forward, CONFIG, tables=tables, capturer=capturing, counts=tally)
    grids: list[Grid] = [(1, 8, 8), (1, 6, 6), (1, 4, 30), (1, 22, 20), (1, 2, 2)]
    torch.manual_seed(0)
    images = [torch.randn(t * h * w, tower.config.patch_dim) for t, h, w in grids]
    for batch in runner.plan_batches(grids):
        some = [grids[index] for index in batch.indices]
        patches = torch.cat([images[index] for index in batch.indices])
        found = runner.run(patches, some, batch.budget)
        expected = tower(patches, tower.prepare(some))
        assert torch.dist(found, expected) <= 1e-5 * torch.linalg.norm(expected)


FUSED = """
import sys
from pathlib import Path
import torch
from configs.encoder_config import EncoderConfig
from encoder import forwards, start_check
from encoder.fused import compile_ahead
from encoder.fused import tower as fused
from encoder.metadata.segments import AttentionBackend
from encoder.fused.rope_attention import AttentionKernel, AttentionPlan
from encoder.graphs.buffers import GraphKey
from encoder.metadata.device_tables import GridTables, StaleLayoutError
from encoder.towers.weights import load_tower
from tests.parity.reference_towers import make_reference, random_patches, relative_error
from tests.unit.encoder.graphs.cpu_graphs import CpuGraphs, without_a_device
from tests.unit.encoder.interpreter import many_rows_a_block_of_norms

many_rows_a_block_of_norms()
without_a_device(setattr)
eager = load_tower(make_reference(sys.argv[1], Path(sys.argv[2])).path, dtype=torch.float32, device=torch.device("cpu"))
turns = AttentionKernel(AttentionBackend.TRITON, rotates=True)
plan = AttentionPlan((64,), (turns, AttentionKernel(AttentionBackend.TRITON)))
fused.fuse = lambda tower, asked, gemm: fused.FusedTower(tower, asked or plan, gemm)
start_check.BATCHES = (((1, 4, 6), (2, 2, 4)),)
forward = forwards._fused(eager, EncoderConfig(), None)
assert (forward.name, forward.length_classes) == ("fused", (64,)), forward.length_classes
ran = []
compile_ahead.compile_ahead = lambda run, batches: ran.extend((grids, run(grids)) for grids in batches)
forward.run.compile_kernels(start_check.BATCHES)
assert ran == []  # cuBLAS has nothing to compile
forward.run.gemm.rotates = True
forward.run.compile_kernels(start_check.BATCHES)
assert ran == [(start_check.BATCHES[0], None)]
del forward.run.gemm.rotates
tables = GridTables(eager.config, torch.device("cpu"), 2**20)
graphs = CpuGraphs(forward, tables, largest_budget=12, max_images=4)
key = GraphKey(12, 24)
graphs.capture(key)
grids = [(1, 4, 6), (2, 2, 4)]
layout = tables.layout(grids)
patches = random_patches(grids, eager.config.patch_dim)
assert graphs.find_graph(layout, layout.num_tokens) == key
error = relative_error(graphs.replay(key, patches, layout), eager(patches, eager.prepare(grids)))
assert error < 1e-5, error
try:
    start_check.TOLERANCES = {torch.float32: 0.0}
    forwards._fused(eager, EncoderConfig(), None)
except start_check.FusionError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_a_fused_forward_is_checked_captured_and_replayed(
    interpreted: Interpreted, model_type: str, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="the fused towers are made of Triton's kernels")
    told = interpreted(FUSED, model_type, str(tmp_path))
    assert told.startswith("they differ from float32 by")
