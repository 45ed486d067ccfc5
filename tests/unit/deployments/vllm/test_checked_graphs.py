"""vLLM's encoder graphs, on the CPU: compared with the eager forward before they are used, and timed at the start."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from deployments.vllm import checked_graphs
from deployments.vllm.checked_graphs import CheckedGraphs, Replay
from deployments.vllm.vllm_encoder import VllmTower
from encoder.packing.cost_based import CostTable
from encoder.packing.run_counts import Reason
from tests.unit.deployments.vllm.items import WIDTH, item


class Manager:
    """vLLM's encoder graphs of three budgets: they return the batch's rows times `factor`, or other `outputs`."""

    token_budgets = (16, 64, 256)
    max_batch_size = 8

    def __init__(self) -> None:
        self.factor, self.outputs = 1.0, list[Tensor]()
        self.executed: list[int] = []
        self.most = 256
        """Tokens above which a batch is split, a token a graph."""
        self.budget_graphs = {"default": {budget: self._graph(budget) for budget in self.token_budgets}}

    def _graph(self, budget: int) -> SimpleNamespace:
        graph = SimpleNamespace(replay=lambda: None)
        return SimpleNamespace(token_budget=budget, graph=graph, output_buffer=torch.zeros(budget, WIDTH))

    def supports_modality(self, modality: str) -> bool:
        return modality != "audio"

    def execute(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        count = len(batch["rows"])
        self.executed.append(count)
        for tokens in [count] if count <= self.most else [1] * count:
            budget = next(each for each in self.token_budgets if each >= tokens)
            self.budget_graphs["default"][budget].graph.replay()
        return self.outputs or [batch["rows"] * self.factor]


class Graphs:
    """`CheckedGraphs` of a Manager, and the rows of every eager run."""

    def __init__(self) -> None:
        self.manager, self.eager_rows = Manager(), list[int]()
        self.checked = CheckedGraphs(self.manager, self.eager)

    def eager(self, rows: Tensor) -> list[Tensor]:
        self.eager_rows.append(len(rows))
        return [rows]

    def replay(self, count: int, modality: str = "image") -> Replay | Reason:
        rows = torch.arange(1, 1 + count * WIDTH, dtype=torch.bfloat16).view(count, WIDTH)
        return self.checked.replay(modality, {"rows": rows}, [count])


def test_the_first_batch_of_each_budget_is_compared_with_the_eager_tower() -> None:
    graphs = Graphs()
    graphs.manager.factor = 1.25  # more than rounding in bfloat16 with massive activations
    for count in (16, 17, 64, 65, 3, 256):
        found = graphs.replay(count)
        assert not isinstance(found, Reason)
        assert len(found.outputs[0]) == count
    assert graphs.eager_rows == [16, 17, 65]
    assert graphs.replay(257) is Reason.OVER_LARGEST
    assert graphs.replay(16, "audio") is Reason.NOT_CAPTURED
    assert graphs.replay(16, "video") is Reason.NOT_CAPTURED


def test_a_graph_is_compared_though_a_batch_of_its_size_was_split() -> None:
    graphs = Graphs()
    graphs.manager.most = 2
    assert isinstance(found := graphs.replay(3), Replay)
    assert (found.budgets, graphs.eager_rows) == ((16, 16, 16), [3])
    graphs.manager.most = 256
    graphs.replay(100)
    assert graphs.eager_rows == [3, 100]
    graphs.manager.most = 2
    graphs.replay(100)
    assert graphs.eager_rows == [3, 100], "all of one that was compared"


def refused(graphs: Graphs, monkeypatch: pytest.MonkeyPatch, count: int = 64) -> None:
    """Asserts that a batch is refused, and no graph is replayed after it."""
    errors: list[str] = []
    monkeypatch.setattr(checked_graphs.logger, "error", lambda text, *values: errors.append(text % values))
    assert graphs.replay(count) is Reason.REFUSED
    assert graphs.replay(8) is Reason.REFUSED
    assert graphs.checked.budgets == ()
    assert errors == ["vLLM's encoder graphs differ from the eager tower for image, and are switched off"]


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.6, math.nan, math.inf])
def test_graphs_that_differ_are_not_used(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs()
    assert graphs.replay(8) is not Reason.REFUSED
    graphs.manager.factor = factor
    assert graphs.replay(8) is not Reason.REFUSED, "only the first batch of a budget is compared"
    refused(graphs, monkeypatch)


def test_a_few_wrong_rows_beside_large_ones_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs()
    rows = torch.arange(1, 1 + 64 * WIDTH, dtype=torch.bfloat16).view(64, WIDTH)
    graphs.manager.outputs = [rows.clone()]
    graphs.manager.outputs[0][:2] = 0  # the smallest
    refused(graphs, monkeypatch)


def test_refused_graphs_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs share a pool of memory, which stays as long as one of them."""
    graphs = Graphs()
    for count in (8, 200):
        graphs.replay(count)
    replayed = [weakref.ref(graph.graph) for graph in graphs.manager.budget_graphs["default"].values()]
    graphs.manager.factor = 0.0
    refused(graphs, monkeypatch)
    graphs.manager = Manager()
    gc.collect()
    assert [graph() for graph in replayed] == [None] * 3


@pytest.mark.parametrize("outputs", [[torch.ones(1, WIDTH)], [torch.ones(64, WIDTH)] * 2])
def test_outputs_of_another_shape_are_not_used(outputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs()
    graphs.manager.outputs = outputs
    refused(graphs, monkeypatch)


def test_views_of_a_graphs_buffer_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next replay would overwrite them before they are copied."""
    graphs = Graphs()
    buffer = torch.arange(1, 1 + 16 * WIDTH, dtype=torch.bfloat16).view(16, WIDTH)
    graphs.manager.budget_graphs["default"][16].output_buffer = buffer
    graphs.manager.outputs = [buffer[:8]]
    refused(graphs, monkeypatch, 8)


class Measured:
    """A tower with `Graphs`. An item's inputs are its number of rows and a letter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs, self.batches = Graphs(), list[str]()
        for name in ("vllm", "vllm.multimodal"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        grouping = SimpleNamespace(group_and_batch_mm_kwargs=self._group)
        monkeypatch.setitem(sys.modules, "vllm.multimodal.utils", grouping)
        self.tower = VllmTower.__new__(VllmTower)
        self.tower._device = torch.device("cpu")
        self.tower._decoder = SimpleNamespace(decode=bytes.decode)
        self.tower._model = SimpleNamespace(embed_multimodal=self.graphs.eager)
        self.tower._graphs = self.graphs.checked

    def _group(self, pairs: Sequence[tuple[str, str]], **_: object) -> Iterator[tuple[str, int, Mapping[str, Tensor]]]:
        names = [name for _, name in pairs]
        self.batches.append("".join(name[-1] for name in names))
        yield pairs[0][0], len(pairs), {"rows": torch.ones(sum(int(name[:-1]) for name in names), WIDTH)}

    def measure(self, *sizes: int, max_items: int = 8) -> CostTable | None:
        samples = [[item(size, f"{size}{letter}") for letter in "ab"] for size in sizes]
        return self.tower.measure_graphs(samples, max_items)


def test_each_budget_is_measured_with_batches_that_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    costs = measured.measure(12, 40)
    assert costs is not None
    assert costs.budgets == (16, 64, 256)
    assert [tokens for tokens, _ in costs.eager_ms] == [12, 60, 240]
    assert measured.batches == ["a"] * 5 + ["ababa"] * 5 + ["ababab"] * 5
    three_runs = [rows for rows in (12, 60, 240) for _ in range(3)]
    assert measured.graphs.manager.executed == three_runs, "compared, and timed twice"
    assert measured.graphs.eager_rows == three_runs


def test_a_batch_for_which_vllm_replays_no_graph_is_an_eager_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rule may count more tokens than the embedding has rows."""
    measured = Measured(monkeypatch)
    monkeypatch.setattr(measured.graphs.manager, "execute", lambda batch: [batch["rows"]])
    embedded = measured.tower.embed([item(8, "8a")])
    assert (embedded.reason, embedded.budgets) == (Reason.OVER_LARGEST, ())
    assert measured.measure(8) is None


def test_a_budget_is_measured_with_the_largest_images_that_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    assert measured.measure(8, 16, 64) is not None
    assert measured.batches == ["a"] * 5 + ["a"] * 5 + ["abab"] * 5


@pytest.mark.parametrize(("eager_ms", "budget"), [(9.5, 16), (9.0, None)])
def test_a_graph_that_takes_little_longer_than_an_eager_run_is_preferred(
    eager_ms: float, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(monkeypatch)
    monkeypatch.setattr(measured.tower, "_time", lambda _, *, eagerly: eager_ms if eagerly else 10.0)
    costs = measured.measure(16, max_items=1)
    assert costs is not None
    assert costs.cheapest_budget(16) == budget


@pytest.mark.parametrize(("max_items", "most_of_graphs"), [(3, 8), (8, 3)])
def test_budgets_that_no_batch_needs_are_not_measured(
    max_items: int, most_of_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(monkeypatch)
    measured.graphs.manager.max_batch_size = most_of_graphs
    costs = measured.measure(20, max_items=max_items)
    assert costs is not None
    assert costs.budgets == (64,), "16 is too small for one, and 64 hold three"
    assert measured.measure(300) is None


def test_budgets_for_which_vllm_replays_others_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    measured.graphs.manager.most = 64
    costs = measured.measure(12, 40)
    assert costs is not None
    assert costs.budgets == (16, 64)


def test_graphs_that_are_refused_when_they_are_measured_have_no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    measured.graphs.manager.factor = 0.0
    assert measured.measure(12) is None
    assert (measured.tower.graph_budgets, measured.tower.max_graph_items) == ((), 0)
