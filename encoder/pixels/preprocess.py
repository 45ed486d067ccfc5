"""Preprocessing in two halves: image to resized pixels (in a worker process), pixels to patches (on the device).

Together they match transformers' Qwen2-VL image processor for the same checkpoint. Pixels between them are uint8, which
takes a quarter of the bytes of float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from encoder.checkpoint.image_rules import ImageRules
from encoder.images.decoded import Decoded
from encoder.images.size import Grid


@dataclass(frozen=True)
class Pixels:
    """A resized image, or resized frames of a video."""

    values: NDArray[np.uint8]
    """RGB `[3, H, W]`, of a video `[F, 3, H, W]`, contiguous; H and W are multiples of `ImageRules.factor`."""
    grid_thw: Grid
    """Grid in patches; t is 1 for an image, the number of temporal patches of F frames for a video."""


def resize(image: Decoded, rules: ImageRules) -> Pixels:
    """Resizes a decoded image or frames to their grid, on the CPU."""
    _, h, w = image.grid_thw
    frames = torch.from_numpy(image.values).movedim(-1, -3)
    height, width = h * rules.patch_size, w * rules.patch_size
    if frames.ndim == 3:
        return Pixels(resize_values(frames, height, width).contiguous().numpy(), image.grid_thw)
    resized = torch.empty((len(frames), 3, height, width), dtype=torch.uint8)
    for target, frame in zip(resized, frames, strict=True):
        target.copy_(resize_values(frame, height, width))
    return Pixels(resized.numpy(), image.grid_thw)


def resize_values(values: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resizes uint8 `[3, H, W]` on the CPU by torch's antialiased bicubic integer arithmetic, bit for bit as
    torchvision does."""
    if values.shape[1:] == (height, width):
        return values
    return torch.nn.functional.interpolate(
        values[None], (height, width), mode="bicubic", align_corners=False, antialias=True
    )[0]


def patchify(values: torch.Tensor, rules: ImageRules) -> torch.Tensor:
    """Normalises uint8 `[3, H, W]` or `[F, 3, H, W]` and cuts it to float32
    `[t*h*w, 3 * temporal_patch_size * patch_size²]`, same device.

    Rows are ordered by temporal patch, then by merge block: row and column of the block, then row and column within
    it. A row is ordered channel, frame, y, x. The last frame, or the image, fills the rest of its temporal patch.
    Raises ValueError if H or W is not a multiple of `rules.factor`.
    """
    frames = values if values.ndim == 4 else values[None]
    num_frames, channels, height, width = frames.shape
    patch, merge = rules.patch_size, rules.merge_size
    if height % rules.factor or width % rules.factor:
        raise ValueError(f"pixels are {width}x{height}; both sides must be multiples of {rules.factor}")
    h, w = height // patch, width // patch
    # Bytes are reordered first, so that floats are written once, in their final order.
    blocks = frames.reshape(num_frames, channels, h // merge, merge, patch, w // merge, merge, patch)
    patches = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(num_frames, h * w, channels, patch * patch)
    mean, std = mean_and_std(rules, values.device)
    normalised = patches.to(torch.float32).sub_(mean[:, 0]).div_(std[:, 0])
    pair = rules.temporal_patch_size
    if num_frames == 1:
        normalised = normalised.expand(pair, -1, -1, -1)
    elif padding := -num_frames % pair:
        normalised = torch.cat((normalised, normalised[-1:].expand(padding, -1, -1, -1)))
    pairs = normalised.reshape(-1, pair, h * w, channels, patch * patch)
    return pairs.permute(0, 2, 3, 1, 4).reshape(-1, channels * pair * patch * patch)


# Cached: creating them on a GPU copies from the host, which waits for all work queued before.
@lru_cache(maxsize=16)
def mean_and_std(rules: ImageRules, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and std, float32 `[3, 1, 1]` on the scale of bytes, computed as the transformers processor does."""
    per_byte = 1.0 / rules.rescale_factor
    mean, std = (torch.tensor(numbers).view(3, 1, 1) * per_byte for numbers in (rules.image_mean, rules.image_std))
    return mean.to(device), std.to(device)
