"""Image to resized pixels (in a worker process), pixels to patches (on the encoder's device).

Both halves together give what transformers' Qwen2-VL image processor gives for the same checkpoint. The border between
them is uint8, a quarter of the bytes of float32. It must not know of towers, batches or processes, and it needs no
torchvision.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from encoder.decoded import Decoded, decode
from encoder.image_load import MAX_PIXELS_DECODED
from encoder.image_rules import ImageRules, PixelBounds
from encoder.image_size import Grid


@dataclass(frozen=True)
class Pixels:
    """A resized image."""

    values: NDArray[np.uint8]
    """`[3, H, W]`, R, G and B, contiguous; H and W are multiples of `ImageRules.factor`."""
    grid_thw: Grid
    """In patches; t is 1."""


class Preprocessor:
    """Decodes and resizes images by a checkpoint's rules. It keeps no state: an image never depends on another."""

    def __init__(self, rules: ImageRules, *, max_pixels_decoded: int = MAX_PIXELS_DECODED) -> None:
        """`max_pixels_decoded`: images with more pixels are refused by their header, before they are decoded."""
        self.rules = rules
        self.max_pixels_decoded = max_pixels_decoded

    def pixels(self, image: bytes | Image.Image, bounds: PixelBounds | None = None) -> Pixels:
        """Encoded bytes, or an image that Pillow holds, to resized pixels. Raises ImageError."""
        return resize(self.decoded(image, bounds), self.rules)

    def decoded(self, image: bytes | Image.Image, bounds: PixelBounds | None = None) -> Decoded:
        """The first half of `pixels`. Raises ImageError."""
        return decode(image, self.rules, bounds, max_pixels_decoded=self.max_pixels_decoded)


def resize(image: Decoded, rules: ImageRules) -> Pixels:
    """Bicubic with antialiasing in torch's integer arithmetic on the CPU: bit for bit as torchvision resizes bytes."""
    height, width = target(image.grid_thw, rules)
    values = torch.from_numpy(image.values).permute(2, 0, 1)
    if values.shape[1:] != (height, width):
        values = torch.nn.functional.interpolate(
            values[None], (height, width), mode="bicubic", align_corners=False, antialias=True
        )[0]
    return Pixels(values.contiguous().numpy(), image.grid_thw)


def target(grid: Grid, rules: ImageRules) -> tuple[int, int]:
    """Height and width in pixels of an image of this grid, once it is resized."""
    return grid[1] * rules.patch_size, grid[2] * rules.patch_size


def patchify(values: torch.Tensor, rules: ImageRules) -> torch.Tensor:
    """Normalises and cuts: uint8 `[3, H, W]` to float32 `[h*w, 3 * temporal_patch_size * patch_size²]` on its device.

    Rows go by merge blocks: the block's row and column, then row and column in the block. A row is ordered channel,
    frame, y, x; a single image fills all `temporal_patch_size` frames. Raises ValueError where H or W is no multiple of
    `rules.factor`.
    """
    channels, height, width = values.shape
    patch, merge = rules.patch_size, rules.merge_size
    if height % rules.factor or width % rules.factor:
        raise ValueError(f"pixels are {width}x{height}; both sides must be multiples of {rules.factor}")
    h, w = height // patch, width // patch
    # Reordered as bytes first: the float copies are made once, in their final order.
    blocks = values.reshape(channels, h // merge, merge, patch, w // merge, merge, patch)
    patches = blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(h * w, channels, 1, patch * patch)
    mean, std = normalisation(rules, values.device)
    normalised = patches.to(torch.float32).sub_(mean).div_(std)
    return normalised.expand(-1, -1, rules.temporal_patch_size, -1).reshape(h * w, -1)


# Remembered, since making them on a GPU is a copy from the host, which waits for all work queued before it.
@lru_cache(maxsize=16)
def normalisation(rules: ImageRules, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and std `[3, 1, 1]` on the scale of bytes, in the processor's own float32 arithmetic."""
    per_byte = 1.0 / rules.rescale_factor
    mean, std = (torch.tensor(numbers).view(3, 1, 1) * per_byte for numbers in (rules.image_mean, rules.image_std))
    return mean.to(device), std.to(device)
