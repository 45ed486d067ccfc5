"""Resizes, normalises and patchifies the images of a batch on a device, bit for bit as the CPU does.

On a GPU the kernels of `encoder.pixels.kernels` take two launches per batch. On the CPU torch resizes, which is the
reference in the kernels' tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.checkpoint.image_rules import ImageRules
from encoder.pixels.layout import PixelPlan
from encoder.pixels.preprocess import mean_and_std, patchify, resize_values


@dataclass(frozen=True)
class Tables:
    """Tables of a `PixelPlan` on the device, views of one copied buffer."""

    rows: Tensor
    patches: Tensor
    taps: Tensor

    @classmethod
    def from_plan(cls, plan: PixelPlan, control: Tensor) -> Tables:
        """`control`: the bytes of `plan.control`, uint8, 8-byte aligned."""
        first = plan.rows_table.nbytes
        second = first + plan.patch_table.nbytes
        third = second + 4 * plan.num_weights
        return cls(
            control[:first].view(torch.int64).view(plan.rows_table.shape),
            control[first:second].view(torch.int64).view(plan.patch_table.shape),
            control[second:third].view(torch.int32),
        )


def fill_patches(plan: PixelPlan, buffer: Tensor, control: Tensor, rules: ImageRules, out: Tensor) -> None:
    """Writes the patches of a batch on the current stream, without synchronisation.

    `buffer`: uint8, at least `plan.buffer_bytes`, with the images at its start; `control`: `plan.control` on the same
    device; `out`: `[plan.num_patches, patch_dim]`, any float dtype, contiguous. Raises ValueError for other shapes.
    """
    wanted = (plan.num_patches, 3 * rules.temporal_patch_size * rules.patch_size**2)
    if tuple(out.shape) != wanted or not out.is_contiguous():
        raise ValueError(f"the output must be a contiguous tensor of {wanted}, not one of {tuple(out.shape)}")
    if buffer.numel() < plan.buffer_bytes:
        raise ValueError(f"the buffer has {buffer.numel()} bytes, the batch needs {plan.buffer_bytes}")
    if buffer.device.type == "cuda":
        fill_patches_triton(plan, buffer, control, rules, out)
    else:
        fill_patches_torch(plan, buffer, rules, out)


def fill_patches_triton(plan: PixelPlan, buffer: Tensor, control: Tensor, rules: ImageRules, out: Tensor) -> None:
    """`fill_patches` with the Triton kernels."""
    from encoder.pixels.kernels import resize_rows, write_patches  # Triton is missing on some platforms

    tables = Tables.from_plan(plan, control)
    mean, std = mean_and_std(rules, buffer.device)
    if plan.max_rows:
        resize_rows(buffer, tables.rows, tables.taps, plan.max_rows, plan.max_width)
    write_patches(
        buffer,
        tables.patches,
        tables.taps,
        mean,
        std,
        out,
        patch=rules.patch_size,
        merge=rules.merge_size,
        frames=rules.temporal_patch_size,
        max_patches=plan.max_patches,
    )


def fill_patches_torch(plan: PixelPlan, buffer: Tensor, rules: ImageRules, out: Tensor) -> None:
    """`fill_patches` in plain torch, on the CPU."""
    start = 0
    for image in plan.placed:
        values = torch.as_strided(
            buffer, (3, image.height, image.width), (image.strides[2], *image.strides[:2]), image.offset
        )
        patches = patchify(resize_values(values, *image.target), rules)
        out[start : start + len(patches)].copy_(patches)
        start += len(patches)
