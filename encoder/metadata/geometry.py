"""Arithmetic on grids: positions and windows, as host tensors, and their copy to the device.

Functions take one grid `(t, h, w)` in patches, with `h` and `w` multiples of the merge size. Patches are in merge-block
order: frame, block row, block column, then the rows and columns inside the `merge` by `merge` block that becomes one
token.
"""

from __future__ import annotations

import torch
from torch import Tensor

Grid = tuple[int, int, int]


def check_grid(grid: Grid, merge: int) -> None:
    """Raises `ValueError` for a grid that no image can have."""
    t, h, w = grid
    if t < 1 or h < merge or w < merge or h % merge or w % merge:
        raise ValueError(
            f"grid {(t, h, w)}: t must be at least 1, h and w multiples of the merge size {merge} and at least it"
        )


def num_patches(grid: Grid) -> int:
    """Returns the number of patches of one grid, before the merge."""
    t, h, w = grid
    return t * h * w


def merge_block_order(h: int, w: int, merge: int) -> Tensor:
    """Returns row and column of each patch of a frame, in merge-block order: int64 `[h * w, 2]`."""
    raster = torch.arange(h * w).view(h // merge, merge, w // merge, merge)
    index = raster.transpose(1, 2).reshape(-1)
    return torch.stack((index // w, index % w), dim=-1)


def rope_positions(grid: Grid, merge: int) -> Tensor:
    """Returns the rotary position (row, column) of each patch: int64 `[t * h * w, 2]`, the same for every frame."""
    t, h, w = grid
    return merge_block_order(h, w, merge).repeat(t, 1)


def position_taps(grid: Grid, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """Interpolates a learned `side` by `side` table bilinearly at each patch, with corners aligned.

    Returns indices into the flattened table, int64 `[t * h * w, 4]`, and their weights, float32 `[t * h * w, 4]`: the
    position embedding of a patch is the weighted sum of four rows.
    """
    t, h, w = grid
    row, column = merge_block_order(h, w, merge).unbind(-1)
    row_low, row_high, row_part = _axis_taps(row, h, side)
    column_low, column_high, column_part = _axis_taps(column, w, side)
    rows, columns = (row_low, row_low, row_high, row_high), (column_low, column_high, column_low, column_high)
    indices = torch.stack([r * side + c for r, c in zip(rows, columns, strict=True)], dim=-1)
    row_weights, column_weights = (1 - row_part, row_part), (1 - column_part, column_part)
    weights = torch.stack([r * c for r in row_weights for c in column_weights], dim=-1)
    return indices.repeat(t, 1), weights.to(torch.float32).repeat(t, 1)


def _axis_taps(index: Tensor, length: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns lower and upper tap, and the upper one's weight (float64), of places 0 … length - 1 on 0 … side - 1.

    Uses integers, so that a position that falls on a tap exactly is not rounded to just below it.
    """
    steps = max(length - 1, 1)
    scaled = index * (side - 1)
    low = scaled // steps
    part = (scaled - low * steps).to(torch.float64) / steps
    return low, (low + 1).clamp(max=side - 1), part


def window_order(grid: Grid, merge: int, window: int) -> tuple[Tensor, tuple[int, ...]]:
    """Returns the order that makes the tokens of each attention window contiguous, and the windows' lengths.

    `window` is a window's side in tokens. Windows do not cross frames; those at the right and lower border are smaller.
    The order is int64 `[t * h * w / merge²]`: position i of the new order takes token `order[i]`. The lengths are in
    patches, in the new order.
    """
    t, h, w = grid
    rows, columns = h // merge, w // merge
    window_rows, window_columns = _window_sizes(rows, window), _window_sizes(columns, window)
    token = torch.arange(rows * columns)
    window_of = (token // columns // window) * len(window_columns) + token % columns // window
    frame = torch.argsort(window_of, stable=True)
    order = (torch.arange(t).unsqueeze(-1) * (rows * columns) + frame).reshape(-1)
    return order, tuple(a * b * merge**2 for a in window_rows for b in window_columns) * t


def _window_sizes(length: int, window: int) -> list[int]:
    return [min(window, length - start) for start in range(0, length, window)]


def inverse_permutation(order: Tensor) -> Tensor:
    """Returns the permutation that undoes `order`: int64, same shape."""
    undo = torch.empty_like(order)
    undo[order] = torch.arange(order.numel())
    return undo


def frame_lengths(grid: Grid) -> tuple[int, ...]:
    """Returns the patches of each frame. Without windows, attention is within a frame."""
    t, h, w = grid
    return (h * w,) * t


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies without synchronisation: through pinned memory, since a copy from pageable memory makes the host wait."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
