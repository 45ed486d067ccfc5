"""Capturing, checking and timing without a device: what is recorded is run again on the CPU (`cpu_graphs`)."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.encoder_config import EncoderConfig
from encoder.budgets import default_budgets
from encoder.capturing import Capturing
from encoder.forwards import TowerForward
from encoder.geometry import Grid
from encoder.graph_inputs import GraphClass, GraphKey, whole
from encoder.graph_trials import timing_batch, trial_batch
from encoder.graphs import GraphRefusedError, NoRoomError
from encoder.grid_tables import GridTables
from encoder.metadata import TowerMetadata
from encoder.run_counts import Tally
from encoder.runner import TowerRunner
from encoder.weights import VisionTower, load_tower
from tests.unit.cpu_graphs import POOL_BYTES, CpuGraphs, without_a_device
from tests.unit.fake_graphs import borders_on_the_device, forward_of
from tests.unit.interpreter import interpreted
from training.checkpoints import make_checkpoint

CPU = torch.device("cpu")
CONFIG = EncoderConfig(encoder_cudagraph_token_budgets=(32, 64, 96), encoder_cudagraph_max_images_per_batch=6)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    path = make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoints") / request.param)
    return load_tower(path, dtype=torch.float32, device=CPU)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder.attention_backends.load", borders_on_the_device)
    without_a_device(monkeypatch.setattr)


def graphs_of(forward: TowerForward, tolerance: float | None = None) -> CpuGraphs:
    tables = GridTables(forward.config, CPU, 2**20)
    return CpuGraphs(forward, tables, largest_budget=96, max_images=6, tolerance=tolerance)


def test_a_graph_that_equals_its_forward_is_kept_and_timed(tower: VisionTower) -> None:
    graphs = graphs_of(forward_of(tower))
    for key in (whole(96, tower.config), whole(32, tower.config), GraphKey(96, 256)):
        captured = graphs.capture(key)
        assert captured.shape == GraphClass.of(key, 6, tower.config)
        assert captured.replay_ms > 0
        assert captured.pool_bytes == POOL_BYTES
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

    with pytest.raises(NoRoomError, match="no memory for the graph of budget 96"):
        graphs_of(dataclasses.replace(forward_of(tower), run=full)).capture(whole(96, tower.config))


def test_trial_batches_fit_leave_padding_and_use_several_images(tower: VisionTower) -> None:
    tables = GridTables(tower.config, CPU, 2**22)
    for key in (whole(64, tower.config), whole(1024, tower.config), whole(8192, tower.config), GraphKey(1024, 256)):
        shape = GraphClass.of(key, 16, tower.config)
        layout = tables.layout(trial_batch(shape, tower.config))
        assert layout is not None
        assert shape.holds(layout)
        assert len(layout.image_tokens) > 1
        assert layout.num_tokens < key.budget


def test_timing_batches_fit_fill_most_and_are_many_images_alike(tower: VisionTower) -> None:
    tables = GridTables(tower.config, CPU, 2**22)
    for budget in default_budgets():
        shape = GraphClass.of(whole(budget, tower.config), 16, tower.config)
        layout = tables.layout(timing_batch(shape, tower.config))
        assert layout is not None
        assert shape.holds(layout), budget
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


def test_everything_together_captures_plans_and_replays(tower: VisionTower) -> None:
    forward, tally = forward_of(tower), Tally()
    tables = GridTables(tower.config, CPU, 2**20)
    graphs = CpuGraphs(forward, tables, largest_budget=96, max_images=6)
    capturing = Capturing(graphs, CONFIG, tower.config, tally, activation_bytes=1000, length_classes=(256,))
    capturing.start(progress=False)
    assert set(graphs.captured) == {GraphKey(96, 384), GraphKey(64, 256), GraphKey(32, 128), GraphKey(96, 256)}
    assert capturing.costs.knows_work
    table = capturing.costs.table()
    assert table is not None
    assert table.budgets == (32, 64, 96)
    runner = TowerRunner(forward, CONFIG, tables=tables, capturing=capturing, tally=tally)
    grids: list[Grid] = [(1, 8, 8), (1, 6, 6), (1, 4, 30), (1, 22, 20), (1, 2, 2)]
    torch.manual_seed(0)
    images = [torch.randn(t * h * w, tower.config.patch_dim) for t, h, w in grids]
    for batch in runner.plan(grids):
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
from encoder import forwards, fused
from encoder.attention import AttentionBackend
from encoder.fused_attention import AttentionPlan, Way
from encoder.graph_inputs import GraphKey
from encoder.grid_tables import GridTables
from encoder.products import TorchProducts
from encoder.weights import load_tower
from tests.parity.reference_towers import make_reference, random_patches, relative_error
from tests.unit.cpu_graphs import CpuGraphs, without_a_device
from tests.unit.interpreter import many_rows_a_block_of_norms

many_rows_a_block_of_norms()
without_a_device(setattr)
eager = load_tower(make_reference(sys.argv[1], Path(sys.argv[2])).path, dtype=torch.float32, device=torch.device("cpu"))
turns = Way(AttentionBackend.TRITON, turns=True)
plan = AttentionPlan((64,), (turns, Way(AttentionBackend.TRITON)))
fused.fuse = lambda tower, asked: fused.FusedTower(tower, asked or plan, TorchProducts())
forwards._TRIAL[:] = [(1, 4, 6), (2, 2, 4)]
forward = forwards._fused(eager, EncoderConfig(), None)
assert (forward.name, forward.length_classes) == ("fused", (64,)), forward.length_classes
tables = GridTables(eager.config, torch.device("cpu"), 2**20)
graphs = CpuGraphs(forward, tables, largest_budget=12, max_images=4)
key = GraphKey(12, 24)
graphs.capture(key)
grids = [(1, 4, 6), (2, 2, 4)]
layout = tables.layout(grids)
patches = random_patches(grids, eager.config.patch_dim)
assert graphs.fitting(layout, layout.num_tokens) == key
error = relative_error(graphs.replay(key, patches, layout), eager(patches, eager.prepare(grids)))
assert error < 1e-5, error
try:
    forwards._tolerance = lambda tower: -1.0
    forwards._fused(eager, EncoderConfig(), None)
except forwards.FusionError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_a_fused_forward_is_checked_captured_and_replayed(model_type: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the fused towers are made of Triton's kernels")
    told = interpreted(FUSED, model_type, str(tmp_path))
    assert told.startswith("they differ from the eager tower by")
