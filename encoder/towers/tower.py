"""The eager vision tower, the reference of every other forward; `VisionConfig` describes its parts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.checkpoint.vision_config import VisionConfig
from encoder.metadata.device_tables import batch_metadata
from encoder.metadata.geometry import Grid
from encoder.metadata.tower_metadata import TowerMetadata
from encoder.towers.attention import choose_backend
from encoder.towers.layers import Block, PatchEmbedding, PatchMerger, RotaryPositions


class VisionTower(nn.Module):
    """Patches to embeddings `[num_tokens, width]`: `[main | level 0 | level 1 | …]`.

    tower = load_tower(folder, dtype=torch.bfloat16, device=device)
    metadata = tower.prepare([(1, 28, 28)])
    embeddings = tower(patches, metadata)
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        places = config.num_position_embeddings
        # `nn.Embedding(places, …)` would draw random weights, for which torch imports its compiler: seconds per start.
        self.pos_embed = nn.Embedding.from_pretrained(torch.empty(places, config.hidden_size)) if places else None
        self.rotary = RotaryPositions(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.merger = PatchMerger(config)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, norm_merged=True) for _ in config.deepstack_visual_indexes
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of the output."""
        return self.patch_embed.proj.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights and of the metadata."""
        return self.patch_embed.proj.weight.device

    def prepare(self, grid_thw: Sequence[Grid]) -> TowerMetadata:
        """Builds metadata of `grid_thw`, `(t, h, w)` in patches per image. Raises `ValueError` for an invalid grid."""
        backend = choose_backend(self.device, self.dtype, self.config.head_dim)
        return batch_metadata(grid_thw, self.config, self.device, backend)

    def in_float32(self) -> VisionTower:
        """Returns a float32 copy, against which errors are measured; the tower itself if it is in float32."""
        return self if self.dtype == torch.float32 else copy.deepcopy(self).float()

    def level_merger(self, block: int) -> PatchMerger | None:
        """Returns the merger of the deepstack level after a block, counted from 0; None if there is no level."""
        if block not in self.config.deepstack_visual_indexes:
            return None
        merger = self.deepstack_merger_list[self.config.deepstack_visual_indexes.index(block)]
        assert isinstance(merger, PatchMerger)
        return merger

    if TYPE_CHECKING:

        def __call__(self, patches: Tensor, metadata: TowerMetadata) -> Tensor: ...

    def forward(self, patches: Tensor, metadata: TowerMetadata) -> Tensor:
        """`patches`: `[num_patches, patch_dim]`, any float dtype. Returns `[num_tokens, width]`, the tower's dtype."""
        metadata.check(patches, self.config.patch_dim)
        hidden = self.patch_embed(patches)
        if self.pos_embed is not None:
            assert metadata.position_indices is not None
            assert metadata.position_weights is not None
            positions = interpolate(self.pos_embed.weight, metadata.position_indices, metadata.position_weights)
            hidden = hidden + positions.to(hidden.dtype)
        if metadata.window_order is not None:
            # Whole merge blocks are reordered, so that the patches of a window and of a token stay contiguous.
            tokens = hidden.unflatten(0, (-1, self.config.merge_unit))
            hidden = tokens.index_select(0, metadata.window_order).flatten(0, 1)
        cos, sin = self.rotary(metadata.rope_positions)
        levels = []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, cos, sin, metadata.segments(windowed=self.config.is_windowed(index)))
            # Levels are in the order of the blocks; `level_merger` finds a level's merger by its block.
            if (merger := self.level_merger(index)) is not None:
                levels.append(merger(hidden))
        out: Tensor = self.merger(hidden)
        if levels:
            out = torch.cat([out, *levels], dim=-1)
        return out if metadata.window_inverse is None else out.index_select(0, metadata.window_inverse)


def interpolate(table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted sum of four rows of `table` `[rows, features]` per patch: float32 `[num_patches, features]`.

    Adds one tap at a time: all four at once would take four times the memory of the result.
    """
    total = F.embedding(indices[:, 0], table) * weights[:, 0:1]
    for tap in range(1, 4):
        total = total + F.embedding(indices[:, tap], table) * weights[:, tap : tap + 1]
    return total
