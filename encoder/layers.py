"""What both towers are built of: patch embedding, rotary positions, attention, blocks, and two kinds of MLP and norm.

Parameters are named as in the checkpoints. It must not know grids, checkpoints' files or devices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.attention import Segments, attention
from encoder.vision_config import VisionConfig

# Fixed in the architectures' code, not in their configurations.
NORM_EPS = 1e-6


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that `hidden_act` names."""
    match name:
        case "silu":
            return F.silu
        case "gelu":
            return F.gelu
        case "gelu_pytorch_tanh":
            return _gelu_tanh
    raise ValueError(f"no activation {name!r}")


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class PatchEmbedding(nn.Module):
    """A convolution whose kernel is one patch: a matrix product over flattened patches.

    `[num_patches, patch_dim]` in any float dtype to `[num_patches, hidden_size]` in the weights' dtype.
    """

    def __init__(self, config: VisionConfig, *, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(config.patch_dim, config.hidden_size, bias=bias)

    def forward(self, patches: Tensor) -> Tensor:
        out: Tensor = self.proj(patches.to(self.proj.weight.dtype))
        return out


class RotaryPositions(nn.Module):
    """Axial rotary positions: the first half of the angles turns with the row, the second with the column.

    `[num_patches, 2]` to cos and sin, each float32 `[num_patches, 1, 1, head_dim / 2]`.
    """

    frequencies: Tensor

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        axis_dim = config.head_dim // 2
        # On the CPU even while weights are laid out on the meta device: these are computed, not loaded.
        exponent = torch.arange(0, axis_dim, 2, dtype=torch.float32, device="cpu") / axis_dim
        self.register_buffer("frequencies", 1.0 / config.rope_theta**exponent, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions.unsqueeze(-1).float() * self.frequencies).flatten(1)[:, None, None]
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + head_dim / 2) of `x` `[num_patches, …, heads, head_dim]` in float32; keeps its dtype."""
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


class MLP(nn.Module):
    """Two layers with an activation between: Qwen3-VL's."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self._activation = activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(self._activation(self.linear_fc1(x)))
        return out


class GatedMLP(nn.Module):
    """An activated gate times a second projection: Qwen2.5-VL's."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self._activation = activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """A pre-norm transformer block; which norm and MLP, the tower says."""

    def __init__(self, config: VisionConfig, norm: Callable[[int], nn.Module], mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = norm(config.hidden_size)
        self.norm2 = norm(config.hidden_size)
        self.attn = Attention(config)
        self.mlp = mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, segments)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out
