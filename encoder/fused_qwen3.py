"""Qwen3-VL's tower as a chain of fused kernels; the same numbers as `qwen3_vl` up to rounding.

A pure function of patches and metadata: no synchronisation, no host work per image, shapes from shapes. It must not
know graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from encoder.fused_attention import AttentionPlan
from encoder.fused_norm import FusedNorm
from encoder.fused_rotary import RotaryAttention
from encoder.kernels.positions import add_positions_
from encoder.layers import MLP, Block
from encoder.metadata import TowerMetadata
from encoder.products import Affine, After, Part, TorchProducts
from encoder.qwen3_vl import PatchMerger, Qwen3VisionTower

# Up to here a merger leaves most of the chip idle, and the blocks do too: they run side by side.
_MOST_ROWS_BESIDE = 1024


def _norm(layer: nn.Module, missing: Tensor) -> FusedNorm:
    assert isinstance(layer, nn.LayerNorm)
    return FusedNorm(layer.weight, layer.bias, missing)


class _Layer:
    def __init__(
        self, block: Block, index: int, missing: Tensor, attend: RotaryAttention, products: TorchProducts
    ) -> None:
        mlp = block.mlp
        assert isinstance(mlp, MLP)
        self.qkv = attend.product(Affine.of(block.attn.qkv), index)
        self.proj = products.load(Affine.of(block.attn.proj), Part.PROJ, index)
        first, second = Affine.of(mlp.linear_fc1), Affine.of(mlp.linear_fc2)
        width = products.inner_width(first.weight.shape[0], first.weight.dtype)
        # Exact: whatever the activation makes of the features added, weights of 0 follow.
        self.fc1 = products.load(first.padded(outputs=width), Part.UP, index)
        self.fc2 = products.load(second.padded(inputs=width), Part.DOWN, index)
        self.norm1 = _norm(block.norm1, missing)
        self.norm2 = _norm(block.norm2, missing + self.proj.bias.float())
        self.missing = missing + self.proj.bias.float() + self.fc2.bias.float()


class _Merger:
    def __init__(self, merger: PatchMerger, missing: Tensor) -> None:
        self.norm = _norm(merger.norm, missing)
        self.fc1, self.fc2 = Affine.of(merger.linear_fc1), Affine.of(merger.linear_fc2)


class FusedQwen3Forward:
    """Weights of a loaded tower, shared where they lie right and repacked where they do not."""

    def __init__(self, tower: Qwen3VisionTower, plan: AttentionPlan, products: TorchProducts) -> None:
        self._config = tower.config
        self._products = products
        self._after = After(tower.config.hidden_act)
        self._embed = Affine.of(tower.patch_embed.proj)
        self._places = tower.pos_embed.weight.detach()
        self._attend = RotaryAttention(products, plan, tower.rotary.frequencies, tower.config.num_heads)
        missing = torch.zeros(tower.config.hidden_size, device=tower.device)
        self._layers: list[_Layer] = []
        self._levels: dict[int, tuple[int, _Merger]] = {}
        for index, block in enumerate(tower.blocks):
            assert isinstance(block, Block)
            self._layers.append(_Layer(block, index, missing, self._attend, products))
            missing = self._layers[-1].missing
            if index in tower.config.deepstack_visual_indexes:
                level = tower.config.deepstack_visual_indexes.index(index)
                merger = tower.deepstack_merger_list[level]
                assert isinstance(merger, PatchMerger)
                self._levels[index] = level, _Merger(merger, missing)
        self._merger = _Merger(tower.merger, missing)
        self._beside = torch.cuda.Stream(tower.device)

    def __call__(self, patches: Tensor, metadata: TowerMetadata, out: Tensor) -> None:
        """`[num_patches, patch_dim]` to `out` `[num_tokens, width]`, in the weights' dtype, on the current device."""
        assert metadata.position_indices is not None
        assert metadata.position_weights is not None
        config, product, rows = self._config, self._products, patches.shape[0]
        x = product(self._embed, patches)
        add_positions_(x, self._places, metadata.position_indices, metadata.position_weights)
        angles = self._attend.angles(metadata.rope_positions, x.dtype)
        frames = self._attend.cut(metadata.frames, self._layers[0].qkv, rows, x.dtype)
        # Rows of no segment leave the norm before attention as zeros, so that nothing in padding reaches real rows.
        valid = metadata.frames.cu_seqlens[-1:]
        merged = config.hidden_size * config.merge_unit
        slices = out.split(config.out_hidden_size, dim=1)
        main = torch.cuda.current_stream()
        beside = self._beside if rows <= _MOST_ROWS_BESIDE else main
        lent: list[Tensor] = []
        sums: Tensor | None = None
        for index, layer in enumerate(self._layers):
            normed = layer.norm1.before(layer.qkv.affine, product, x, valid, sums)
            sums = product.add_later(layer.proj, self._attend(layer.qkv, normed, angles, frames), x)
            normed = layer.norm2.before(layer.fc1, product, x, sums=sums)
            sums = product.add_both_later(layer.fc1, layer.fc2, normed, self._after, x)
            if index in self._levels:
                level, merger = self._levels[index]
                normed = merger.norm(x, sums=sums)
                sums = None
                if beside is not main:
                    # Kept until the streams meet: only then may another tensor take its memory.
                    lent.append(normed)
                    beside.wait_stream(main)
                with torch.cuda.stream(beside):
                    self._merge(merger, normed, slices[1 + level])
                del normed
        self._merge(self._merger, self._merger.norm(x, sums=sums).view(-1, merged), slices[0])
        main.wait_stream(beside)

    def _merge(self, merger: _Merger, normed: Tensor, out: Tensor) -> None:
        """`normed`: `[num_tokens, merged]`; `out`: a level's slice of the output."""
        self._products(merger.fc2, self._products(merger.fc1, normed, After.GELU), out=out)
