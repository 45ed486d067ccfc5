"""Small models of transformers' own classes with random weights, saved as real checkpoints are: the reference.

The weights are made so that every part of a tower moves its output: attention is far from uniform, biases and norms are
not at their starting values, positions are as large as patches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen4ExpConfig,
    Qwen4ExpForConditionalGeneration,
)

Grid = tuple[int, int, int]

MODELS = {
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": Qwen3VLMoeForConditionalGeneration,
    "qwen3_5": Qwen3_5ForConditionalGeneration,
    "qwen3_5_moe": Qwen3_5MoeForConditionalGeneration,
    "qwen4_exp": Qwen4ExpForConditionalGeneration,
}
WITHOUT_LEVELS = ("qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen4_exp")

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
# The published models' head dimensions (72, and 80 for Qwen2.5-VL) and position table, with few heads and blocks.
_QWEN3_VISION = {
    "hidden_size": 144,
    "depth": 4,
    "num_heads": 2,
    "intermediate_size": 90,
    "out_hidden_size": 48,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [0, 2],
}
_CONFIGS: dict[str, Callable[..., PretrainedConfig]] = {
    "qwen3_vl": Qwen3VLConfig,
    "qwen3_vl_moe": Qwen3VLMoeConfig,
    "qwen3_5": Qwen3_5Config,
    "qwen3_5_moe": Qwen3_5MoeConfig,
    "qwen4_exp": Qwen4ExpConfig,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}


def _config(model_type: str) -> PretrainedConfig:
    text = {**_TEXT, "rope_parameters": _ROPE}
    if model_type == "qwen2_5_vl":
        vision = {
            "hidden_size": 160,
            "depth": 4,
            "num_heads": 2,
            "intermediate_size": 90,
            "out_hidden_size": 48,
            "fullatt_block_indexes": [1, 3],
        }
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if model_type in ("qwen3_vl_moe", "qwen3_5_moe", "qwen4_exp"):
        text |= experts
    vision = dict(_QWEN3_VISION)
    if model_type in WITHOUT_LEVELS:
        del vision["deepstack_visual_indexes"]
    return _CONFIGS[model_type](text_config=text, vision_config=vision, tie_word_embeddings=False)


def randomise(tower: nn.Module, generator: torch.Generator) -> None:
    for name, parameter in tower.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            gain = 0.7 if "pos_embed" in name else 1.5 * parameter[0].numel() ** -0.5
            parameter.data.copy_(gain * noise)
        elif "norm" in name or "ln_q" in name:
            parameter.data.copy_((0.0 if name.endswith("bias") else 1.0) + 0.2 * noise)
        else:
            parameter.data.copy_(0.2 * noise)


@dataclass(frozen=True)
class Reference:
    """A saved checkpoint and transformers' tower with the same weights in float32."""

    model_type: str
    path: Path
    tower: nn.Module

    def in_bfloat16(self) -> nn.Module:
        """transformers' tower as it loads this checkpoint in bfloat16."""
        model = MODELS[self.model_type].from_pretrained(self.path, dtype=torch.bfloat16)
        return model.model.visual.eval().requires_grad_(False)


def make_reference(model_type: str, folder: Path, seed: int = 0) -> Reference:
    """Builds the model and saves it into `folder` in several shards."""
    generator = torch.Generator().manual_seed(seed)
    model = MODELS[model_type](_config(model_type)).eval().requires_grad_(False)
    randomise(model.model.visual, generator)
    model.save_pretrained(folder, max_shard_size="1MB")
    return Reference(model_type, folder, model.model.visual)


def run_reference(tower: nn.Module, patches: Tensor, grid_thw: list[Grid]) -> list[Tensor]:
    """The merged output and each deepstack level, each `[num_tokens, out_hidden_size]` in float32."""
    out = tower(patches, grid_thw=torch.tensor(grid_thw))
    return [level.float() for level in (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))]


def random_patches(grid_thw: list[Grid], patch_dim: int, seed: int = 1) -> Tensor:
    """Patches in float32, of about the spread of normalised pixels: neighbours alike, as in a picture."""
    generator = torch.Generator().manual_seed(seed)
    num_patches = sum(t * h * w for t, h, w in grid_thw)
    base = torch.randn(num_patches, 1, generator=generator)
    return 0.5 * base + 0.8 * torch.randn(num_patches, patch_dim, generator=generator)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
