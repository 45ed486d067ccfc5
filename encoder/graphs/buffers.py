"""Static buffers that every captured graph reads and writes, and the copy of a batch into them.

A graph of budget B uses the first B tokens' worth of each buffer, so one set serves all budgets. Values that vary
between replays are in these buffers; constants of a graph are in `GraphCapacity`. The graph itself computes the tower's
metadata from the batch description (`encoder.metadata.expand`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from encoder.checkpoint.vision_config import VisionConfig
from encoder.metadata.device_tables import Layout, description_width

# Each slot for an image costs attention empty blocks: with 32 instead of 16, a graph of 64 tokens takes 1.2 % longer.
_FEWEST_SLOTS, _TOKENS_PER_SLOT = 16, 16


class GraphKey(NamedTuple):
    """Identifies one graph of a tower."""

    budget: int
    """Capacity in tokens, after the merge."""
    max_seqlen: int
    """Maximum number of patches per image. Attention chooses its kernel by this bound."""


@dataclass(frozen=True)
class GraphCapacity:
    """Capacity of a graph; a batch within it can be replayed."""

    key: GraphKey
    max_images: int
    """Maximum number of images and of full-attention segments: an image has one segment, a video one per frame."""
    max_windows: int
    """Maximum number of windowed-attention segments; 0 for towers without windows."""

    @classmethod
    def for_key(cls, key: GraphKey, max_images: int, config: VisionConfig) -> GraphCapacity:
        """Returns the capacity for a key. The window bound allows windows to be half empty on average.

        A small graph has slots for fewer than `max_images` images: 16, or one for every 16 tokens.
        """
        max_images = min(max_images, max(_FEWEST_SLOTS, key.budget // _TOKENS_PER_SLOT))
        windows = 0
        if config.window_size:
            windows = 2 * -(-key.budget // config.window_tokens**2) + max_images
        return cls(key, max_images, windows)

    def fits(self, layout: Layout) -> bool:
        """Returns whether the batch fits: tokens, longest image, images and windows."""
        return (
            layout.num_tokens <= self.key.budget
            and layout.max_seqlen <= self.key.max_seqlen
            and self.fits_segments(layout)
        )

    def fits_segments(self, layout: Layout) -> bool:
        """Returns whether the batch's images, frames and windows are within the bounds."""
        return layout.slots <= self.max_images and layout.num_windows <= self.max_windows


def whole(budget: int, config: VisionConfig) -> GraphKey:
    """Returns the key of the graph whose whole budget a single image may fill."""
    return GraphKey(budget, budget * config.merge_unit)


class GraphBuffers:
    """Device buffers for batches up to the largest budget."""

    def __init__(
        self, largest_budget: int, max_images: int, config: VisionConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._max_images = max_images
        rows = largest_budget * config.merge_unit
        self._patches = torch.zeros(rows, config.patch_dim, dtype=dtype, device=device)
        self._output = torch.zeros(largest_budget, config.width, dtype=dtype, device=device)
        self.description = torch.zeros(4, description_width(max_images), dtype=torch.int32, device=device)
        """Batch description as `Layout.device_description` returns it, int32 `[4, description_width(max_images)]`."""

    @property
    def num_bytes(self) -> int:
        return self._patches.nbytes + self._output.nbytes + self.description.nbytes

    def patches(self, budget: int) -> Tensor:
        """Returns `[budget * merge_unit, patch_dim]`, a view of the buffer."""
        return self._patches[: budget * self._config.merge_unit]

    def output(self, num_tokens: int) -> Tensor:
        """Returns `[num_tokens, width]`, a view of the buffer that the next replay overwrites."""
        return self._output[:num_tokens]

    def load(self, patches: Tensor, layout: Layout, graph: GraphCapacity) -> None:
        """Copies a batch into the buffers on the current stream.

        `patches`: `[num_patches, patch_dim]`, any float dtype. Raises ValueError if the shape differs or the batch
        does not fit the graph.
        """
        expected = (layout.num_patches, self._config.patch_dim)
        if patches.shape != expected:
            raise ValueError(f"patches have shape {tuple(patches.shape)}, not {expected}")
        if not graph.fits(layout):
            raise ValueError(f"a batch of {layout.num_tokens} tokens does not fit the graph {graph}")
        self._patches[: layout.num_patches].copy_(patches)
        self.describe(layout)

    def describe(self, layout: Layout) -> None:
        """Copies the batch description into its buffer; patches stay as they are."""
        self.description.copy_(layout.device_description(self._max_images, self.description.device))

    def spoil_padding(self, layout: Layout, graph: GraphCapacity) -> None:
        """Fills the padding patches with NaN, which must not change the graph's real rows."""
        self._patches[layout.num_patches : graph.key.budget * self._config.merge_unit] = float("nan")

    def randomize(self) -> Tensor:
        """Fills the patch buffer with random values and returns the whole buffer."""
        return self._patches.normal_()

    def clear(self) -> None:
        """Zeroes the patch buffer."""
        self._patches.zero_()
