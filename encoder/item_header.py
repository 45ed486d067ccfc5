"""Header of one image, video or audio: what vLLM needs of an item besides its embedding, known before the tower runs.

Imports no torch, so that the HTTP ingress can make headers.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

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


@dataclass(frozen=True)
class PromptPrefix:
    """The place after these tokens at the start of a prompt."""

    tokens: tuple[int, ...]


Target = tuple[int, ...] | Literal["start", "end"] | PromptPrefix
"""Tokens, or a place in the prompt."""


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
    """Alternatives: vLLM applies the first whose target is in the prompt."""
    metadata: tuple[int, int, int] | bytes
    """What the language model computes positions from: the grid (t, h, w) in patches of an image of vitray's own
    towers, else vLLM's encoding of the fields."""

    def __post_init__(self) -> None:
        counts = {update.num_embeds for update in self.updates}
        if self.num_embeds < 1 or counts != {self.num_embeds}:
            raise HeaderError(f"the embedding has {self.num_embeds} rows, its prompt updates take {sorted(counts)}")
        limit = MAX_IMAGE_HEADER_BYTES if self.modality == "image" else MAX_HEADER_BYTES
        if (num_bytes := len(pickle.dumps(self, pickle.HIGHEST_PROTOCOL))) > limit:
            raise HeaderError(f"the header of the {self.modality} has {num_bytes} bytes, the limit is {limit}")
