"""Decoded images before the resize, which decoders produce when the device resizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from encoder.checkpoint.image_rules import ImageRules, PixelBounds
from encoder.images.load import MAX_PIXELS_DECODED, check_pixels, load_rgb, to_rgb
from encoder.images.size import Grid, image_grid


@dataclass(frozen=True)
class Decoded:
    """An upright RGB image, or upright frames of a video, in the original size."""

    values: NDArray[np.uint8]
    """`[H, W, 3]`, of a video `[F, H, W, 3]`, contiguous; H and W are at least 1."""
    grid_thw: Grid
    """Grid in patches after the resize; t is 1 for an image, the number of temporal patches of F frames for a video."""


def decode(
    image: bytes | Image.Image,
    rules: ImageRules,
    bounds: PixelBounds | None = None,
    *,
    max_pixels_decoded: int = MAX_PIXELS_DECODED,
) -> Decoded:
    """Decodes an encoded file or converts a PIL image, without resizing it. The result depends on no other image.

    Raises ImageError, also for images whose header states more than `max_pixels_decoded` pixels.
    """
    if isinstance(image, bytes):
        rgb = load_rgb(image, max_pixels_decoded=max_pixels_decoded)
    else:
        check_pixels(image.width, image.height, max_pixels_decoded)
        rgb = to_rgb(image)
    grid = image_grid(rgb.width, rgb.height, rules, bounds)
    return Decoded(np.array(rgb), grid)
