"""Synthetic images, with edges, flat parts, ramps and noise, that validate a tower before it serves.

Noise alone is not enough: activations, and in particular their outliers, differ on images that resemble pictures. The
images are preprocessed by the checkpoint's rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from encoder.checkpoint.image_rules import ImageRules
from encoder.images.decoded import decode
from encoder.images.size import Grid
from encoder.pixels.preprocess import patchify, resize

_SIZES = ((448, 448), (640, 384), (320, 512))
"""Widths and heights in pixels."""


def trial_images() -> list[Image.Image]:
    """Returns seven fixed images: ramps, checkers, bars like lines of text, discs, smooth noise, noise, one colour."""
    random = np.random.default_rng(0)
    arrays = []
    for index, draw in enumerate((_ramps, _checkers, _bars, _discs, _smooth, _noise, _plain)):
        width, height = _SIZES[index % len(_SIZES)]
        arrays.append(draw(width, height, random))
    return [Image.fromarray(np.clip(array, 0, 255).astype(np.uint8)) for array in arrays]


def trial_batch(rules: ImageRules, device: torch.device, min_rows: int) -> tuple[Tensor, list[Grid]]:
    """Repeats `trial_images` up to `min_rows` patches. Returns float32 `[num_patches, patch_dim]`, and the grids."""
    pixels = [resize(decode(image, rules), rules) for image in trial_images()]
    rows = [patchify(torch.from_numpy(one.values).to(device), rules) for one in pixels]
    times = -(-min_rows // sum(len(one) for one in rows))
    grids: Sequence[Grid] = [one.grid_thw for one in pixels]
    return torch.cat(rows * times), [*grids] * times


Samples = NDArray[np.float64]


def _ramps(width: int, height: int, random: np.random.Generator) -> Samples:
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    return 255 * np.stack((x, y, (x + y) / 2), -1)


def _checkers(width: int, height: int, random: np.random.Generator) -> Samples:
    """Squares of 4 to 64 pixels, finer to the right."""
    y, x = np.mgrid[0:height, 0:width]
    side = 64 >> (x * 5 // width)
    odd = (x // side + y // side) % 2
    return np.where(odd[..., None] == 1, (250.0, 240.0, 60.0), (20.0, 30.0, 90.0))


def _bars(width: int, height: int, random: np.random.Generator) -> Samples:
    page = np.full((height, width, 3), 252.0)
    for top in range(12, height - 12, 16):
        left = 16
        while left < width - 24:
            length = int(random.integers(4, 28))
            page[top : top + 8, left : min(left + length, width - 16) : 3] = 25.0
            left += length + 6
    return page


def _discs(width: int, height: int, random: np.random.Generator) -> Samples:
    y, x = np.mgrid[0:height, 0:width]
    scene = np.full((height, width, 3), 235.0)
    for _ in range(9):
        middle_x, middle_y, radius = random.uniform(0, width), random.uniform(0, height), random.uniform(12, 90)
        scene[(x - middle_x) ** 2 + (y - middle_y) ** 2 < radius**2] = random.uniform(0, 255, 3)
    return scene


def _smooth(width: int, height: int, random: np.random.Generator) -> Samples:
    """Noise of several scales, the coarsest the strongest, as in photographs."""
    total = np.zeros((height, width, 3))
    for cells in (3, 7, 15, 31, 63):
        coarse = Image.fromarray(random.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        total += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float64) / cells
    spread = float(total.max() - total.min())
    return 255 / spread * (total - float(total.min()))


def _noise(width: int, height: int, random: np.random.Generator) -> Samples:
    return random.uniform(0, 256, (height, width, 3))


def _plain(width: int, height: int, random: np.random.Generator) -> Samples:
    return np.full((height, width, 3), (90.0, 140.0, 200.0))
