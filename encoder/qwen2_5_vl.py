"""Qwen2.5-VL's vision tower: windowed attention in most blocks, full attention in a few, gated MLPs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from encoder.attention import BackendChoice, choose_backend
from encoder.geometry import Grid
from encoder.layers import Block, GatedMLP, PatchEmbedding, RMSNorm, RotaryPositions
from encoder.metadata import MetadataBuilder, TowerMetadata
from encoder.vision_config import VisionConfig


class Qwen25VisionTower(nn.Module):
    """Patches to embeddings `[num_tokens, out_hidden_size]`."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config, bias=False)
        self.rotary = RotaryPositions(config)
        self.blocks = nn.ModuleList(Block(config, RMSNorm, GatedMLP(config)) for _ in range(config.depth))
        self.merger = PatchMerger(config)
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
        assert metadata.windows is not None
        assert metadata.window_order is not None
        assert metadata.window_inverse is not None
        # Tokens move as whole merge blocks, so that a window's patches and a token's patches stay together.
        hidden = self.patch_embed(patches).unflatten(0, (-1, self.config.merge_unit))
        hidden = hidden.index_select(0, metadata.window_order).flatten(0, 1)
        cos, sin = self.rotary(metadata.rope_positions)
        for index, block in enumerate(self.blocks):
            full = index in self.config.fullatt_block_indexes
            hidden = block(hidden, cos, sin, metadata.frames if full else metadata.windows)
        out: Tensor = self.merger(hidden).index_select(0, metadata.window_inverse)
        return out


class PatchMerger(nn.Module):
    """The patches of a merge block to one token: `[num_patches, hidden_size]` to `[num_tokens, out_hidden_size]`."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._merged = config.hidden_size * config.merge_unit
        self.ln_q = RMSNorm(config.hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(self._merged, self._merged), nn.GELU(), nn.Linear(self._merged, config.out_hidden_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.ln_q(x).view(-1, self._merged))
        return out
