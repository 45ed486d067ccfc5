"""Bytes of images on a device to patches: resized, normalised and cut there, equal to the CPU's bit for bit.

On a GPU the kernels of `encoder.kernels.pixels` do it in two launches for a whole batch; elsewhere plain torch makes
the same integer sums, and is the reference that the kernels are tested against. It must not know of copies or streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.bicubic import TapCache, taps
from encoder.image_rules import ImageRules
from encoder.pixel_plan import PixelPlan, plan_pixels
from encoder.preprocess import normalisation, patchify


@dataclass(frozen=True)
class Tables:
    """A plan's tables on the device, views of one copied piece."""

    rows: Tensor
    patches: Tensor
    taps: Tensor

    @classmethod
    def of(cls, plan: PixelPlan, control: Tensor) -> Tables:
        """`control`: the plan's bytes, uint8, 8-byte aligned."""
        first = plan.rows_table.nbytes
        second = first + plan.patch_table.nbytes
        third = second + 4 * plan.num_weights
        return cls(
            control[:first].view(torch.int64).view(plan.rows_table.shape),
            control[first:second].view(torch.int64).view(plan.patch_table.shape),
            control[second:third].view(torch.int32),
        )


def fill_patches(plan: PixelPlan, buffer: Tensor, control: Tensor, rules: ImageRules, out: Tensor) -> None:
    """Writes a batch's patches on the current stream, without a synchronisation.

    `buffer`: uint8 `[plan.buffer_bytes]` with the images in its first part; `control`: `plan.control` on its device;
    `out`: `[plan.num_patches, patch_dim]` in any float dtype, contiguous. Raises ValueError for other shapes.
    """
    wanted = (plan.num_patches, 3 * rules.temporal_patch_size * rules.patch_size**2)
    if tuple(out.shape) != wanted or not out.is_contiguous():
        raise ValueError(f"patches go to a contiguous tensor of {wanted}, not one of {tuple(out.shape)}")
    if buffer.numel() < plan.buffer_bytes:
        raise ValueError(f"the buffer has {buffer.numel()} bytes, the batch needs {plan.buffer_bytes}")
    if buffer.device.type == "cuda":
        launch(plan, buffer, control, rules, out)
    else:
        fill_plainly(plan, buffer, rules, out)


def launch(plan: PixelPlan, buffer: Tensor, control: Tensor, rules: ImageRules, out: Tensor) -> None:
    """`fill_patches` by the Triton kernels."""
    from encoder.kernels import pixels  # triton is not everywhere

    tables = Tables.of(plan, control)
    mean, std = normalisation(rules, buffer.device)
    if plan.most_rows:
        pixels.resize_rows(buffer, tables.rows, tables.taps, plan.most_rows, plan.widest)
    pixels.write_patches(
        buffer,
        tables.patches,
        tables.taps,
        mean,
        std,
        out,
        patch=rules.patch_size,
        merge=rules.merge_size,
        frames=rules.temporal_patch_size,
        most_patches=plan.most_patches,
    )


def fill_plainly(plan: PixelPlan, buffer: Tensor, rules: ImageRules, out: Tensor) -> None:
    """`fill_patches` in plain torch, on any device."""
    start = 0
    for image in plan.placed:
        values = torch.as_strided(
            buffer, (3, image.height, image.width), (image.strides[2], *image.strides[:2]), image.offset
        )
        patches = patchify(resize_bytes(values, *image.target), rules)
        out[start : start + len(patches)].copy_(patches)
        start += len(patches)


def resize_bytes(values: Tensor, height: int, width: int) -> Tensor:
    """uint8 `[3, H, W]` to `[3, height, width]` by the integer sums of `encoder.bicubic`, rows first. Slow."""
    return _resized_last(_resized_last(values, width).transpose(1, 2), height).transpose(1, 2)


def _resized_last(values: Tensor, num_out: int) -> Tensor:
    num_in = values.shape[-1]
    if num_in == num_out:
        return values
    found = taps(num_in, num_out)
    first, weights = (torch.from_numpy(part).to(values.device) for part in (found.first, found.weights))
    total = torch.full(
        (*values.shape[:-1], num_out), 1 << (found.precision - 1), dtype=torch.int32, device=values.device
    )
    for tap in range(weights.shape[1]):
        place = (first + tap).clamp_(max=num_in - 1)  # past the end the weight is 0
        total += values[..., place].to(torch.int32) * weights[:, tap]
    return (total >> found.precision).clamp_(0, 255).to(torch.uint8)


def to_patches(
    values: Tensor,
    target: tuple[int, int],
    rules: ImageRules,
    *,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    cache: TapCache | None = None,
) -> Tensor:
    """One decoded image to patches, where it lies.

    `values`: uint8 `[H, W, 3]`, contiguous, on any device; `target`: width and height, multiples of `rules.factor`.
    Returns `out`, or a new `[num_patches, patch_dim]` of `dtype`. `cache` remembers the weights. A server stages whole
    batches instead (`encoder.staging`).
    """
    height, width, _ = values.shape
    grid = (1, target[1] // rules.patch_size, target[0] // rules.patch_size)
    plan = plan_pixels([(height, width, False)], [grid], rules, cache or TapCache(0))
    if plan.placed[0].target != (target[1], target[0]):
        raise ValueError(f"the size to resize to is {target}; both sides must be multiples of {rules.factor}")
    if out is None:
        patch_dim = 3 * rules.temporal_patch_size * rules.patch_size**2
        out = torch.empty(plan.num_patches, patch_dim, dtype=dtype, device=values.device)
    buffer = torch.empty(plan.buffer_bytes, dtype=torch.uint8, device=values.device)
    buffer[: values.numel()].copy_(values.reshape(-1))
    fill_patches(plan, buffer, torch.from_numpy(plan.control).to(values.device), rules, out)
    return out
