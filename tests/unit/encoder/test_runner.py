"""Replays equal eager runs whatever is in their padding, outputs are the caller's, and every fallback has a reason."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Literal, cast

import pytest
import torch

from configs.encoder_config import EncoderConfig
from encoder.forwards import TowerForward, choose_forward
from encoder.graphs.budgets import default_budgets, tight_keys, whole_keys
from encoder.graphs.buffers import GraphKey
from encoder.graphs.capture import GraphCapturer
from encoder.graphs.captured import EncoderGraphs
from encoder.metadata.device_tables import GridTables
from encoder.metadata.geometry import Grid
from encoder.packing.run_counts import Reason, RunCounts, RunRecord
from encoder.runner import CPU_WORTHWHILE_TOKENS, TowerRunner
from encoder.towers.backends import BackendUnavailableError
from encoder.towers.tower import VisionTower
from tests.programs import output_of_python
from tests.unit.encoder.graphs.fake_graphs import FakeGraphs, borders_on_the_device, forward_of

CPU = torch.device("cpu")
BUDGETS = (16, 32, 64)
CONFIG = EncoderConfig(encoder_cudagraph_token_budgets=BUDGETS, encoder_cudagraph_max_images_per_batch=4)
# Products of other shapes are summed in another order: float32 rounding.
ROUNDING = 1e-5

LAYOUTS: list[list[Grid]] = [
    [(1, 4, 4)],
    [(1, 16, 16)],  # fills the largest budget
    [(1, 8, 32)],  # the same sum, another layout
    [(1, 8, 8)] * 4,
    [(1, 2, 2), (1, 2, 20), (1, 10, 6)],
    [(3, 4, 8), (1, 6, 6)],  # a video of three frames
]


@pytest.fixture(autouse=True)
def _attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder.towers.backends.load", borders_on_the_device)


def make(
    tower: VisionTower, config: EncoderConfig = CONFIG, *, bad: tuple[int, ...] = (), arena_bytes: int = 2**20
) -> tuple[TowerRunner, FakeGraphs]:
    forward, tally = forward_of(tower), RunCounts()
    tables = GridTables(tower.config, CPU, arena_bytes)
    budgets = config.encoder_cudagraph_token_budgets
    assert budgets != "auto"
    graphs = FakeGraphs(forward, tables, max(budgets), config.encoder_cudagraph_max_images_per_batch)
    graphs.bad |= set(bad)
    capturing = GraphCapturer(cast(EncoderGraphs, graphs), config, tower.config, tally, activation_bytes=1000)
    capturing.start()
    return TowerRunner(forward, config, tables=tables, capturer=capturing, counts=tally), graphs


def patches_of(tower: VisionTower, grids: list[Grid], seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(sum(t * h * w for t, h, w in grids), tower.config.patch_dim)


def expected_of(tower: VisionTower, patches: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
    with torch.inference_mode():
        return tower(patches, tower.prepare(grids))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.dist(found, expected) <= ROUNDING * torch.linalg.norm(expected)


def tokens_of(grids: list[Grid]) -> int:
    return sum(t * h * w for t, h, w in grids) // 4


def test_every_layout_equals_the_plain_tower(tower: VisionTower) -> None:
    """Twice: what the first round left in the buffers must not matter."""
    runner, graphs = make(tower)
    for seed, grids in enumerate(LAYOUTS * 2):
        patches = patches_of(tower, grids, seed)
        assert_close(runner.run(patches, grids, tokens_of(grids)), expected_of(tower, patches, grids))
        assert runner.last_run == RunRecord(graphs.replayed[-1].budget, None, tokens_of(grids), len(grids))
    assert len(graphs.replayed) == 2 * len(LAYOUTS)
    assert set(graphs.captured) == set(whole_keys(BUDGETS, 4))
    counts = runner.counts
    assert (counts.replays, counts.eager_runs, counts.captures) == (2 * len(LAYOUTS), {}, 3)
    real = 2 * sum(tokens_of(grids) for grids in LAYOUTS)
    assert (counts.tokens, counts.replayed_tokens) == (real, real)
    assert counts.padding_tokens == sum(key.budget for key in graphs.replayed) - real
    assert counts.grid_hits > counts.grid_misses > 0


def test_an_output_is_safe_from_the_next_replay(tower: VisionTower) -> None:
    runner, _ = make(tower)
    first, second = patches_of(tower, [(1, 8, 8)], 1), patches_of(tower, [(1, 8, 8)], 2)
    kept = runner.run(first, [(1, 8, 8)], 16)
    runner.run(second, [(1, 8, 8)], 16)
    assert_close(kept, expected_of(tower, first, [(1, 8, 8)]))


def test_eager_runs_equal_the_plain_tower_and_say_why(tower: VisionTower) -> None:
    runner, graphs = make(tower, bad=(16, 32))
    cases: list[tuple[list[Grid], int | None, Reason]] = [
        ([(1, 18, 16)], None, Reason.OVER_LARGEST),
        ([(1, 8, 8)], None, Reason.CHEAPER),
        ([(5, 4, 4)], 32, Reason.SEGMENTS),
        ([(1, 2, 2)] * 5, 32, Reason.SEGMENTS),
    ]
    for grids, budget, reason in cases:
        before = runner.counts.eager_runs.get(reason, 0)
        patches = patches_of(tower, grids)
        assert_close(runner.run(patches, grids, budget), expected_of(tower, patches, grids))
        assert runner.counts.eager_runs[reason] == before + 1, grids
        assert runner.last_run == RunRecord(None, reason, tokens_of(grids), len(grids))
    assert graphs.replayed == []
    assert runner.counts.refusals == 2
    runner.run(patches_of(tower, [(1, 4, 4)]), [(1, 4, 4)], 16)
    assert graphs.replayed == [GraphKey(64, 256)], "a refused graph's batches go to a larger one"


def test_what_was_not_captured_is_told_apart(tower: VisionTower) -> None:
    grids, patches = [(1, 4, 4)], patches_of(tower, [(1, 4, 4)])
    for config, bad, reason in (
        (dataclasses.replace(CONFIG, graph_capture="on_demand"), (), Reason.NOT_CAPTURED),
        (CONFIG, BUDGETS, Reason.REFUSED),
        (dataclasses.replace(CONFIG, encoder_cudagraph_memory_bytes=1), (), Reason.MEMORY),
    ):
        for budget in (16, None):
            runner, graphs = make(tower, config, bad=bad)
            assert_close(runner.run(patches, grids, budget), expected_of(tower, patches, grids))
            assert (dict(runner.counts.eager_runs), graphs.captured) == ({reason: 1}, {})


def test_grids_over_the_arena_run_eagerly(tower: VisionTower) -> None:
    runner, _ = make(tower, arena_bytes=4 * 10 * 64)
    grids: list[Grid] = [(1, 16, 16)]
    patches = patches_of(tower, grids)
    assert_close(runner.run(patches, grids, 64), expected_of(tower, patches, grids))
    assert runner.counts.eager_runs == {Reason.ARENA: 1}


def test_the_plan_is_by_measured_cost_or_the_seeds_rule(tower: VisionTower) -> None:
    grids: list[Grid] = [(1, 8, 8), (1, 4, 4), (1, 16, 12), (1, 30, 30)]
    runner, _ = make(tower)
    batches = runner.plan_batches(grids)
    assert sorted(index for batch in batches for index in batch.indices) == [0, 1, 2, 3]
    assert [batch for batch in batches if batch.budget is None] == [next(b for b in batches if b.indices == (3,))]
    greedy, _ = make(tower, dataclasses.replace(CONFIG, packing="greedy"))
    assert [(batch.indices, batch.budget) for batch in greedy.plan_batches(grids)] == [
        ((1, 0), 32),
        ((2,), 64),
        ((3,), None),
    ]
    lazy, _ = make(tower, dataclasses.replace(CONFIG, packing="greedy", graph_capture="on_demand"))
    lazy.run(patches_of(tower, [(1, 4, 4)]), [(1, 4, 4)], 16)
    assert lazy.idle_step()
    assert lazy.plan_batches(grids) == greedy.plan_batches(grids), "not by the one budget that is captured"
    with pytest.raises(ValueError, match=r"grid \(1, 3, 4\)"):
        runner.plan_batches([(1, 3, 4)])


def test_a_graph_slower_than_eager_is_not_used(tower: VisionTower) -> None:
    forward, tally = forward_of(tower), RunCounts()
    tables = GridTables(tower.config, CPU, 2**20)
    graphs = FakeGraphs(forward, tables, 64, 4, ms=lambda budget: 9.0, eager=lambda tokens: 1.0 + tokens / 1000)
    capturing = GraphCapturer(cast(EncoderGraphs, graphs), CONFIG, tower.config, tally, activation_bytes=1000)
    capturing.start()
    runner = TowerRunner(forward, CONFIG, tables=tables, capturer=capturing, counts=tally)
    assert [batch.budget for batch in runner.plan_batches([(1, 8, 8)])] == [None]


def test_lazily_captured_graphs_are_replayed_afterwards(tower: VisionTower) -> None:
    runner, graphs = make(tower, dataclasses.replace(CONFIG, graph_capture="on_demand"))
    assert not runner.idle_step(), "nothing was asked for"
    grids: list[Grid] = [(1, 8, 8)]
    patches = patches_of(tower, grids)
    (batch,) = runner.plan_batches(grids)
    runner.run(patches, grids, batch.budget)
    assert runner.idle_step()
    assert list(graphs.captured) == [GraphKey(16, 64)]
    (batch,) = runner.plan_batches(grids)
    assert_close(runner.run(patches, grids, batch.budget), expected_of(tower, patches, grids))
    assert graphs.replayed == [GraphKey(16, 64)]
    assert runner.counts.eager_runs == {Reason.NOT_CAPTURED: 1}


def test_the_tightest_graph_that_holds_the_batch_is_taken(tower: VisionTower) -> None:
    runner, graphs = make(tower)
    graphs.capture(GraphKey(64, 64))
    for grids, key in (
        ([(1, 8, 8)] * 3, GraphKey(64, 64)),
        ([(1, 8, 10)] * 2 + [(1, 2, 16)], GraphKey(64, 256)),
    ):
        patches = patches_of(tower, grids)
        assert_close(runner.run(patches, grids, tokens_of(grids)), expected_of(tower, patches, grids))
        assert graphs.replayed[-1] == key


def test_on_a_cpu_everything_runs_eagerly_as_packed_by_the_seeds_rule(
    tower: VisionTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    config = EncoderConfig(fused_kernels="auto", cudagraph_mm_encoder="auto")
    runner = TowerRunner.build(choose_forward(tower, config), config)
    grids: list[Grid] = [(1, 8, 8), (1, 4, 4)]
    (batch,) = runner.plan_batches(grids)
    assert (batch.indices, batch.budget) == ((1, 0), 2048)
    patches = patches_of(tower, grids)
    assert torch.equal(runner.run(patches, grids, 2048), expected_of(tower, patches, grids))
    assert runner.counts.eager_runs == {Reason.NO_GPU: 1}
    assert (runner.counts.grid_hits, runner.counts.grid_misses) == (0, 2)
    runner.warm([(1, 6, 6)])
    runner.run(patches_of(tower, [(1, 6, 6), (1, 8, 8)]), [(1, 6, 6), (1, 8, 8)], 2048)
    assert (runner.counts.grid_hits, runner.counts.grid_misses) == (2, 2)
    assert not runner.idle_step()
    assert (runner.graph_bytes, runner.budgets) == (0, (2048, 4096, 8192, 13824))


@pytest.mark.parametrize("graphs", ["auto", False])
def test_a_cpu_launches_few_tokens_at_a_time(tower: VisionTower, graphs: bool | str) -> None:
    config = EncoderConfig(cudagraph_mm_encoder=graphs)  # type: ignore[arg-type]
    assert TowerRunner.build(forward_of(tower), config).worthwhile_tokens == CPU_WORTHWHILE_TOKENS


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"fused_kernels": True}, ValueError, "fused_kernels is true, and the device is cpu"),
        ({"cudagraph_mm_encoder": True}, ValueError, "CUDA graphs are not available: cpu_device"),
        ({"attention_backend": "fa4"}, BackendUnavailableError, "'fa4' needs a GPU; the device is cpu"),
    ],
)
def test_what_is_asked_for_and_cannot_be_had_is_an_error(
    tower: VisionTower, settings: dict[str, object], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        TowerRunner.build(choose_forward(tower, config := EncoderConfig(**settings)), config)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_compiled_tower_gives_what_the_plain_one_gives(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as on a GPU, in graphs or not; without the compiler behind it, which needs one for C++ here."""
    compiling = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kinds: compiling(self, backend="eager", **kinds))
    compiled = choose_forward(tower, EncoderConfig(compile_mm_encoder=True)).run
    forward, tables = dataclasses.replace(forward_of(tower), run=compiled), GridTables(tower.config, CPU, 2**20)
    with torch.inference_mode():
        for grids in LAYOUTS:
            layout = tables.layout(grids)
            assert layout is not None
            patches = patches_of(tower, grids)
            found = forward.run(patches, forward.exact_metadata(tables, layout))
            assert_close(found, expected_of(tower, patches, grids))


@pytest.mark.parametrize(("capture", "fails"), [("startup", True), ("on_demand", False)])
def test_graphs_that_must_be_there_are_an_error_if_none_could_be_captured(
    tower: VisionTower, monkeypatch: pytest.MonkeyPatch, capture: Literal["startup", "on_demand"], fails: bool
) -> None:
    def refused(forward: TowerForward, tables: GridTables, *, largest_budget: int, max_images: int) -> FakeGraphs:
        graphs = FakeGraphs(forward, tables, largest_budget, max_images)
        graphs.bad |= set(BUDGETS)
        return graphs

    monkeypatch.setattr("encoder.runner._no_graphs_reason", lambda forward, config: None)
    monkeypatch.setattr("encoder.runner.EncoderGraphs", refused)
    config = dataclasses.replace(CONFIG, cudagraph_mm_encoder=True, graph_capture=capture)
    if fails:
        with pytest.raises(ValueError, match="no graph could be captured"):
            TowerRunner.build(forward_of(tower), config)
        config = dataclasses.replace(config, cudagraph_mm_encoder="auto")
    assert TowerRunner.build(forward_of(tower), config).forward.name == "eager"


def test_attention_work_is_not_timed_where_batches_are_single_images(tower: VisionTower) -> None:
    """Which would look the same as one image, for every budget."""
    config = dataclasses.replace(CONFIG, encoder_cudagraph_max_images_per_batch=1)
    timed: list[GraphKey] = []
    graphs = FakeGraphs(forward_of(tower), GridTables(tower.config, CPU, 2**20), max(BUDGETS), 1)
    replay_ms = graphs.replay_ms
    graphs.replay_ms = lambda key, grids: timed.append(key) or replay_ms(key, grids)  # type: ignore[method-assign, func-returns-value]
    GraphCapturer(cast(EncoderGraphs, graphs), config, tower.config, RunCounts(), activation_bytes=1000).start()
    assert len(timed) == len(graphs.captured), "under load only"


def test_default_budgets_are_those_documented() -> None:
    budgets = default_budgets()
    assert (len(budgets), budgets[0], budgets[-1]) == (37, 64, 8192)
    # Batches of images of 224² and of 448², with patches of 16 and of 14.
    assert {196, 392, 784, 1568, 64, 256, 1024, 2048} <= set(budgets)
    assert all(1.14 <= later / earlier <= 1.25 for earlier, later in pairwise(budgets) if not 512 <= earlier < 2048)
    assert all(1.06 <= later / earlier <= 1.13 for earlier, later in pairwise(budgets) if 512 <= earlier < 2048)


def test_tight_graphs_are_for_budgets_that_short_images_can_fill() -> None:
    keys = tight_keys((64, 128, 512, 1024, 2048), (256,), 4, 16)
    assert keys == [GraphKey(1024, 256), GraphKey(512, 256), GraphKey(128, 256)]
    assert tight_keys((64, 128), (), 4, 16) == []


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"pydantic", "pydantic_core", "cachetools", "pebble", "ray", "vllm"}:
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, Blocked())
import importlib, pkgutil
import encoder.encoder, encoder.runner, encoder.graphs.captured, encoder.graphs.capture
try:
    import triton
except ImportError:
    pass
else:
    import encoder.fused.tower
from encoder import Encoder, EncoderConfig
EncoderConfig(encoder_cudagraph_token_budgets=(64, 128))
sys.path.insert(0, ".")
from pathlib import Path
import pytest
for file in sorted(Path("tests/gpu").glob("test_*.py")):
    try:
        importlib.import_module(f"tests.gpu.{file.stem}")
    except pytest.skip.Exception:
        pass
print("imported")
"""


def test_the_encoder_and_its_gpu_tests_need_no_package_of_the_servers() -> None:
    assert output_of_python(BLOCKED).strip().endswith("imported")
