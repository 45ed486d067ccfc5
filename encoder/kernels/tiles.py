"""Tile sizes of the attention kernels, measured on an H200, within an A100's registers and shared memory."""

from __future__ import annotations

import torch

from encoder.kernels.flash import Tile

FEW_ROWS_TILES = (Tile(64, 64, 4, 2), Tile(64, 128, 4, 2), Tile(128, 64, 8, 3))
"""Tiles of `attention.attend` that are measured for batches of few rows, in 16 bits: the fastest one depends on the
head dimension."""
# Up to this number of rows, large tiles would leave multiprocessors idle.
_FEW_ROWS = 1024


def attention_tile(rows: int, dtype: torch.dtype) -> Tile:
    """Returns the tile of `attention.attend` for a batch of `rows` rows. float32 is for parity, not for speed."""
    if dtype == torch.float32:
        return Tile(rows=32, keys=32, warps=4, stages=1)
    return Tile(64, 64, 4, 2) if rows <= _FEW_ROWS else Tile(128, 64, 4, 3)


def short_rows(dtype: torch.dtype) -> int:
    """Returns the rows of a block of `short_attention`."""
    return 32 if dtype == torch.float32 else 64
