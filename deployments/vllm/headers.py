"""Converts between headers of items and vLLM's processor outputs, of vLLM 0.26 to 0.33."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import BatchFeature
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item, encode_mm_kwargs_item
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.multimodal.processing.processor import (
    PromptIndex,
    PromptIndexTargets,
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    UpdateMode,
)

from encoder.item_header import CHUNKS, HeaderError, ItemHeader, PromptPrefix, PromptUpdate, Target, VideoFields

GRID = "image_grid_thw"
NO_METADATA = "vitray_no_metadata"
"""Field of items without any metadata: vLLM's receiver cache cannot compute the size of an item without fields."""

MAX_METADATA_BYTES = 16 * 1024**2
"""Bound on the decompressed metadata of one item."""

_FEW_BYTES = 64

CachedItem = tuple[MultiModalKwargsItem, list[ResolvedPromptUpdate]]
"""What vLLM's processor caches return: the item's fields and its prompt updates."""


def cache_item(header: ItemHeader, processor: Any = None) -> CachedItem:  # noqa: ANN401 - vLLM's processors
    """Returns the item of a header as vLLM's processor cache returns it. `processor`: the language model's, for
    videos of vitray's own towers.

    Raises HeaderError if the processor's prompt takes another number of rows than the video's embedding has.
    """
    if isinstance(header.metadata, VideoFields):
        return _video_item(header, header.metadata, processor)
    if isinstance(header.metadata, bytes):
        fields = zlib.decompressobj().decompress(header.metadata, MAX_METADATA_BYTES)
        item = decode_mm_kwargs_item(fields.decode())
    else:
        item = _item_of_fields("image", {GRID: torch.tensor([header.metadata])})
    return item, [_resolve(header.modality, update) for update in header.updates]


def header_of(
    digest: str,
    modality: str,
    item: MultiModalKwargsItem,
    updates: Sequence[ResolvedPromptUpdate],
    declared: Collection[str],
    tokenizer: Any = None,  # noqa: ANN401 - vLLM's tokenizers
) -> ItemHeader:
    """Returns the header of an item that vLLM's processor prepared alone.

    `declared`: names of metadata fields besides those that vLLM keeps on the CPU (`declared_fields`). `tokenizer`: the
    model's, which versions before 0.32 need for updates that are texts.

    Raises:
        HeaderError: the updates disagree, or the header is too large.
        ValueError: an update's place in the prompt is of an unknown kind.
    """
    kept = MultiModalKwargsItem(
        {name: element for name, element in item.items() if element.field.keep_on_cpu or name in declared}
    )
    converted = tuple(_prompt_update(update, tokenizer) for update in updates)
    return ItemHeader(digest, modality, converted[0].num_embeds, converted, _metadata(modality, kept))


def declared_fields(processor: Any, item: MultiModalKwargsItem, modality: str) -> Collection[str]:  # noqa: ANN401 - vLLM's processors
    """Returns the names of an item's metadata fields: those that the model's processor declares, and before vLLM 0.32,
    where none does so, all of few bytes, such as grids and lengths. The engine's positions are computed from them."""
    parser = processor.info.data_parser
    if hasattr(parser, "placeholder_metadata_fields"):
        declared: Collection[str] = parser.placeholder_metadata_fields(modality)
        return declared
    return [
        name
        for name, element in item.items()
        if isinstance(element.data, torch.Tensor) and element.data.nbytes <= _FEW_BYTES
    ]


def _metadata(modality: str, kept: MultiModalKwargsItem) -> tuple[int, int, int] | bytes:
    grid = kept.get(GRID)
    if modality == "image" and len(kept) == 1 and grid is not None and isinstance(grid.field, MultiModalBatchedField):
        t, h, w = grid.data.tolist()
        return t, h, w
    if not kept:
        kept = _item_of_fields(modality, {NO_METADATA: torch.tensor([[0]], dtype=torch.uint8)})
    return zlib.compress(encode_mm_kwargs_item(kept).encode(), 1)  # Qwen2.5-Omni masks 300 s of any sound


def _item_of_fields(modality: str, values: Mapping[str, object]) -> MultiModalKwargsItem:
    """`values`: of one item each."""
    fields = {name: MultiModalFieldConfig.batched(modality, keep_on_cpu=True) for name in values}
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature(dict(values)), fields)[modality][0]


def _video_item(header: ItemHeader, video: VideoFields, processor: Any) -> CachedItem:  # noqa: ANN401
    values: dict[str, object] = {"video_grid_thw": torch.tensor([video.grid])}
    if video.timestamps:
        values["timestamps"] = [list(video.timestamps)]
    if video.seconds_per_grid is not None:
        values["second_per_grid_ts"] = torch.tensor([video.seconds_per_grid])
    if header.chunks:
        values[CHUNKS] = [list(header.chunks)]
    item = _item_of_fields("video", values)
    found = processor._get_prompt_updates(  # noqa: SLF001 - the models' own method, equal in 0.26 to 0.33
        mm_items=None, hf_processor_mm_kwargs={}, out_mm_kwargs=MultiModalKwargsItems({"video": [item]})
    )
    updates = [update.resolve(0) for update in found if update.modality == "video"]
    tokenizer = processor.info.get_tokenizer()
    if rows := {_prompt_update(update, tokenizer).num_embeds for update in updates} - {header.num_embeds}:
        raise HeaderError(f"the embedding has {header.num_embeds} rows, the prompt of the video takes {sorted(rows)}")
    return item, updates


def _prompt_update(update: ResolvedPromptUpdate, tokenizer: Any) -> PromptUpdate:  # noqa: ANN401
    full, is_embed = update.content.full, update.content.is_embed
    tokens = _token_ids(full, tokenizer)
    mask = [True] * len(tokens) if is_embed is None else _call(is_embed, tokenizer, full).tolist()
    target = _target(update.target, tokenizer)
    return PromptUpdate.of_tokens(update.mode.value, target, zip(tokens, mask, strict=True))


def _target(target: Any, tokenizer: Any) -> Target:  # noqa: ANN401 - token ids, a text or a PromptIndex
    """Converts a target. vLLM's PromptIndex is a function; its kind is found by what it returns for two tokens."""
    if not isinstance(target, PromptIndex):
        return tuple(_token_ids(target, tokenizer))
    prefix = inspect.getclosurevars(target.get_match_index).nonlocals.get("seq")
    if prefix is not None:
        return PromptPrefix(tuple(_token_ids(prefix, tokenizer)))
    match _call(target.get_match_index, tokenizer, [0, 0]):
        case 0:
            return "start"
        case 2:
            return "end"
        case other:
            raise ValueError(
                f"a prompt update is at {other!r} in a prompt of two tokens, neither its start nor its end"
            )


def _token_ids(tokens: str | list[int], tokenizer: Any) -> list[int]:  # noqa: ANN401
    return tokenizer.encode(tokens, add_special_tokens=False) if isinstance(tokens, str) else tokens


def _call(function: Callable[..., Any], tokenizer: Any, tokens: str | list[int]) -> Any:  # noqa: ANN401
    """Calls a function that takes the tokenizer first before vLLM 0.32, and the tokens alone since."""
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind < 2]
    return function(tokenizer, tokens) if len(required) > 1 else function(tokens)


def _resolve(modality: str, update: PromptUpdate) -> ResolvedPromptUpdate:
    """Returns vLLM's update of the first item of a prompt; vLLM itself renumbers it."""
    mask = torch.tensor(update.mask)
    match update.target:
        case PromptPrefix(tokens):
            target = PromptIndexTargets.prefix(list(tokens))
        case "start":
            target = PromptIndexTargets.start()
        case "end":
            target = PromptIndexTargets.end()
        case tokens:
            target = list(tokens)
    content = PromptUpdateDetails(update.tokens, None if all(update.mask) else lambda *_: mask)
    return ResolvedPromptUpdate(modality, 0, UpdateMode(update.mode), target, content)
