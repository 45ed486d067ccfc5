"""`VllmEncoder` packs items and checks rows; the tower is a fake."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Literal, cast

import pytest
import torch
from torch import Tensor

from configs.encoder_config import EncoderConfig
from deployments.vllm import vllm_encoder as module
from deployments.vllm.architectures import SOUNDS_ALONE, model_support
from deployments.vllm.preparer import VISION_CHUNK, VllmInputs
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
from tests.unit.deployments.vllm.items import WIDTH, item


class FakeTower:
    """Rows hold the number of the item in `inputs`; "bad" fails, "short" loses a row."""

    copy_stream = None

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


@pytest.mark.parametrize(
    ("architecture", "alone"), [("GraniteSpeechForConditionalGeneration", True), ("Qwen2Audio", False)]
)
def test_sounds_whose_tower_attends_to_padding_are_encoded_alone(architecture: str, alone: bool) -> None:
    """In a batch with a longer sound, of any request, their embeddings differed by a third."""
    tower = VllmTower.__new__(VllmTower)
    tower._config = SimpleNamespace(model_config=SimpleNamespace(architectures=[architecture]))
    tower._model = SimpleNamespace(requires_sequential_video_encoding=True)
    assert [tower.encodes_alone(modality) for modality in ("audio", "image", "video")] == [alone, False, True]


def test_every_architecture_whose_sounds_are_encoded_alone_is_vllms() -> None:
    assert {model.architecture for model in model_support()} >= SOUNDS_ALONE


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


def test_a_warm_up_that_loses_the_device_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, _ = make()

    def lost(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.synchronize", lost)

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


@pytest.mark.parametrize("content", ["1", "bad"])
def test_refused_graphs_have_no_costs(content: str) -> None:
    """Also if the eager run after the refusal failed."""
    encoder, tower = warm()
    tower.graph_budgets, tower.reason = (), Reason.REFUSED
    with nullcontext() if content == "1" else pytest.raises(ValueError, match="cannot encode"):
        list(encoder.launch_batches([item(8, content)]))
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
            raise ValueError("the processor takes no large image")
        return item(8, "1", modality)

    encoder = VllmEncoder(cast(VllmTower, tower), EncoderConfig())
    encoder.warm_up(["image"], prepare)
    assert warnings == ["graphs are replayed without measured times: the processor takes no large image"]
    list(encoder.launch_batches([item(8, "1")]))
    assert (tower.eager, encoder.counts.replays) == ([False, False], 2)


def test_images_are_launched_in_parts_of_low_cost_but_sounds_together() -> None:
    """A token costs 4 ms / 32 in the best batch; nothing is known of sounds."""
    encoder, tower = warm()
    list(encoder.launch_batches([item(8, "1", kind) for kind in ("image", "audio") * 8]))
    assert [len(names) for names in tower.batches] == [4, 8, 4]


def test_two_batches_are_in_flight() -> None:
    encoder, tower = warm()
    marked: list[list[str]] = []
    awaited: list[list[str]] = []

    def mark() -> torch.cuda.Event:
        names = tower.batches[-1]
        marked.append(names)
        return cast(torch.cuda.Event, SimpleNamespace(synchronize=lambda: awaited.append(names)))

    tower.mark = mark  # type: ignore[assignment,method-assign]
    batches = encoder.launch_batches([item(32, str(number)) for number in range(4)])
    for number in range(4):
        next(batches)
        assert (marked, awaited) == (tower.batches, tower.batches[: max(0, number - 1)])
    encoder.wait_for_room()
    assert awaited == [["0"], ["1"], ["2"]]


def test_images_over_a_limit_are_not_among_the_samples() -> None:
    tower = FakeTower()
    tower.graph_budgets, tower.reason = BUDGETS, None

    def prepare(file: bytes, modality: str) -> VllmInputs:
        if len(file) > 200_000:
            raise ImageError("448 x 448 pixels are over the limit")
        return item(len(file) // 1000 + 1, "1", modality)

    encoder = VllmEncoder(cast(VllmTower, tower), EncoderConfig(encoder_cudagraph_token_budgets=BUDGETS))
    encoder.warm_up(["image"], prepare)
    assert len(tower.sampled) == len(SAMPLE_SIDES) - 1
    assert [len(batch.outputs) for batch in encoder.launch_batches([item(8, "1")] * 8)] == [4, 4]


def test_images_that_a_model_calls_chunks_are_packed_as_images() -> None:
    encoder, tower = warm()
    batches = list(encoder.launch_batches([item(8, "1", VISION_CHUNK)] * 8))
    assert [(batch.batch.budget, len(batch.outputs)) for batch in batches] == [(32, 4), (32, 4)]
    list(encoder.launch_batches([item(60, "1", VISION_CHUNK)]))
    assert tower.eager == [False, False, True]


def test_counts_are_a_copy() -> None:
    """Metrics add what has come since the last copy."""
    encoder, _ = make()
    list(encoder.launch_batches([item(2, "1")]))
    before = encoder.counts
    list(encoder.launch_batches([item(3, "2")]))
    assert (before.tokens, before.eager_runs) == (2, {Reason.NO_GPU.value: 1})
    assert (encoder.counts.tokens, encoder.counts.eager_runs) == (5, {Reason.NO_GPU.value: 2})


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
