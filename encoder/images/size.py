"""Computes the resized size, grid and number of tokens of an image from its size; the ingress imports this module.

Pure arithmetic, so that an image's cost is known before it is decoded. Results equal those of transformers' Qwen2-VL
image processor, which all three generations use.
"""

from __future__ import annotations

import math

from encoder.checkpoint.image_rules import ImageRules, PixelBounds
from encoder.images.load import ImageError, ImageHeader, read_header

__all__ = ["ImageError", "ImageHeader", "ImageRules", "PixelBounds", "read_header"]  # and the names below

Grid = tuple[int, int, int]
"""`(t, h, w)` in patches."""

MAX_ASPECT_RATIO = 200
"""Maximum ratio of the longer to the shorter side, as in the Qwen processors."""


def resized_size(width: int, height: int, rules: ImageRules, bounds: PixelBounds | None = None) -> tuple[int, int]:
    """Returns width and height in pixels after the resize: multiples of `rules.factor`, about the same aspect ratio,
    the area within the bounds.

    A very long image may exceed the maximum area, since no side gets shorter than `rules.factor`. Raises ImageError if
    the longer side is over 200 times the shorter one.
    """
    aspect = max(width, height) / min(width, height)
    if aspect > MAX_ASPECT_RATIO:
        raise ImageError(f"image of {width}x{height} has aspect ratio {aspect:.6g}, the limit is {MAX_ASPECT_RATIO}")
    bounds = bounds or PixelBounds()
    min_pixels = rules.min_pixels if bounds.min_pixels is None else bounds.min_pixels
    max_pixels = rules.max_pixels if bounds.max_pixels is None else bounds.max_pixels
    return fit_area(width, height, rules.factor, min_pixels, max_pixels)


def fit_area(
    width: int, height: int, factor: int, min_pixels: int, max_pixels: int, frames: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Returns width and height in pixels, multiples of `factor`, whose area is within the bounds.

    frames: the frames of a video and the same rounded to whole temporal patches, if the bounds are on all frames
    together.
    """
    exact, padded = frames
    new_width, new_height = round(width / factor) * factor, round(height / factor) * factor
    # The order of float operations is the processor's: another order would round some sizes differently.
    if padded * new_width * new_height > max_pixels:
        shrink = math.sqrt((exact * height * width) / max_pixels)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
    elif padded * new_width * new_height < min_pixels:
        grow = math.sqrt(min_pixels / (exact * height * width))
        new_width = math.ceil(width * grow / factor) * factor
        new_height = math.ceil(height * grow / factor) * factor
    return new_width, new_height


def image_grid(width: int, height: int, rules: ImageRules, bounds: PixelBounds | None = None) -> Grid:
    """Returns the grid `(1, h, w)` in patches of an image of `width` x `height` pixels. Raises ImageError."""
    new_width, new_height = resized_size(width, height, rules, bounds)
    return 1, new_height // rules.patch_size, new_width // rules.patch_size


def num_tokens(grid: Grid, merge_size: int) -> int:
    """Returns the number of tokens of a grid after the merge."""
    t, h, w = grid
    return t * h * w // merge_size**2
