"""Headers to vLLM's cached items and back, on vLLM's own classes and without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems
from vllm.multimodal.processing.processor import (
    PromptIndex,
    PromptIndexTargets,
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    UpdateMode,
)

from deployments.vllm.headers import NO_METADATA, cache_item, declared_fields, header_of
from encoder.item_header import HeaderError, ItemHeader, PromptPrefix, PromptRun, PromptUpdate, Target

DIGEST = "ab" * 32


def item_of(modality: str, **fields: tuple[torch.Tensor, bool]) -> MultiModalKwargsItem:
    """What a processor produced for one item; each field's tensor, and whether it stays on the CPU."""
    data = BatchFeature({name: value[None] for name, (value, _) in fields.items()})
    config = {name: MultiModalFieldConfig.batched(modality, keep_on_cpu=cpu) for name, (_, cpu) in fields.items()}
    return MultiModalKwargsItems.from_hf_inputs(data, config)[modality][0]


def resolved(target: object, tokens: list[int], mask: list[bool] | None = None) -> ResolvedPromptUpdate:
    is_embed = None if mask is None else lambda *_: torch.tensor(mask)
    return ResolvedPromptUpdate("image", 0, UpdateMode.REPLACE, target, PromptUpdateDetails(tokens, is_embed))


def converted(item: MultiModalKwargsItem, *declared: str, modality: str = "image") -> ItemHeader:
    return header_of(DIGEST, modality, item, [resolved([5], [5, 5])], declared)


ROWS = (PromptRun(5, 3, True), PromptRun(6, 1, False), PromptRun(5, 3, True), PromptRun(7, 1, False))


@pytest.mark.parametrize("target", [(5,), (1, 2, 3), "start", "end", PromptPrefix((1, 2)), PromptPrefix(())])
@pytest.mark.parametrize("runs", [(PromptRun(5, 16_384, True),), ROWS])
@pytest.mark.parametrize("mode", ["replace", "insert"])
def test_round_trip(target: Target, runs: tuple[PromptRun, ...], mode: Any) -> None:
    update = PromptUpdate(mode, target, runs)
    header = ItemHeader(DIGEST, "image", update.num_embeds, (update,), (1, 8, 4))
    item, updates = cache_item(header)
    assert header_of(DIGEST, "image", item, updates, ()) == header


def test_the_cached_item_of_a_grid_has_the_grid_alone() -> None:
    header = ItemHeader(DIGEST, "image", 8, (PromptUpdate("replace", (5,), (PromptRun(5, 8, True),)),), (1, 8, 4))
    item, (update,) = cache_item(header)
    assert item == item_of("image", image_grid_thw=(torch.tensor([1, 8, 4]), True))
    assert item["image_grid_thw"].field.keep_on_cpu
    assert (update.modality, update.item_idx, update.mode, update.target) == ("image", 0, UpdateMode.REPLACE, [5])
    assert (update.content.full, update.content.is_embed) == ([5] * 8, None)


def test_pixels_stay_with_the_encoder() -> None:
    pixels, grid = torch.zeros(32, 100), torch.tensor([1, 8, 4])
    header = converted(item_of("image", pixel_values=(pixels, False), image_grid_thw=(grid, True)))
    assert header.metadata == (1, 8, 4)


def test_fields_that_are_kept_or_declared_travel() -> None:
    fields = {name: (torch.tensor([index]), index == 0) for index, name in enumerate(("kept", "declared", "dropped"))}
    item, _ = cache_item(converted(item_of("image", **fields), "declared", "absent"))
    assert {name: element.data.tolist() for name, element in item.items()} == {"kept": [0], "declared": [1]}


@pytest.mark.parametrize("declares", [True, False])
def test_where_nothing_is_declared_grids_and_lengths_travel(declares: bool) -> None:
    """Before vLLM 0.32, the engine reads fields that nothing declares, and ends if one is absent."""
    parser = SimpleNamespace(placeholder_metadata_fields=lambda _: {"image_grid_thw"}) if declares else object()
    item = item_of(
        "audio",
        image_grid_thw=(torch.tensor([1, 8, 4]), False),
        audio_feature_lengths=(torch.tensor(80), False),
        feature_attention_mask=(torch.ones(300), False),
    )
    processor = SimpleNamespace(info=SimpleNamespace(data_parser=parser))
    expected = {"image_grid_thw"} if declares else {"image_grid_thw", "audio_feature_lengths"}
    assert set(declared_fields(processor, item, "audio")) == expected


def test_a_grid_beside_other_fields_travels_with_them() -> None:
    grid, second = torch.tensor([1, 8, 4]), torch.tensor([2])
    header = converted(item_of("image", image_grid_thw=(grid, True), second=(second, True)))
    assert isinstance(header.metadata, bytes)
    assert set(cache_item(header)[0]) == {"image_grid_thw", "second"}


def test_an_item_without_metadata_gets_a_field() -> None:
    """LLaVA's images have pixels alone; vLLM's receiver cache fails on an item without fields."""
    for modality in ("image", "audio"):
        header = converted(item_of(modality, pixel_values=(torch.zeros(3), False)), modality=modality)
        item = cache_item(header)[0]
        assert set(item) == {NO_METADATA}
        assert item[NO_METADATA].data.tolist() == [0], "memory that is not set made an item's headers differ"


def test_each_kind_of_place_in_the_prompt_is_told_apart() -> None:
    item = item_of("image", pixel_values=(torch.zeros(3), False))
    targets = [PromptIndexTargets.start(), PromptIndexTargets.end(), PromptIndexTargets.prefix([1, 2])]
    found = [header_of(DIGEST, "image", item, [resolved(target, [5])], ()).updates[0].target for target in targets]
    assert found == ["start", "end", PromptPrefix((1, 2))]


def test_an_unknown_place_is_an_error() -> None:
    target = PromptIndex(*(lambda *_: 1,) * len(PromptIndex.__dataclass_fields__))
    with pytest.raises(ValueError, match="at 1 in a prompt of two tokens"):
        header_of(DIGEST, "image", item_of("image", x=(torch.zeros(1), True)), [resolved(target, [5])], ())


def test_texts_are_tokenized() -> None:
    """Updates of vLLM before 0.32 may be texts, and their masks take the tokenizer."""

    class Tokenizer:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [ord(character) for character in text]

    def is_embed(tokenizer: Tokenizer | None, full: str) -> torch.Tensor:
        assert tokenizer is not None
        return torch.tensor([token != ord("<") for token in tokenizer.encode(full, add_special_tokens=False)])

    content = PromptUpdateDetails("<aa", is_embed)
    update = ResolvedPromptUpdate("image", 0, UpdateMode.INSERT, "a", content)
    header = header_of(DIGEST, "image", item_of("image", x=(torch.zeros(1), True)), [update], (), Tokenizer())
    runs = (PromptRun(ord("<"), 1, False), PromptRun(ord("a"), 2, True))
    assert header.updates == (PromptUpdate("insert", (ord("a"),), runs),)


def test_alternatives_of_different_sizes_are_an_error() -> None:
    updates = [resolved([5], [5]), resolved([6], [5, 5])]
    with pytest.raises(HeaderError, match="rows"):
        header_of(DIGEST, "image", item_of("image", x=(torch.zeros(1), True)), updates, ())
