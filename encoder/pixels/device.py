"""Resizes, normalises and patchifies the images of a batch on a device, bit for bit as the CPU does.

On a GPU the kernels of `encoder.pixels.kernels` take two launches per batch. On the CPU torch resizes, which is the
reference in the kernels' tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from encoder.checkpoint.image_rules import ImageRules
from encoder.pixels.layout import PixelPlan
from encoder.pixels.preprocess import patchify, resize_values


def fill_patches(plan: PixelPlan, buffer: Tensor, control: Tensor, rules: ImageRules, out: Tensor) -> None:
    """Writes the patches of a batch on the current stream, without synchronisation.

    `buffer`: uint8, at least `plan.buffer_bytes`, with the images at its start; `control`: `plan.control` on the same
    device; `out`: `[plan.num_patches, patch_dim]`, any float dtype, contiguous. Raises ValueError for other shapes.
    """
    wanted = (plan.num_patches, 3 * rules.temporal_patch_size * rules.patch_size**2)
    if tuple(out.shape) != wanted or not out.is_contiguous():
        raise ValueError(f"the output must be a contiguous tensor of {wanted}, not one of {tuple(out.shape)}")
    if buffer.device.type == "cuda":
        fill_patches_triton(plan, buffer, control, rules, out)
    else:
        fill_patches_torch(plan, buffer, rules, out)


def fill_patches_triton(plan: PixelPlan, buffer: Tensor, control: Tensor, rules: ImageRules, out: Tensor) -> None:
    """`fill_patches` with the Triton kernels."""
    from encoder.pixels.kernels import resize_rows, write_patches  # Triton is missing on some platforms

    rows, patches, taps = _tables(plan, control)
    if plan.max_rows:
        resize_rows(buffer, rows, taps, plan.max_rows, plan.max_width)
    write_patches(buffer, patches, taps, rules, out, plan.max_patches)


def _tables(plan: PixelPlan, control: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tables of rows, patches and weights, views of `control`, the bytes of `plan.control`."""
    rows, patches, weights = control.split([plan.rows_table.nbytes, plan.patch_table.nbytes, 4 * plan.num_weights])
    return (
        rows.view(torch.int64).view(plan.rows_table.shape),
        patches.view(torch.int64).view(plan.patch_table.shape),
        weights.view(torch.int32),
    )


def fill_patches_torch(plan: PixelPlan, buffer: Tensor, rules: ImageRules, out: Tensor) -> None:
    """`fill_patches` in plain torch, on the CPU."""
    start = 0
    for image in plan.placed:
        values = torch.as_strided(
            buffer,
            (image.num_frames, 3, image.height, image.width),
            (image.frame_bytes, image.strides[2], *image.strides[:2]),
            image.offset,
        )
        patches = patchify(torch.stack([resize_values(frame, *image.target) for frame in values]), rules)
        out[start : start + len(patches)].copy_(patches)
        start += len(patches)
