"""The embeddings of which an item of a prompt consists: one, or several chunks of a video.

An embedding is needed, or missing, by the tokens of the prompt that take its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.item_header import CHUNKS, chunk_headers

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

DIGEST_CHARACTERS = 64


@dataclass(frozen=True)
class ItemChunk:
    """An embedding of an item."""

    digest: str
    start: int
    """Token of the prompt that takes its first row, counted from the item's first token."""
    end: int
    """The token after the one that takes its last row."""
    first_row: int = 0
    num_item_rows: int | None = None
    """Rows of the item; None if they are those of the embedding."""


def parse_digest(identifier: str) -> str:
    """Returns the digest at the end of `identifier`, before which vLLM may put a LoRA adapter's name."""
    return identifier[-DIGEST_CHARACTERS:]


def item_chunks(feature: MultiModalFeatureSpec) -> tuple[ItemChunk, ...]:
    """Returns the embeddings of an item in order."""
    digest, position = parse_digest(feature.identifier), feature.mm_position
    rows = feature.data[CHUNKS].data if feature.data is not None and CHUNKS in feature.data else ()
    if not rows:
        return (ItemChunk(digest, 0, position.length),)
    mask = position.is_embed
    tokens = range(position.length) if mask is None else mask.nonzero().flatten().tolist()
    chunks, first = [], 0
    for header in chunk_headers(digest, rows):
        last = first + header.num_embeds - 1
        chunks.append(ItemChunk(header.digest, tokens[first], tokens[last] + 1, first, sum(rows)))
        first = last + 1
    return tuple(chunks)
