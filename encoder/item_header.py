"""Header of one image, video or audio: what vLLM needs of an item besides its embedding, known before the tower runs.

Imports no torch, so that the HTTP ingress can make headers.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import ClassVar, Literal, NamedTuple

CHUNKS = "vitray_chunks"
"""Field of an item at vLLM that consists of several embeddings: the rows of each. vLLM's scheduler reads it."""
MAX_IMAGE_HEADER_BYTES = 4096
MAX_HEADER_BYTES = 256 * 1024
"""Maximum pickled size of headers of other media: a video's prompt contains timestamps between its frames."""


class HeaderError(ValueError):
    """A header contradicts itself or is too large; the message names both values."""


class PromptRun(NamedTuple):
    """`length` equal tokens of a prompt."""

    token: int
    length: int
    is_embed: bool
    """Whether rows of the embedding replace the tokens' own embeddings."""


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """The place after these tokens at the start of a prompt."""

    tokens: tuple[int, ...]


Target = tuple[int, ...] | Literal["start", "end"] | PromptPrefix
"""Tokens, or a place in the prompt."""


@dataclass(frozen=True, slots=True)
class PromptUpdate:
    """The tokens of an item in a prompt, which vLLM calls a resolved prompt update. They are stored as runs: an image
    of 16,384 tokens is one run."""

    mode: Literal["replace", "insert"]
    """Whether `runs` replace `target` or are inserted after it."""
    target: Target
    runs: tuple[PromptRun, ...]

    @classmethod
    def of_tokens(
        cls, mode: Literal["replace", "insert"], target: Target, tokens: Iterable[tuple[int, bool]]
    ) -> PromptUpdate:
        """`tokens`: each token, and whether it takes a row of the embedding."""
        runs = (PromptRun(token, sum(1 for _ in run), is_embed) for (token, is_embed), run in groupby(tokens))
        return cls(mode, target, tuple(runs))

    @property
    def tokens(self) -> list[int]:
        return [run.token for run in self.runs for _ in range(run.length)]

    @property
    def mask(self) -> list[bool]:
        """Whether each token takes a row of the embedding."""
        return [run.is_embed for run in self.runs for _ in range(run.length)]

    @property
    def num_embeds(self) -> int:
        return sum(run.length for run in self.runs if run.is_embed)


@dataclass(frozen=True, slots=True)
class VideoFields:
    """What the language model computes prompt and positions of a video of vitray's own towers from."""

    grid: tuple[int, int, int]
    """`(t, h, w)` in patches."""
    timestamps: tuple[float, ...] = ()
    """Seconds of each temporal patch, for Qwen3-VL, whose prompts state them."""
    seconds_per_grid: float | None = None
    """Seconds of a temporal patch, for Qwen2.5-VL."""


@dataclass(frozen=True)
class ChunkHeader:
    """Header of an embedding that has some of an item's rows, such as those of a few frames of a video."""

    digest: str
    """Digest of the embedding."""
    num_embeds: int
    """Rows of the embedding."""
    modality: ClassVar[str] = "video"


def chunk_headers(digest: str, num_rows: Iterable[int]) -> list[ChunkHeader]:
    """Returns headers of the embeddings, of `num_rows` each, that make up the item `digest`."""
    rows = list(num_rows)
    names = (f"{digest} rows {end - count} to {end}" for count, end in zip(rows, accumulate(rows), strict=True))
    return [ChunkHeader(hashlib.sha256(name.encode()).hexdigest(), n) for name, n in zip(names, rows, strict=True)]


@dataclass(frozen=True, slots=True)
class ItemHeader:
    """Header of one item. Raises HeaderError if an update takes another number of rows, or if the header is too large.

    header = identity.header(digest, grid)
    key = references.add(header)            # in the LLM replica; the request names the item by the key
    """

    digest: str
    """Digest of the item's embedding, which is also vLLM's identifier of the item."""
    modality: str
    """As vLLM calls it: "image", "video", "audio", "vision_chunk"."""
    num_embeds: int
    """Rows of the embedding."""
    updates: tuple[PromptUpdate, ...]
    """Alternatives: vLLM applies the first whose target is in the prompt. Empty for a video of vitray's own towers:
    vLLM's processor computes them from its fields, with the tokenizer of the language model."""
    metadata: tuple[int, int, int] | VideoFields | bytes
    """What the language model computes positions from: the grid (t, h, w) in patches of an image of vitray's own
    towers, fields of a video, else vLLM's encoding of the fields, compressed."""
    chunks: tuple[int, ...] = ()
    """Rows of the embeddings that make up the item's, in order; empty if it is one embedding."""

    def __post_init__(self) -> None:
        counts = {update.num_embeds for update in self.updates}
        if isinstance(self.metadata, VideoFields) and not counts:
            counts = {self.num_embeds}
        if self.num_embeds < 1 or counts != {self.num_embeds}:
            raise HeaderError(f"the embedding has {self.num_embeds} rows, its prompt updates take {sorted(counts)}")
        if self.chunks and (min(self.chunks) < 1 or sum(self.chunks) != self.num_embeds):
            raise HeaderError(f"the embedding has {self.num_embeds} rows, its chunks have {self.chunks}")
        limit = MAX_IMAGE_HEADER_BYTES if self.modality == "image" else MAX_HEADER_BYTES
        if (num_bytes := len(pickle.dumps(self, pickle.HIGHEST_PROTOCOL))) > limit:
            raise HeaderError(f"the header of the {self.modality} has {num_bytes} bytes, the limit is {limit}")

    @property
    def embeddings(self) -> list[ChunkHeader]:
        """Headers of the embeddings that make up the item's."""
        if self.chunks:
            return chunk_headers(self.digest, self.chunks)
        return [ChunkHeader(self.digest, self.num_embeds)]
