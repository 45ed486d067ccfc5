"""Plans the layout of a batch's images in one byte buffer, and the tables from which the device computes patches.

Pure arithmetic over shapes, with numpy, before any byte is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from encoder.checkpoint.image_rules import ImageRules
from encoder.images.decoded import Decoded
from encoder.images.size import Grid
from encoder.pixels.preprocess import Pixels
from encoder.pixels.resize_weights import Taps, taps

# Columns of the tables that `encoder.pixels.kernels` reads and documents. Even numbers, so that each table begins at a
# multiple of 16 bytes: for other addresses Triton would compile a kernel once more.
ROWS_FIELDS = 12
PATCH_FIELDS = 14

ALIGNMENT = 256
"""Alignment in bytes of every image in the buffer: copies to a GPU are fastest between aligned addresses."""


@dataclass(frozen=True)
class Placed:
    """Position of an image, or of the frames of a video, in the buffer; lengths are in pixels, one byte per channel."""

    offset: int
    num_frames: int
    """1 for an image."""
    height: int
    width: int
    strides: tuple[int, int, int]
    """Row, column and channel stride in bytes."""
    target: tuple[int, int]
    """Height and width after the resize."""

    @property
    def frame_bytes(self) -> int:
        return 3 * self.height * self.width

    def slots(self, frame: int, temporal_patch_size: int) -> tuple[int, range]:
        """Returns the temporal patch that contains a frame, and the places that the frame fills in it: one, or all up
        to the end for the last frame."""
        patch, first = divmod(frame, temporal_patch_size)
        return patch, range(first, temporal_patch_size if frame == self.num_frames - 1 else first + 1)


@dataclass(frozen=True)
class PixelPlan:
    """Buffer layout and tables for the two kernel launches of a batch."""

    placed: tuple[Placed, ...]
    num_patches: int
    buffer_bytes: int
    """Size of the images and, behind them, of the row-resized images that the device writes."""
    control: NDArray[np.uint8]
    """The three tables (rows, patches, weights) as one array for one copy to the device."""
    rows_table: NDArray[np.int64]
    patch_table: NDArray[np.int64]
    num_weights: int
    max_rows: int
    max_width: int
    max_patches: int


def strides_of(height: int, width: int, *, planar: bool) -> tuple[int, int, int]:
    """Returns row, column and channel stride of a contiguous `[3, H, W]` (planar) or `[H, W, 3]` uint8 array."""
    return (width, 1, height * width) if planar else (3 * width, 3, 1)


def plan_pixels(
    shapes: Sequence[tuple[int, int, int, bool]],
    grids: Sequence[Grid],
    rules: ImageRules,
) -> PixelPlan:
    """Plans a batch. `shapes`: frames, height, width, planar (`[…, 3, H, W]` rather than `[…, H, W, 3]`).

    Raises ValueError if a grid is not `(t, h, w)` with t for its frames, and positive multiples of the merge size.
    """
    placed: list[Placed] = []
    end = 0
    for (num_frames, height, width, planar), (t, h, w) in zip(shapes, grids, strict=True):
        times = -(-num_frames // rules.temporal_patch_size)
        if t != times or h < 1 or w < 1 or h % rules.merge_size or w % rules.merge_size:
            raise ValueError(
                f"the grid of {num_frames} frames is {(t, h, w)}; it must be ({times}, h, w), "
                "multiples of the merge size"
            )
        target = (h * rules.patch_size, w * rules.patch_size)
        placed.append(Placed(end, num_frames, height, width, strides_of(height, width, planar=planar), target))
        end = _aligned(end + num_frames * placed[-1].frame_bytes)
    weights = _Weights()
    rows: list[tuple[int, ...]] = []
    patches: list[tuple[int, ...]] = []
    num_patches = 0
    for image, (t, h, w) in zip(placed, grids, strict=True):
        height, width = image.target
        for frame in range(image.num_frames):
            source, strides = image.offset + frame * image.frame_bytes, image.strides
            if width != image.width:
                first, second, tap = weights.place(image.width, width)
                line = (image.height, width, source, *strides, end, first, second, tap.weights.shape[1], tap.precision)
                rows.append((*line, image.width))
                source, strides = end, strides_of(image.height, width, planar=True)
                end = _aligned(end + 3 * image.height * width)
            first, second, tap = weights.place(image.height, height)
            time, slots = image.slots(frame, rules.temporal_patch_size)
            cut = (h * w, w, source, *strides, first, second, tap.weights.shape[1], tap.precision, image.height)
            patches.append((*cut, num_patches + time * h * w, slots.start, slots.stop))
        num_patches += t * h * w
    rows_table = np.array(rows, np.int64).reshape(len(rows), ROWS_FIELDS)
    patch_table = np.array(patches, np.int64).reshape(len(patches), PATCH_FIELDS)
    parts = [rows_table.reshape(-1).view(np.uint8), patch_table.reshape(-1).view(np.uint8)]
    parts += [part.reshape(-1).view(np.uint8) for part in weights.parts]
    return PixelPlan(
        placed=tuple(placed),
        num_patches=num_patches,
        buffer_bytes=end,
        control=np.concatenate(parts),
        rows_table=rows_table,
        patch_table=patch_table,
        num_weights=weights.length,
        max_rows=max((line[0] for line in rows), default=0),
        max_width=max((line[1] for line in rows), default=0),
        max_patches=max((h * w for _, h, w in grids), default=0),
    )


class _Weights:
    """Concatenated resize weights of all images, one copy per pair of lengths; offsets are in int32 elements."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], tuple[int, int, Taps]] = {}
        self.parts: list[NDArray[np.int32]] = []
        self.length = 0

    def place(self, num_in: int, num_out: int) -> tuple[int, int, Taps]:
        """Returns the offsets of `Taps.first` and `Taps.weights`, and the taps; adds the weights if they are new."""
        if (num_in, num_out) not in self._places:
            found = taps(num_in, num_out)
            first = self.length
            self.parts += [found.first, found.weights]
            self.length += found.first.size + found.weights.size
            self._places[num_in, num_out] = first, first + found.first.size, found
        return self._places[num_in, num_out]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def shape_of(image: Pixels | Decoded) -> tuple[int, int, int, bool]:
    """Returns the entry of an image or of frames for `shapes` of `plan_pixels`."""
    values, planar = image.values, isinstance(image, Pixels)
    height, width = values.shape[-2:] if planar else values.shape[-3:-1]
    return values.shape[0] if values.ndim == 4 else 1, height, width, planar
