"""Qwen3-VL's vision tower: a learned, interpolated position table, full attention, and deepstack levels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.attention import BackendChoice, choose_backend
from encoder.geometry import Grid
from encoder.layers import MLP, NORM_EPS, Block, PatchEmbedding, RotaryPositions
from encoder.metadata import MetadataBuilder, TowerMetadata
from encoder.vision_config import VisionConfig


class Qwen3VisionTower(nn.Module):
    """Patches to embeddings `[num_tokens, out_hidden_size * (1 + levels)]`: `[main | level 0 | level 1 | …]`."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, eps=NORM_EPS)
        self.config = config
        self.patch_embed = PatchEmbedding(config, bias=True)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.rotary = RotaryPositions(config)
        self.blocks = nn.ModuleList(Block(config, norm, MLP(config)) for _ in range(config.depth))
        self.merger = PatchMerger(config, norm_merged=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, norm_merged=True) for _ in config.deepstack_visual_indexes
        )
        self._metadata = MetadataBuilder(config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of the output."""
        return self.patch_embed.proj.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are and the metadata goes."""
        return self.patch_embed.proj.weight.device

    @property
    def attention_choice(self) -> BackendChoice:
        """The attention backend in use, and the reason where it is a fallback."""
        return choose_backend(self.device, self.dtype, self.config.head_dim)

    def prepare(self, grid_thw: Sequence[Grid]) -> TowerMetadata:
        """`grid_thw`: `(t, h, w)` in patches for each image. Raises `ValueError` for an impossible grid."""
        return self._metadata.build(grid_thw, device=self.device, backend=self.attention_choice.backend)

    if TYPE_CHECKING:

        def __call__(self, patches: Tensor, metadata: TowerMetadata) -> Tensor: ...

    def forward(self, patches: Tensor, metadata: TowerMetadata) -> Tensor:
        """`patches`: `[num_patches, patch_dim]`, any float dtype. Returns `[num_tokens, width]`, the tower's dtype."""
        metadata.check(patches, self.config.patch_dim)
        assert metadata.position_indices is not None
        assert metadata.position_weights is not None
        positions = interpolate(self.pos_embed.weight, metadata.position_indices, metadata.position_weights)
        hidden = self.patch_embed(patches)
        hidden = hidden + positions.to(hidden.dtype)
        cos, sin = self.rotary(metadata.rope_positions)
        levels = []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, cos, sin, metadata.frames)
            # Levels leave in the order of the blocks; which merger serves one, its place in the list says.
            if index in self.config.deepstack_visual_indexes:
                merger = self.deepstack_merger_list[self.config.deepstack_visual_indexes.index(index)]
                levels.append(merger(hidden))
        return torch.cat([self.merger(hidden), *levels], dim=-1)


def interpolate(table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of four rows of `table` `[rows, features]` for each patch: float32 `[num_patches, features]`.

    Tap by tap: all four at once would take four times the memory of the result.
    """
    total = F.embedding(indices[:, 0], table) * weights[:, 0:1]
    for tap in range(1, 4):
        total = total + F.embedding(indices[:, tap], table) * weights[:, tap : tap + 1]
    return total


class PatchMerger(nn.Module):
    """The patches of a merge block to one token: `[num_patches, hidden_size]` to `[num_tokens, out_hidden_size]`.

    The norm is over a patch, or (deepstack levels) over the merged block.
    """

    def __init__(self, config: VisionConfig, *, norm_merged: bool) -> None:
        super().__init__()
        self._merged = config.hidden_size * config.merge_unit
        self._norm_merged = norm_merged
        self.norm = nn.LayerNorm(self._merged if norm_merged else config.hidden_size, eps=NORM_EPS)
        self.linear_fc1 = nn.Linear(self._merged, self._merged)
        self.linear_fc2 = nn.Linear(self._merged, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self._merged)) if self._norm_merged else self.norm(x).view(-1, self._merged)
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x)))
        return out
