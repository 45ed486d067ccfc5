"""A decoded image that is not resized yet: what decoders hand over where the device resizes.

It must not know of tensors, so that a process which only decodes needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from encoder.image_load import check_pixels, load_rgb, to_rgb
from encoder.image_rules import ImageRules, PixelBounds
from encoder.image_size import Grid, grid_of


@dataclass(frozen=True)
class Decoded:
    """An upright RGB image in the size of its file."""

    values: NDArray[np.uint8]
    """`[H, W, 3]`, contiguous; H and W are at least 1."""
    grid_thw: Grid
    """In patches, of the size that it is to be resized to; t is 1."""


def decode(
    image: bytes | Image.Image, rules: ImageRules, bounds: PixelBounds | None, *, max_pixels_decoded: int
) -> Decoded:
    """Encoded bytes, or an image that Pillow holds. Raises ImageError; images with more pixels than
    `max_pixels_decoded` are refused by their header."""
    if isinstance(image, bytes):
        rgb = load_rgb(image, max_pixels_decoded=max_pixels_decoded)
    else:
        check_pixels(image.width, image.height, max_pixels_decoded)
        rgb = to_rgb(image)
    grid = grid_of(rgb.width, rgb.height, rules, bounds)
    return Decoded(np.array(rgb), grid)
