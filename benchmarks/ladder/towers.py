"""Subjects of the measurements: the published towers' shapes with random weights, and batches of image sizes.

The weights exercise every part of a tower: attention is neither flat nor saturated, and biases and norms differ from
their initial values.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.checkpoint.vision_config import Architecture, VisionConfig
from encoder.metadata.geometry import Grid
from encoder.towers.tower import VisionTower
from encoder.towers.weights import build_tower

Sizes = Sequence[tuple[int, int]]
"""Heights and widths in pixels."""

_MIX = [(224, 224)] * 4 + [(448, 672)] * 4 + [(1024, 768)] * 2 + [(1344, 1008)]
SHAPES: Mapping[str, Sizes] = {
    "1×224²": [(224, 224)],
    "16×224²": [(224, 224)] * 16,
    "8×448²": [(448, 448)] * 8,
    "1×1024²": [(1024, 1024)],
    "mix": _MIX,
}
HELD_OUT: Mapping[str, Sizes] = {
    "1×640×480": [(480, 640)],
    "1×1920×1080": [(1080, 1920)],
    "3×1240×1754": [(1754, 1240)] * 3,
    "6×512×384": [(384, 512)] * 6,
    "32×128²": [(128, 128)] * 32,
    "1×3000×2000": [(2000, 3000)],
}
"""Further batches; names are width × height. Token budgets and images per batch were later chosen with 6×512×384 and
32×128² in view; no default was chosen by the other four."""
TINY_SHAPES: Mapping[str, Sizes] = {
    "1×64²": [(64, 64)],
    "4×64²": [(64, 64)] * 4,
    "mix": [(64, 64), (96, 160), (128, 64)],
}
TINY_HELD_OUT: Mapping[str, Sizes] = {"1×128×96": [(96, 128)]}
_QWEN3 = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "out_hidden_size": 4096, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
_QWEN3_2B = {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
    "out_hidden_size": 2048, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip
_QWEN25 = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
    "out_hidden_size": 3584, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
# Qwen3.5's towers are Qwen3-VL's without deepstack levels.
_QWEN35 = _QWEN3 | {"deepstack_visual_indexes": []}
_SMALL = {"depth": 3, "hidden_size": 64, "intermediate_size": 90, "num_heads": 2, "out_hidden_size": 48}
SECTIONS: Mapping[str, Mapping[str, object]] = {
    "qwen3_vl": _QWEN3,
    "qwen2_5_vl": _QWEN25,
    "qwen3_vl_2b": _QWEN3_2B,
    "qwen3_5": _QWEN35,
}
"""Vision sections of the published configurations, by the benchmarks' name of the tower."""
ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen3_vl": "qwen3_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl_2b": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
}
TINY_SECTIONS: Mapping[str, Mapping[str, object]] = {
    "qwen3_vl": _QWEN3 | _SMALL | {"deepstack_visual_indexes": [0, 1]},
    "qwen2_5_vl": _QWEN25 | _SMALL | {"fullatt_block_indexes": [1]},
    "qwen3_vl_2b": _QWEN3_2B | _SMALL | {"deepstack_visual_indexes": [0, 1]},
    "qwen3_5": _QWEN35 | _SMALL,
}
NAMES = {
    "qwen3_vl": "Qwen3-VL-8B",
    "qwen2_5_vl": "Qwen2.5-VL-7B",
    "qwen3_vl_2b": "Qwen3-VL-2B",
    "qwen3_5": "Qwen3.5-9B",
}


INPUT_SETS = 3
"""Number of inputs of a shape used in turn, so that no run gets the values of the previous run."""


@dataclass(frozen=True)
class Shape:
    """A batch of images, given by their grids in patches."""

    name: str
    grids: tuple[Grid, ...]
    tokens: int
    tflop: float
    held_out: bool = False


def config_of(arch: str, *, tiny: bool, dtype: str) -> VisionConfig:
    """Returns the configuration of the tower `arch`, at its published size or a tiny one."""
    section = (TINY_SECTIONS if tiny else SECTIONS)[arch]
    return VisionConfig.from_dict({"model_type": ARCHITECTURES[arch], "dtype": dtype, "vision_config": dict(section)})


def shapes_of(config: VisionConfig, *, tiny: bool) -> list[Shape]:
    """Returns the shapes in order. Sides are rounded to whole tokens, as the image processor does."""
    side = config.patch_size * config.spatial_merge_size

    def patches(pixels: int) -> int:
        return max(1, round(pixels / side)) * config.spatial_merge_size

    found = []
    fitted, held_out = (TINY_SHAPES, TINY_HELD_OUT) if tiny else (SHAPES, HELD_OUT)
    for name, sizes in {**fitted, **held_out}.items():
        grids = tuple((1, patches(height), patches(width)) for height, width in sizes)
        tokens = sum(h * w for _, h, w in grids) // config.merge_unit
        found.append(Shape(name, grids, tokens, tflop(config, grids), name in held_out))
    return found


def tflop(config: VisionConfig, grids: Sequence[Grid]) -> float:
    """Returns TFLOP of the blocks' products and attention, counting a multiply-add as two; mergers are left out.

    A window counts as full: its patches attend to its maximum number of patches.
    """
    width, depth = config.hidden_size, config.depth
    linear = 4 * width**2 + (3 if config.traits.gated_mlp else 2) * width * config.intermediate_size
    full = sum(not config.is_windowed(index) for index in range(depth))
    total = 0
    for t, h, w in grids:
        n = t * h * w
        total += (
            depth * 2 * n * linear + full * 4 * n * n * width + (depth - full) * 4 * n * config.window_patches * width
        )
    return total / 1e12


def random_tower(config: VisionConfig, *, seed: int, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """Returns the eager tower. Weights are rounded to bfloat16 for any `dtype`, so that a seed defines one function."""
    tower = build_tower(config)
    generator = torch.Generator(device).manual_seed(seed)
    filled: dict[str, Tensor] = {}
    for name, parameter in tower.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        if parameter.dim() >= 2:
            value = noise * (0.7 if "pos_embed" in name else parameter[0].numel() ** -0.5)
        elif name.endswith("bias"):
            value = 0.1 * noise
        else:
            value = 1.0 + 0.1 * noise
        filled[name] = value.to(torch.bfloat16).to(dtype)
    tower.load_state_dict(filled, strict=True, assign=True)
    return tower.to(device).requires_grad_(False).eval()


def random_patches(config: VisionConfig, num_patches: int, *, seed: int, device: torch.device) -> Tensor:
    """Returns bfloat16 `[num_patches, patch_dim]` with about the spread of normalised pixels, neighbours correlated."""
    generator = torch.Generator(device).manual_seed(seed)
    base = torch.randn(num_patches, 1, generator=generator, device=device)
    noise = torch.randn(num_patches, config.patch_dim, generator=generator, device=device)
    return (0.5 * base + 0.8 * noise).to(torch.bfloat16)


def random_inputs(
    config: VisionConfig, grids: Sequence[Grid], *, sets: int, seed: int, device: torch.device
) -> list[Tensor]:
    """Returns `sets` different inputs for a batch of these grids, each from `random_patches`."""
    rows = sum(t * h * w for t, h, w in grids)
    return [random_patches(config, rows, seed=seed + 1 + number, device=device) for number in range(sets)]


def unseen_grids(config: VisionConfig, known: Sequence[Grid], *, tiny: bool, seed: int) -> list[Grid]:
    """Returns distinct grids of 100 to 520 tokens (tiny: 4 to 60), aspect up to 3, none of `known`, in random order."""
    low, high = (4, 60) if tiny else (100, 520)
    merge = config.spatial_merge_size
    grids = [
        (1, merge * rows, merge * columns)
        for rows in range(1, high + 1)
        for columns in range(max(1, -(-rows // 3)), 3 * rows + 1)
        if low <= rows * columns <= high
    ]
    pool = [grid for grid in grids if grid not in set(known)]
    random.Random(seed).shuffle(pool)
    return pool
