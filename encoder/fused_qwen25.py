"""Qwen2.5-VL's tower as a chain of fused kernels; the same numbers as `qwen2_5_vl` up to rounding.

A pure function of patches and metadata: no synchronisation, no host work per image, shapes from shapes. It must not
know graphs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.fused_attention import AttentionPlan, CutRows
from encoder.fused_norm import FusedNorm
from encoder.fused_rotary import RotaryAttention
from encoder.layers import Block, GatedMLP, RMSNorm, activation
from encoder.metadata import TowerMetadata
from encoder.products import Affine, After, Part, TorchProducts
from encoder.qwen2_5_vl import Qwen25VisionTower


def _norm(layer: nn.Module, missing: Tensor) -> FusedNorm:
    assert isinstance(layer, RMSNorm)
    return FusedNorm(layer.weight, None, missing)


class _Layer:
    def __init__(
        self,
        block: Block,
        index: int,
        missing: Tensor,
        attend: RotaryAttention,
        products: TorchProducts,
        longest: int | None,
    ) -> None:
        mlp = block.mlp
        assert isinstance(mlp, GatedMLP)
        self.qkv = attend.product(Affine.of(block.attn.qkv), index, longest)
        self.proj = products.load(Affine.of(block.attn.proj), Part.PROJ, index)
        gate, up, down = Affine.of(mlp.gate_proj), Affine.of(mlp.up_proj), Affine.of(mlp.down_proj)
        width = products.inner_width(gate.weight.shape[0], gate.weight.dtype)
        # Exact: what is gated is 0 in the features added, and so are the weights that follow.
        paired = Affine.paired(gate.padded(outputs=width), up.padded(outputs=width))
        self.gate_up = products.load(paired, Part.UP, index)
        self.down = products.load(down.padded(inputs=width), Part.DOWN, index)
        self.norm1 = _norm(block.norm1, missing)
        self.norm2 = _norm(block.norm2, missing + self.proj.bias.float())
        self.missing = missing + self.proj.bias.float() + self.down.bias.float()


class FusedQwen25Forward:
    """Weights of a loaded tower, shared where they lie right and repacked where they do not."""

    def __init__(self, tower: Qwen25VisionTower, plan: AttentionPlan, products: TorchProducts) -> None:
        self._config = tower.config
        self._products = products
        self._embed = Affine.of(tower.patch_embed.proj)
        self._attend = RotaryAttention(products, plan, tower.rotary.frequencies, tower.config.num_heads)
        window = tower.config.window_tokens**2 * tower.config.merge_unit
        missing = torch.zeros(tower.config.hidden_size, device=tower.device)
        self._layers: list[_Layer] = []
        for index, block in enumerate(tower.blocks):
            assert isinstance(block, Block)
            longest = None if index in tower.config.fullatt_block_indexes else window
            self._layers.append(_Layer(block, index, missing, self._attend, products, longest))
            missing = self._layers[-1].missing
        self._merger_norm = _norm(tower.merger.ln_q, missing)
        first, second = tower.merger.mlp[0], tower.merger.mlp[2]
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)
        self._merger_first, self._merger_second = Affine.of(first), Affine.of(second)
        name = tower.config.hidden_act
        self._activation = None if name == "silu" else activation(name)

    def __call__(self, patches: Tensor, metadata: TowerMetadata, out: Tensor) -> None:
        """`[num_patches, patch_dim]` to `out` `[num_tokens, width]`, in the weights' dtype, on the current device."""
        assert metadata.windows is not None
        assert metadata.window_order is not None
        assert metadata.window_inverse is not None
        config, product, rows = self._config, self._products, patches.shape[0]
        # Tokens move as whole merge blocks, so that a window's patches and a token's patches stay together.
        tokens = F.linear(patches, self._embed.weight).view(rows // config.merge_unit, -1)
        x = tokens.index_select(0, metadata.window_order).view(rows, -1)
        angles = self._attend.angles(metadata.rope_positions, x.dtype)
        cuts: dict[bool, CutRows] = {}
        # Rows of no segment leave the norm before attention as zeros, so that nothing in padding reaches real rows.
        valid = metadata.frames.cu_seqlens[-1:]
        sums: Tensor | None = None
        for index, layer in enumerate(self._layers):
            whole = index in config.fullatt_block_indexes
            if whole not in cuts:
                segments = metadata.frames if whole else metadata.windows
                cuts[whole] = self._attend.cut(segments, layer.qkv, rows, x.dtype)
            normed = layer.norm1.before(layer.qkv.affine, product, x, valid, sums)
            sums = product.add_later(layer.proj, self._attend(layer.qkv, normed, angles, cuts[whole]), x)
            normed = layer.norm2.before(layer.gate_up, product, x, sums=sums)
            if self._activation is None:
                sums = product.add_both_later(layer.gate_up, layer.down, normed, After.SWIGLU, x)
            else:
                pairs = product(layer.gate_up, normed)
                sums = product.add_later(layer.down, self._activation(pairs[:, 0::2]) * pairs[:, 1::2], x)
        joined = self._merger_norm(x, sums=sums).view(rows // config.merge_unit, -1)
        merged = product(self._merger_second, product(self._merger_first, joined, After.GELU))
        torch.index_select(merged, 0, metadata.window_inverse, out=out)
