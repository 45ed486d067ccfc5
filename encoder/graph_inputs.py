"""The static buffers that every captured graph reads, and how a batch is laid into them.

A graph of budget B reads the first B tokens' worth of each buffer, so one set serves all budgets. What varies between
replays is a buffer here; what is baked in is in `GraphClass`. Padding is inert: rows past the batch belong to no
segment of attention, all else works row by row, and indices there stay in range. It must not know how graphs are made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from encoder.attention import AttentionBackend, Segments
from encoder.metadata import TowerMetadata
from encoder.vision_config import VisionConfig


@dataclass(frozen=True)
class GraphClass:
    """The capacity of a graph: what a batch must not exceed to be replayed in it."""

    budget: int
    """Tokens, after the merge."""
    max_images: int
    """Segments of full attention: an image is one, a video one a frame."""
    max_windows: int
    """Segments of windowed attention; 0 for towers without."""
    max_seqlen: int
    """Patches of the longest image; a bound that attention kernels bake into their launch."""

    @classmethod
    def of(cls, budget: int, max_images: int, config: VisionConfig) -> GraphClass:
        """The class of a budget: any one image may fill it, and windows may be half empty on average."""
        windows = 0
        if config.window_size:
            windows = 2 * -(-budget // config.window_tokens**2) + max_images
        return cls(budget, max_images, windows, budget * config.merge_unit)

    def holds(self, metadata: TowerMetadata) -> bool:
        """Whether the batch fits in every respect."""
        windows = metadata.windows.cu_seqlens.numel() - 1 if metadata.windows is not None else 0
        return (
            metadata.num_tokens <= self.budget
            and metadata.frames.cu_seqlens.numel() - 1 <= self.max_images
            and windows <= self.max_windows
            and metadata.frames.max_seqlen <= self.max_seqlen
        )


class GraphInputs:
    """Device buffers for batches up to the largest class; `load` fills them, `views` gives a graph its part."""

    def __init__(self, largest: GraphClass, config: VisionConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        tokens, patches = largest.budget, largest.budget * config.merge_unit
        self._config = config

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.patches = zeros(patches, config.patch_dim, dtype=dtype)
        self._rope = zeros(patches, 2)
        self._frames = zeros(largest.max_images + 1)
        table, windowed = bool(config.num_position_embeddings), bool(config.window_size)
        self._taps = zeros(patches, 4) if table else None
        self._weights = zeros(patches, 4, dtype=torch.float32) if table else None
        self._windows = zeros(largest.max_windows + 1) if windowed else None
        self._in_order = torch.arange(tokens, dtype=torch.int32, device=device) if windowed else None
        self._order = self._in_order.clone() if self._in_order is not None else None
        self._inverse = self._in_order.clone() if self._in_order is not None else None

    @property
    def num_bytes(self) -> int:
        tensors = (
            self.patches,
            self._rope,
            self._frames,
            self._taps,
            self._weights,
            self._windows,
            self._in_order,
            self._order,
            self._inverse,
        )
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def views(self, graph: GraphClass) -> tuple[Tensor, TowerMetadata]:
        """The patches and the metadata that a graph of this class reads, in the buffers' own memory."""
        tokens, patches = graph.budget, graph.budget * self._config.merge_unit

        def part(buffer: Tensor | None, rows: int) -> Tensor | None:
            return None if buffer is None else buffer[:rows]

        backend = AttentionBackend.VARLEN
        windows = None
        if self._windows is not None:
            side = self._config.window_tokens**2 * self._config.merge_unit
            windows = Segments(backend, self._windows[: graph.max_windows + 1], side)
        return self.patches[:patches], TowerMetadata(
            num_patches=patches,
            num_tokens=tokens,
            image_tokens=(tokens,),
            rope_positions=self._rope[:patches],
            frames=Segments(backend, self._frames[: graph.max_images + 1], graph.max_seqlen),
            windows=windows,
            position_indices=part(self._taps, patches),
            position_weights=part(self._weights, patches),
            window_order=part(self._order, tokens),
            window_inverse=part(self._inverse, tokens),
        )

    def load(self, patches: Tensor, metadata: TowerMetadata, graph: GraphClass) -> None:
        """Copies a batch in, on the current stream. `patches` `[num_patches, patch_dim]` in any float dtype."""
        metadata.check(patches, self._config.patch_dim)
        if not graph.holds(metadata):
            raise ValueError(f"a batch of {metadata.num_tokens} tokens does not fit the graph {graph}")
        self.patches[: metadata.num_patches].copy_(patches)
        self.load_metadata(metadata, graph)

    def load_metadata(self, metadata: TowerMetadata, graph: GraphClass) -> None:
        """All but the patches."""
        self._rope[: metadata.num_patches].copy_(metadata.rope_positions)
        _borders(self._frames, metadata.frames.cu_seqlens, graph.max_images)
        if self._taps is not None and self._weights is not None:
            assert metadata.position_indices is not None
            assert metadata.position_weights is not None
            self._taps[: metadata.num_patches].copy_(metadata.position_indices)
            self._weights[: metadata.num_patches].copy_(metadata.position_weights)
        if self._windows is not None:
            assert metadata.windows is not None
            _borders(self._windows, metadata.windows.cu_seqlens, graph.max_windows)
            for buffer, source in (
                (self._order, metadata.window_order),
                (self._inverse, metadata.window_inverse),
            ):
                assert buffer is not None
                assert source is not None
                assert self._in_order is not None
                buffer[: metadata.num_tokens].copy_(source)
                # Rows past the batch stay where they are: what an earlier, larger batch left could be out of range.
                buffer[metadata.num_tokens : graph.budget].copy_(self._in_order[metadata.num_tokens : graph.budget])

    def spoil_padding(self, metadata: TowerMetadata, graph: GraphClass) -> None:
        """Fills the rows past the batch with NaN and the largest indices; a graph's real rows must not change."""
        patches = slice(metadata.num_patches, graph.budget * self._config.merge_unit)
        self.patches[patches] = float("nan")
        self._rope[patches] = 1_000
        if self._taps is not None and self._weights is not None:
            self._taps[patches] = self._config.num_position_embeddings - 1
            self._weights[patches] = float("inf")


def _borders(buffer: Tensor, borders: Tensor, segments: int) -> None:
    """Segment borders padded with the last one, so that the segments past the batch are empty."""
    count = borders.numel()
    buffer[:count].copy_(borders)
    if count < segments + 1:
        buffer[count : segments + 1].copy_(borders[-1:].expand(segments + 1 - count))


def with_bound(graph: GraphClass, max_seqlen: int) -> GraphClass:
    """The class with a tighter bound on the longest image, for graphs of many small ones."""
    return replace(graph, max_seqlen=min(graph.max_seqlen, max_seqlen))
