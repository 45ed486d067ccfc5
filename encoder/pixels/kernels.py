"""Triton kernels from image bytes to patches in two launches per batch: the first resizes along rows; the second
resizes along columns, normalises and patchifies.

The sums are integer sums, so resized bytes equal the CPU's (`encoder.pixels.resize_weights`), and normalisation divides
as the CPU does. A table on the device describes each image (`encoder.pixels.layout`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from encoder.checkpoint.image_rules import ImageRules
from encoder.kernels.launch import OPTIONS
from encoder.pixels.layout import PATCH_FIELDS, ROWS_FIELDS
from encoder.pixels.preprocess import mean_and_std

# Tile of one program: rows and columns of resized bytes; patches.
ROWS_OUT, COLUMNS_OUT = 8, 128
PATCHES = 4


@triton.jit
def _rows_kernel(
    buffer_ptr: tl.tensor,
    table_ptr: tl.tensor,
    taps_ptr: tl.tensor,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    entry = table_ptr + tl.program_id(1) * FIELDS
    height, width = tl.load(entry), tl.load(entry + 1)
    source_ptr = buffer_ptr + tl.load(entry + 2)
    row_stride, column_stride, channel_stride = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    target_ptr = buffer_ptr + tl.load(entry + 6)
    first_ptr, weights_ptr = taps_ptr + tl.load(entry + 7), taps_ptr + tl.load(entry + 8)
    taps, precision, num_in = tl.load(entry + 9), tl.load(entry + 10).to(tl.int32), tl.load(entry + 11)
    across = tl.cdiv(width, COLUMNS)
    tile = tl.program_id(0).to(tl.int64)
    top = tile // across * ROWS
    if top < height:
        row = top + tl.arange(0, ROWS)[:, None]
        column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        covered = (row < height) & (column < width)
        first = tl.load(first_ptr + column, mask=column < width, other=0).to(tl.int64)
        for channel in tl.static_range(3):
            total = tl.full((ROWS, COLUMNS), 1, tl.int32) << (precision - 1)
            for tap in range(taps):
                weight = tl.load(weights_ptr + column * taps + tap, mask=column < width, other=0)
                place = first + tap
                value = tl.load(
                    source_ptr + row * row_stride + place * column_stride + channel * channel_stride,
                    mask=covered & (place < num_in),
                    other=0,
                )
                total += value.to(tl.int32) * weight
            byte = tl.minimum(tl.maximum(total >> precision, 0), 255).to(tl.uint8)
            tl.store(target_ptr + (channel * height + row) * width + column, byte, mask=covered)


@triton.jit
def _patches_kernel(
    buffer_ptr: tl.tensor,
    table_ptr: tl.tensor,
    taps_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    std_ptr: tl.tensor,
    out_ptr: tl.tensor,
    FIELDS: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    FRAMES: tl.constexpr,
    PATCHES: tl.constexpr,
    AREA: tl.constexpr,
) -> None:
    channel = tl.program_id(2)
    entry = table_ptr + tl.program_id(1) * FIELDS
    count, columns = tl.load(entry), tl.load(entry + 1)
    source_ptr = buffer_ptr + tl.load(entry + 2) + channel * tl.load(entry + 5)
    row_stride, column_stride = tl.load(entry + 3), tl.load(entry + 4)
    first_ptr, weights_ptr = taps_ptr + tl.load(entry + 6), taps_ptr + tl.load(entry + 7)
    taps, precision, num_in = tl.load(entry + 8), tl.load(entry + 9).to(tl.int32), tl.load(entry + 10)
    start, first_slot, last_slot = tl.load(entry + 11), tl.load(entry + 12), tl.load(entry + 13)
    block = tl.program_id(0).to(tl.int64) * PATCHES
    if block < count:
        patch = block + tl.arange(0, PATCHES)[:, None]
        place = tl.arange(0, AREA)[None, :]
        # Patches are ordered by merge block: row and column of the block, then row and column within it.
        unit, inner = patch // (MERGE * MERGE), patch % (MERGE * MERGE)
        blocks = columns // MERGE
        patch_row = unit // blocks * MERGE + inner // MERGE
        patch_column = unit % blocks * MERGE + inner % MERGE
        y = patch_row * PATCH + place // PATCH
        x = patch_column * PATCH + place % PATCH
        covered = (patch < count) & (place < PATCH * PATCH)
        first = tl.load(first_ptr + y, mask=covered, other=0).to(tl.int64)
        total = tl.full((PATCHES, AREA), 1, tl.int32) << (precision - 1)
        for tap in range(taps):
            weight = tl.load(weights_ptr + y * taps + tap, mask=covered, other=0)
            row = first + tap
            value = tl.load(source_ptr + row * row_stride + x * column_stride, mask=covered & (row < num_in), other=0)
            total += value.to(tl.int32) * weight
        byte = tl.minimum(tl.maximum(total >> precision, 0), 255).to(tl.float32)
        normalised = tl.div_rn(byte - tl.load(mean_ptr + channel), tl.load(std_ptr + channel) + byte * 0.0)
        target_ptr = out_ptr + ((start + patch) * 3 + channel) * (FRAMES * PATCH * PATCH) + place
        for frame in tl.static_range(FRAMES):
            slot = patch * 0 + frame
            filled = covered & (slot >= first_slot) & (slot < last_slot)
            tl.store(target_ptr + frame * (PATCH * PATCH), normalised, mask=filled)


def resize_rows(buffer: Tensor, table: Tensor, taps: Tensor, max_rows: int, max_width: int) -> None:
    """Resizes along the rows, from uint8 to uint8 in the same buffer.

    `table` int64 `[frames, ROWS_FIELDS]`: height; target width; the source's offset and row, column and channel stride;
    the target's offset (planes of `height * width`); offsets of `Taps.first` and `Taps.weights` in `taps`; number of
    taps; precision; source width.
    """
    tiles = triton.cdiv(max_rows, ROWS_OUT) * triton.cdiv(max_width, COLUMNS_OUT)
    _rows_kernel[(tiles, table.shape[0])](
        buffer, table, taps, FIELDS=ROWS_FIELDS, ROWS=ROWS_OUT, COLUMNS=COLUMNS_OUT, num_warps=4, **OPTIONS
    )


def write_patches(
    buffer: Tensor, table: Tensor, taps: Tensor, rules: ImageRules, out: Tensor, max_patches: int
) -> None:
    """Resizes along the columns, normalises, and writes patches into `out` in the order of `preprocess.patchify`.

    `table` int64 `[frames, PATCH_FIELDS]`: number of patches; patches per row; the source's offset and row, column and
    channel stride; offsets of `Taps.first` and `Taps.weights` in `taps`; number of taps; precision; source height; the
    image's first row of `out`; the first place that a frame fills in its temporal patch, and the one after its last.
    `out`: `[num_patches, 3 * temporal_patch_size * patch_size²]`, any float dtype; computed in float32, rounded once.
    """
    patch = rules.patch_size
    _patches_kernel[(triton.cdiv(max_patches, PATCHES), table.shape[0], 3)](
        buffer,
        table,
        taps,
        *mean_and_std(rules, buffer.device),
        out,
        FIELDS=PATCH_FIELDS,
        PATCH=patch,
        MERGE=rules.merge_size,
        FRAMES=rules.temporal_patch_size,
        PATCHES=PATCHES,
        AREA=triton.next_power_of_2(patch * patch),
        num_warps=4,
        **OPTIONS,
    )
