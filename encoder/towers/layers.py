"""Layers of the eager tower: patch embedding, rotary positions, attention, norms, MLPs, blocks and the merger.

Parameters have the same names as in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.checkpoint.vision_config import VisionConfig
from encoder.metadata.segments import Segments
from encoder.towers.attention import attention

# The architectures' code fixes it; their configurations do not contain it.
NORM_EPS = 1e-6


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""The functions that `VisionConfig.hidden_act` names."""


class PatchEmbedding(nn.Module):
    """A convolution whose kernel is one patch, computed as a matrix product over flattened patches.

    `[num_patches, patch_dim]` in any float dtype to `[num_patches, hidden_size]` in the weights' dtype.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.patch_dim, config.hidden_size, bias=config.traits.patch_bias)

    def forward(self, patches: Tensor) -> Tensor:
        out: Tensor = self.proj(patches.to(self.proj.weight.dtype))
        return out


class RotaryPositions(nn.Module):
    """Axial rotary positions: the first half of the angles is proportional to the row, the second to the column.

    `[num_patches, 2]` to cos and sin, each float32 `[num_patches, 1, 1, head_dim / 2]`.
    """

    frequencies: Tensor

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        axis_dim = config.head_dim // 2
        # On the CPU even if parameters are created on the meta device: frequencies are computed, not loaded.
        exponent = torch.arange(0, axis_dim, 2, dtype=torch.float32, device="cpu") / axis_dim
        self.register_buffer("frequencies", 1.0 / config.rope_theta**exponent, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions.unsqueeze(-1).float() * self.frequencies).flatten(1)[:, None, None]
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (i, i + head_dim / 2) of `x` `[num_patches, …, heads, head_dim]` in float32; keeps the dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Multi-head attention within segments; `[num_patches, hidden_size]` in and out."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k = rotate(qkv[:, :2], cos, sin).unbind(1)
        out: Tensor = self.proj(attention(q, k, qkv[:, 2], segments).flatten(1))
        return out


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 and rounded once."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


def build_norm(config: VisionConfig, features: int) -> nn.Module:
    """Returns the architecture's norm over `features`."""
    return RMSNorm(features) if config.traits.rms_norm else nn.LayerNorm(features, eps=NORM_EPS)


class MLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self._activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(self._activation(self.linear_fc1(x)))
        return out


class GatedMLP(nn.Module):
    """An MLP whose activated gate multiplies a second projection."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self._activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = build_norm(config, config.hidden_size)
        self.norm2 = build_norm(config, config.hidden_size)
        self.attn = Attention(config)
        self.mlp = GatedMLP(config) if config.traits.gated_mlp else MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, segments)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PatchMerger(nn.Module):
    """Merges the patches of a block to one token: `[num_patches, hidden_size]` to `[num_tokens, out_hidden_size]`.

    The norm is over a patch or, for deepstack levels, over the merged block.
    """

    def __init__(self, config: VisionConfig, *, norm_merged: bool = False) -> None:
        super().__init__()
        self._merged, self._norm_merged = config.hidden_size * config.merge_unit, norm_merged
        self._names = config.traits.merger_names
        norm = build_norm(config, self._merged if norm_merged else config.hidden_size)
        layers = norm, nn.Linear(self._merged, self._merged), nn.Linear(self._merged, config.out_hidden_size)
        for name, layer in zip(self._names, layers, strict=True):
            parent, _, own = name.rpartition(".")
            if parent and not hasattr(self, parent):
                self.add_module(parent, nn.Module())
            self.get_submodule(parent).add_module(own, layer)

    @property
    def layers(self) -> tuple[nn.Module, nn.Linear, nn.Linear]:
        """The norm and the two linear layers, whose names differ between architectures' checkpoints."""
        norm, first, second = (self.get_submodule(name) for name in self._names)
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)
        return norm, first, second

    def forward(self, x: Tensor) -> Tensor:
        norm, first, second = self.layers
        x = norm(x.view(-1, self._merged)) if self._norm_merged else norm(x).view(-1, self._merged)
        out: Tensor = second(F.gelu(first(x)))
        return out
