"""`VllmEncoder` packs items and checks rows; the tower is a fake."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Literal, cast

import pytest
import torch
from torch import Tensor

from configs.encoder_config import EncoderConfig
from deployments.vllm import checked_graphs
from deployments.vllm import vllm_encoder as module
from deployments.vllm.checked_graphs import CheckedGraphs, Replay
from deployments.vllm.preparer import VllmInputs
from deployments.vllm.vllm_encoder import (
    SAMPLE_SIDES,
    SAMPLES_PER_SIDE,
    Embedded,
    RowCountError,
    VllmBatch,
    VllmEncoder,
    VllmTower,
)
from encoder.encoder import Encoder
from encoder.images.decoded import Decoded
from encoder.images.size import ImageError
from encoder.interface import ItemEncoder
from encoder.item_header import ItemHeader, PromptPrefix, PromptRun, PromptUpdate, Target
from encoder.packing.cost_based import CostTable
from encoder.packing.greedy import Batch
from encoder.packing.run_counts import Reason, RunRecord
from encoder.pixels.preprocess import Pixels

WIDTH = 4


def item(num_embeds: int, content: str = "", modality: str = "image") -> VllmInputs:
    update = PromptUpdate("replace", (7,), (PromptRun(8, 1, False), PromptRun(7, num_embeds, True)))
    header = ItemHeader(content.ljust(64, "0"), modality, num_embeds, (update,), b"metadata")
    return VllmInputs(header, content.encode())


class FakeTower:
    """Rows hold the number of the item in `inputs`; "bad" fails, "short" loses a row."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.eager: list[bool] = []
        self.graph_budgets: tuple[int, ...] = ()
        self.max_graph_items = 16
        self.reason: Reason | None = Reason.NO_GPU
        self.sampled: list[list[int]] = []

    def measure_graphs(self, samples: Sequence[Sequence[VllmInputs]], max_items: int) -> CostTable:
        self.sampled = [[each.num_tokens for each in images] for images in samples]
        return CostTable(((16, 3.0), (32, 4.0), (64, 10.0)), ((8, 9.0), (16, 9.0), (64, 9.0)), work_ms=0.0)

    def embed(self, items: Sequence[VllmInputs], *, eagerly: bool) -> Embedded:
        names = [each.inputs.decode() for each in items]
        self.batches.append(names)
        self.eager.append(eagerly)
        if "bad" in names:
            raise ValueError("the tower cannot encode it")
        rows = [each.header.num_embeds - (each.inputs == b"short") for each in items]
        values = [float(name) if name.isdigit() else 0.0 for name in names]
        outputs = [torch.full((count, WIDTH), value) for count, value in zip(rows, values, strict=True)]
        budgets = [budget for budget in self.graph_budgets if budget >= sum(rows)]
        return Embedded(outputs, self.reason, () if self.reason else tuple(budgets[:1]))

    def mark(self) -> None:
        """On the CPU, nothing is to be waited for."""

    def encodes_alone(self, modality: str) -> bool:
        return modality == "video"


def make(budgets: tuple[int, ...] = (64,), max_items: int = 16) -> tuple[VllmEncoder, FakeTower]:
    tower = FakeTower()
    config = EncoderConfig(encoder_cudagraph_token_budgets=budgets, encoder_cudagraph_max_images_per_batch=max_items)
    return VllmEncoder(cast(VllmTower, tower), config), tower


def test_embeddings_are_in_the_order_of_the_items() -> None:
    encoder, _ = make()
    items = [item(9, "1"), item(3, "2", "audio"), item(5, "3"), item(2, "4", "audio")]
    found: dict[int, Tensor] = {}
    for batch in encoder.launch_batches(items):
        found |= dict(zip(batch.batch.indices, batch.fetch(), strict=True))
    assert [found[index][0, 0].item() for index in range(4)] == [1, 2, 3, 4]
    assert [found[index].shape for index in range(4)] == [(n, WIDTH) for n in (9, 3, 5, 2)]


def test_a_batch_has_one_modality_and_fits_the_largest_budget() -> None:
    encoder, tower = make(budgets=(16,), max_items=2)
    list(encoder.launch_batches([item(8, "1"), item(8, "2", "audio"), item(9, "3"), item(40, "4"), item(1, "5")]))
    assert sorted(sorted(batch) for batch in tower.batches) == [["1", "5"], ["2"], ["3"], ["4"]]


def test_launched_batches_are_counted_and_fetched_to_given_memory() -> None:
    encoder, _ = make(budgets=(8,))
    memory = torch.zeros(8, WIDTH)
    batches = list(encoder.launch_batches([item(8, "1"), item(6, "2")]))
    assert [batch.batch.indices for batch in batches] == [(0,), (1,)]
    [fetched] = batches[0].fetch(lambda *_: memory)
    assert fetched.data_ptr() == memory.data_ptr()
    assert fetched[0, 0] == 1
    assert batches[1].fetch()[0].shape == (6, WIDTH)
    assert encoder.counts.eager_runs == {Reason.NO_GPU.value: 2}
    assert encoder.counts.tokens == 14


@pytest.mark.parametrize(
    ("content", "error", "told"), [("bad", ValueError, "cannot encode"), ("short", RowCountError, "of 4 rows")]
)
def test_a_launched_batch_that_fails_raises(content: str, error: type[Exception], told: str) -> None:
    encoder, _ = make()
    with pytest.raises(error, match=told):
        list(encoder.launch_batches([item(4, "1"), item(4, content)]))


def test_a_warm_up_that_fails_for_one_modality_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, tower = make()
    warnings: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *values: warnings.append(text % values))

    def prepare(_: bytes, modality: str) -> VllmInputs:
        if modality == "video":
            raise ImageError("4 frames of the video would be encoded, the limit is 2")
        return item(2, "bad" if modality == "audio" else "1", modality)

    encoder.warm_up(["audio", "video", "image"], prepare)
    assert tower.batches == [["bad"], ["1"]]
    assert warnings == [
        "a sample audio could not be encoded at the start: the tower cannot encode it",
        "a sample video could not be encoded at the start: 4 frames of the video would be encoded, the limit is 2",
    ]


def test_a_warm_up_that_loses_the_device_raises() -> None:
    encoder, _ = make()

    def prepare(_: bytes, modality: str) -> VllmInputs:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory"):
        encoder.warm_up(["image"], prepare)


BUDGETS = (16, 32, 64)


def warm(packing: Literal["cost", "greedy"] = "cost") -> tuple[VllmEncoder, FakeTower]:
    """Returns an encoder with graphs of 16, 32 and 64 tokens of which that of 64 takes longer than an eager run."""
    tower = FakeTower()
    tower.graph_budgets, tower.reason = BUDGETS, None
    config = EncoderConfig(encoder_cudagraph_token_budgets=BUDGETS, packing=packing)
    encoder = VllmEncoder(cast(VllmTower, tower), config)
    encoder.warm_up(["image"], lambda file, modality: item(len(file) // 1000 + 1, "1", modality))
    tower.batches.clear()
    tower.eager.clear()
    return encoder, tower


def test_images_are_packed_by_the_measured_costs_of_graphs() -> None:
    """Five of eight tokens fill the budgets of 32 and 8 of 16, which take 7 ms; together they would take 9, eagerly."""
    encoder, tower = warm()
    assert [len(images) for images in tower.sampled] == [SAMPLES_PER_SIDE] * len(SAMPLE_SIDES)
    assert tower.sampled == sorted(tower.sampled)
    batches = list(encoder.launch_batches([item(8, str(number)) for number in range(5)]))
    assert sorted((batch.batch.budget, len(batch.outputs)) for batch in batches) == [(16, 1), (32, 4)]
    assert [batch.run_record.budget for batch in batches] == [batch.batch.budget for batch in batches]
    assert tower.eager == [False, False]
    assert (encoder.counts.replays, encoder.counts.padding_tokens) == (1 + 2, 15 + 8), "one token at the start"


def test_an_image_runs_eagerly_where_that_was_measured_to_be_faster() -> None:
    """Above what was measured, vLLM may have a graph."""
    encoder, tower = warm()
    list(encoder.launch_batches([item(60, "1"), item(65, "2"), item(8, "3"), item(60, "4", "audio")]))
    assert dict(zip([names[0] for names in tower.batches], tower.eager, strict=True)) == {
        "1": True, "2": False, "3": False, "4": False
    }  # fmt: skip


def test_greedy_packing_ignores_costs() -> None:
    encoder, tower = warm("greedy")
    [batch] = encoder.launch_batches([item(8, str(number)) for number in range(5)])
    assert (batch.batch.budget, tower.eager) == (None, [False])


def test_refused_graphs_have_no_costs() -> None:
    encoder, tower = warm()
    tower.reason = Reason.REFUSED
    list(encoder.launch_batches([item(8, "1")]))
    [batch] = encoder.launch_batches([item(8, str(number)) for number in range(5)])
    assert (batch.batch.budget, batch.run_record.budget) == (None, None)


def test_graphs_hold_fewer_items_than_batches_without_costs() -> None:
    encoder, tower = warm()
    tower.max_graph_items = 2
    list(encoder.launch_batches([item(8, str(number)) for number in range(4)]))
    assert [len(names) for names in tower.batches] == [2, 2]


def test_graphs_are_measured_once_for_sizes_that_the_model_resizes_to_one() -> None:
    tower = FakeTower()
    tower.graph_budgets = BUDGETS
    encoder = VllmEncoder(cast(VllmTower, tower), EncoderConfig())
    encoder.warm_up(["image"], lambda _, modality: item(8, "1", modality))
    assert tower.sampled == [[8] * SAMPLES_PER_SIDE]


def test_graphs_that_cannot_be_measured_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *values: warnings.append(text % values))
    tower = FakeTower()
    tower.graph_budgets, tower.reason = BUDGETS, None

    def prepare(file: bytes, modality: str) -> VllmInputs:
        if len(file) > 10_000:
            raise ImageError("the processor takes no small image")
        return item(8, "1", modality)

    encoder = VllmEncoder(cast(VllmTower, tower), EncoderConfig())
    encoder.warm_up(["image"], prepare)
    assert warnings == ["graphs are replayed without measured times: the processor takes no small image"]
    list(encoder.launch_batches([item(8, "1")]))
    assert (tower.eager, encoder.counts.replays) == ([False, False], 2)


class Measured:
    """A tower with the graphs of a Manager on the CPU. An item's inputs are its number of rows and a letter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.manager, self.eager_rows, self.batches = Manager(), list[int](), list[str]()
        for name in ("vllm", "vllm.multimodal"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        grouping = SimpleNamespace(group_and_batch_mm_kwargs=self._group)
        monkeypatch.setitem(sys.modules, "vllm.multimodal.utils", grouping)
        self.tower = VllmTower.__new__(VllmTower)
        self.tower._device = torch.device("cpu")
        self.tower._decoder = SimpleNamespace(decode=bytes.decode)
        self.tower._model = SimpleNamespace(embed_multimodal=self._eager)
        self.tower._graphs = CheckedGraphs(self.manager, self._eager)

    def _group(self, pairs: Sequence[tuple[str, str]], **_: object) -> Iterator[tuple[str, int, Mapping[str, Tensor]]]:
        names = [name for _, name in pairs]
        self.batches.append("".join(name[-1] for name in names))
        yield pairs[0][0], len(pairs), {"rows": torch.ones(sum(int(name[:-1]) for name in names), WIDTH)}

    def _eager(self, rows: Tensor) -> list[Tensor]:
        self.eager_rows.append(len(rows))
        return [rows]

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
    assert measured.manager.executed == three_runs, "compared, and timed twice"
    assert measured.eager_rows == three_runs


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
    measured.manager.max_batch_size = most_of_graphs
    costs = measured.measure(20, max_items=max_items)
    assert costs is not None
    assert costs.budgets == (64,), "16 is too small for one, and 64 hold three"
    assert measured.measure(300) is None


def test_budgets_for_which_vllm_replays_others_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    measured.manager.most = 64
    costs = measured.measure(12, 40)
    assert costs is not None
    assert costs.budgets == (16, 64)


def test_graphs_that_are_refused_when_they_are_measured_have_no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    measured.manager.factor = 0.0
    assert measured.measure(12) is None
    assert (measured.tower.graph_budgets, measured.tower.max_graph_items) == ((), 0)


def test_items_that_must_not_share_a_batch_are_encoded_alone() -> None:
    encoder, tower = make()
    list(encoder.launch_batches([item(2, "1", "video"), item(2, "2"), item(2, "3", "video"), item(2, "4")]))
    assert tower.batches == [["1"], ["2", "4"], ["3"]]


def test_embeddings_are_copied_only_once_they_are_ready() -> None:
    """The thread that fetches has another stream than the one that launched."""
    output = torch.zeros(2, WIDTH)
    ready = SimpleNamespace(synchronize=lambda: output.fill_(7.0))
    batch = VllmBatch(Batch((0,), None), [output], RunRecord(None, None, 2, 1), cast(torch.cuda.Event, ready))
    assert batch.fetch()[0].eq(7).all()


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
        self.checked = CheckedGraphs(self.manager, self._eager)

    def _eager(self, rows: Tensor) -> list[Tensor]:
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


@pytest.mark.parametrize(("budgets", "most_items"), [((64, 1024), 32), ((16, 1024), 16)])
def test_graphs_hold_no_more_items_than_the_smallest_budget(budgets: tuple[int, ...], most_items: int) -> None:
    settings = module._graph_settings(EncoderConfig(encoder_cudagraph_token_budgets=budgets))
    assert settings["encoder_cudagraph_max_vision_items_per_batch"] == most_items


def test_inputs_travel_without_pickles() -> None:
    """A decode worker's answer is JSON and bytes: the header comes back as it was."""
    places: tuple[Target, ...] = ((7,), "start", "end", PromptPrefix((1, 2)))
    updates = tuple(PromptUpdate("insert", place, (PromptRun(7, 3, True),)) for place in places)
    for metadata in ((1, 4, 6), b"metadata"):
        sent = VllmInputs(ItemHeader("d" * 64, "image", 3, updates, metadata), b"\x00inputs")
        assert VllmInputs.from_parts(*sent.to_parts()) == sent


@pytest.mark.parametrize("header", [b"", b"{}", b"[1]", b'{"digest": 3}', b"\x80\x04K\x01."])
def test_an_answer_that_is_no_header_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's own subclasses
        VllmInputs.from_parts(header, b"")


def _both_encoders_have_one_interface(
    ours: Encoder, vllms: VllmEncoder
) -> tuple[ItemEncoder[Pixels | Decoded], ItemEncoder[VllmInputs]]:
    """Checked by mypy."""
    return ours, vllms
