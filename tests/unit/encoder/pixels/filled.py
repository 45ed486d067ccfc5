"""Patches of one image, made as a batch of one."""

from __future__ import annotations

import torch
from torch import Tensor

from encoder.checkpoint.image_rules import ImageRules
from encoder.images.size import Grid
from encoder.pixels.device import fill_patches
from encoder.pixels.layout import plan_pixels


def patches_of(
    values: Tensor, grid: Grid, rules: ImageRules, *, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """`out`, or a new tensor, with the patches of `values`, uint8 `[H, W, 3]` or `[F, H, W, 3]`, on their device."""
    frames = values if values.ndim == 4 else values[None]
    plan = plan_pixels([(*frames.shape[:3], False)], [grid], rules)
    if out is None:
        width = 3 * rules.temporal_patch_size * rules.patch_size**2
        out = torch.empty(plan.num_patches, width, dtype=dtype, device=values.device)
    buffer = torch.empty(plan.buffer_bytes, dtype=torch.uint8, device=values.device)
    buffer[: values.numel()].copy_(values.reshape(-1))
    fill_patches(plan, buffer, torch.from_numpy(plan.control).to(values.device), rules, out)
    return out
