"""The static buffers that every captured graph reads and writes, and how a batch is laid into them.

A graph of budget B uses the first B tokens' worth of each buffer, so one set serves all budgets. What varies between
replays is a buffer here; what is baked in is in `GraphClass`. The tower's metadata is made from the description inside
of the graph (`encoder.expansion`). It must not know how graphs are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from encoder.geometry import Grid
from encoder.grid_tables import Layout, described_width
from encoder.vision_config import VisionConfig


class GraphKey(NamedTuple):
    """What tells one graph of a tower from another."""

    budget: int
    """Tokens, after the merge."""
    max_seqlen: int
    """Patches of the longest image it takes: attention chooses its kernel by that bound."""


@dataclass(frozen=True)
class GraphClass:
    """The capacity of a graph: what a batch must not exceed to be replayed in it."""

    key: GraphKey
    max_images: int
    """Images, and segments of full attention: an image is one, a video one a frame."""
    max_windows: int
    """Segments of windowed attention; 0 for towers without."""

    @classmethod
    def of(cls, key: GraphKey, max_images: int, config: VisionConfig) -> GraphClass:
        """The class of a key: windows may be half empty on average."""
        windows = 0
        if config.window_size:
            windows = 2 * -(-key.budget // config.window_tokens**2) + max_images
        return cls(key, max_images, windows)

    def holds(self, layout: Layout) -> bool:
        """Whether the batch fits in every respect."""
        return (
            layout.num_tokens <= self.key.budget
            and layout.max_seqlen <= self.key.max_seqlen
            and self.holds_segments(layout)
        )

    def holds_segments(self, layout: Layout) -> bool:
        """Whether its images, frames and windows are not too many."""
        return layout.slots <= self.max_images and layout.num_windows <= self.max_windows


def whole(budget: int, config: VisionConfig) -> GraphKey:
    """The key of a graph that any one image may fill."""
    return GraphKey(budget, budget * config.merge_unit)


class Captured(Protocol):
    """What is read of a captured graph."""

    @property
    def shape(self) -> GraphClass: ...
    @property
    def grids(self) -> tuple[Grid, ...]: ...
    @property
    def alike(self) -> tuple[Grid, ...]: ...
    @property
    def replay_ms(self) -> float: ...
    @property
    def pool_bytes(self) -> int: ...


class Graphs(Protocol):
    """`encoder.graphs.EncoderGraphs`, or what stands in for it in tests."""

    @property
    def captured(self) -> Mapping[GraphKey, Captured]: ...
    @property
    def buffer_bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...
    def begin(self, key: GraphKey) -> int: ...
    def finish(self, key: GraphKey) -> Captured: ...
    def fitting(self, layout: Layout, budget: int) -> GraphKey | None: ...
    def replay(self, key: GraphKey, patches: Tensor, layout: Layout) -> Tensor: ...
    def replay_ms(self, key: GraphKey, grids: Sequence[Grid]) -> float: ...
    def eager_ms(self, grids: Sequence[Grid]) -> float: ...
    def sustained_ms(
        self, keys: Sequence[GraphKey], batches: Sequence[Sequence[Grid]]
    ) -> tuple[list[float], list[float]]: ...
    def trim(self) -> None: ...


def smallest_fitting(captured: Mapping[GraphKey, Captured], layout: Layout, budget: int) -> GraphKey | None:
    """The smallest captured graph from `budget` up that holds the batch, with the tightest bound on its images."""
    return next((key for key in sorted(captured) if key.budget >= budget and captured[key].shape.holds(layout)), None)


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
        self.described = torch.zeros(4, described_width(max_images), dtype=torch.int32, device=device)
        """As `Layout.described`."""

    @property
    def num_bytes(self) -> int:
        return self._patches.nbytes + self._output.nbytes + self.described.nbytes

    def patches(self, budget: int) -> Tensor:
        """`[budget's patches, patch_dim]`, in the buffer's own memory."""
        return self._patches[: budget * self._config.merge_unit]

    def output(self, num_tokens: int) -> Tensor:
        """`[num_tokens, width]`, in the buffer's own memory: the next replay overwrites it."""
        return self._output[:num_tokens]

    def load(self, patches: Tensor, layout: Layout, graph: GraphClass) -> None:
        """Copies a batch in, on the current stream. `patches` `[num_patches, patch_dim]` in any float dtype."""
        expected = (layout.num_patches, self._config.patch_dim)
        if patches.shape != expected:
            raise ValueError(f"patches have shape {tuple(patches.shape)}, not {expected}")
        if not graph.holds(layout):
            raise ValueError(f"a batch of {layout.num_tokens} tokens does not fit the graph {graph}")
        self._patches[: layout.num_patches].copy_(patches)
        self.describe(layout)

    def describe(self, layout: Layout) -> None:
        """Copies all but the patches in."""
        self.described.copy_(layout.described(self._max_images, self.described.device))

    def spoil_padding(self, layout: Layout, graph: GraphClass) -> None:
        """Fills the patches past the batch with NaN; a graph's real rows must not change."""
        self._patches[layout.num_patches : graph.key.budget * self._config.merge_unit] = float("nan")

    def randomize(self) -> Tensor:
        """Fills the patches with random values and returns all of them."""
        return self._patches.normal_()

    def clear(self) -> None:
        """Zeroes the patches."""
        self._patches.zero_()
