"""Where the images of a batch lie in one buffer of bytes, and the tables by which the device makes patches of them.

Pure arithmetic over shapes, with numpy: it is done before any byte is copied. It must not know of devices or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from encoder.bicubic import TapCache, Taps
from encoder.decoded import Decoded
from encoder.image_rules import ImageRules
from encoder.image_size import Grid

# The columns of the tables that `encoder.kernels.pixels` reads, which says what they are.
ROWS_FIELDS = 12
PATCH_FIELDS = 13

ALIGNMENT = 256
"""Of every image in the buffer, in bytes: copies to a GPU are fastest between aligned addresses."""


@dataclass(frozen=True)
class Placed:
    """One image in the buffer."""

    offset: int
    height: int
    width: int
    strides: tuple[int, int, int]
    """From row to row, column to column, channel to channel; in bytes."""
    target: tuple[int, int]
    """Height and width to be resized to."""


@dataclass(frozen=True)
class PixelPlan:
    """All that two kernel launches need."""

    placed: tuple[Placed, ...]
    num_patches: int
    bytes_copied: int
    """The buffer's first part: the images."""
    buffer_bytes: int
    """With the images whose rows are resized, which the device writes behind them."""
    control: NDArray[np.uint8]
    """The three tables, to be copied to the device as one: rows, patches, weights."""
    rows_table: NDArray[np.int64]
    patch_table: NDArray[np.int64]
    num_weights: int
    most_rows: int
    widest: int
    most_patches: int


def strides_of(height: int, width: int, *, planar: bool) -> tuple[int, int, int]:
    """Of `[3, H, W]` or of `[H, W, 3]`, both contiguous: from row to row, column to column, channel to channel."""
    return (width, 1, height * width) if planar else (3 * width, 3, 1)


def plan_pixels(
    shapes: Sequence[tuple[int, int, bool]], grids: Sequence[Grid], rules: ImageRules, cache: TapCache
) -> PixelPlan:
    """`shapes`: height, width and whether `[3, H, W]` rather than `[H, W, 3]`. Raises ValueError for an odd grid."""
    placed: list[Placed] = []
    end = 0
    for (height, width, planar), (t, h, w) in zip(shapes, grids, strict=True):
        if t != 1 or h < 1 or w < 1 or h % rules.merge_size or w % rules.merge_size:
            raise ValueError(f"the grid of an image is {(t, h, w)}; it must be (1, h, w), multiples of the merge size")
        target = (h * rules.patch_size, w * rules.patch_size)
        placed.append(Placed(end, height, width, strides_of(height, width, planar=planar), target))
        end = _aligned(end + 3 * height * width)
    copied = end
    weights = _Weights(cache)
    rows: list[tuple[int, ...]] = []
    patches: list[tuple[int, ...]] = []
    num_patches = 0
    row_elements = 3 * rules.temporal_patch_size * rules.patch_size**2
    for image, (_, h, w) in zip(placed, grids, strict=True):
        source, strides = image.offset, image.strides
        height, width = image.target
        if width != image.width:
            first, second, tap = weights.place(image.width, width)
            line = (image.height, width, source, *strides, end, first, second, tap.weights.shape[1], tap.precision)
            rows.append((*line, image.width))
            source, strides = end, strides_of(image.height, width, planar=True)
            end = _aligned(end + 3 * image.height * width)
        first, second, tap = weights.place(image.height, height)
        cut = (h * w, w, source, *strides, first, second, tap.weights.shape[1], tap.precision, image.height)
        patches.append((*cut, num_patches, row_elements))
        num_patches += h * w
    rows_table = np.array(rows, np.int64).reshape(len(rows), ROWS_FIELDS)
    patch_table = np.array(patches, np.int64).reshape(len(patches), PATCH_FIELDS)
    parts = [rows_table.reshape(-1).view(np.uint8), patch_table.reshape(-1).view(np.uint8)]
    parts += [part.reshape(-1).view(np.uint8) for part in weights.parts]
    return PixelPlan(
        placed=tuple(placed),
        num_patches=num_patches,
        bytes_copied=copied,
        buffer_bytes=end,
        control=np.concatenate(parts),
        rows_table=rows_table,
        patch_table=patch_table,
        num_weights=weights.length,
        most_rows=max((line[0] for line in rows), default=0),
        widest=max((line[1] for line in rows), default=0),
        most_patches=max((h * w for _, h, w in grids), default=0),
    )


class _Weights:
    """The weights of all images one after the other, those of the same lengths once; offsets in int32 elements."""

    def __init__(self, cache: TapCache) -> None:
        self._cache = cache
        self._places: dict[tuple[int, int], tuple[int, int, Taps]] = {}
        self.parts: list[NDArray[np.int32]] = []
        self.length = 0

    def place(self, num_in: int, num_out: int) -> tuple[int, int, Taps]:
        """Offsets of `Taps.first` and `Taps.weights`."""
        if (num_in, num_out) not in self._places:
            found = self._cache.get(num_in, num_out)
            first = self.length
            self.parts += [found.first, found.weights]
            self.length += found.first.size + found.weights.size
            self._places[num_in, num_out] = first, first + found.first.size, found
        return self._places[num_in, num_out]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def shape_of(values: NDArray[np.uint8], *, planar: bool) -> tuple[int, int, bool]:
    """What `plan_pixels` takes of an image."""
    height, width = values.shape[1:] if planar else values.shape[:2]
    return height, width, planar


def is_planar(image: object) -> bool:
    """Whether an image's values are `[3, H, W]`, as resized pixels are; decoded ones are `[H, W, 3]`."""
    return not isinstance(image, Decoded)
