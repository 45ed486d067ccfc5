"""Numbers that a tower needs for a grid: positions, taps, window order and borders, as `expand` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from encoder.checkpoint.vision_config import VisionConfig
from encoder.metadata import geometry
from encoder.metadata.geometry import Grid


@dataclass(frozen=True)
class PlacedGrid:
    """A grid whose numbers are in an arena."""

    start: int
    """Index of its first number in the arena."""
    num_tokens: int
    frame_lengths: tuple[int, ...]
    window_lengths: tuple[int, ...]


def num_columns(config: VisionConfig) -> int:
    """Returns the numbers per patch: row and column; with a position table also four taps and their weights' bits."""
    return 10 if config.num_position_embeddings else 2


def grid_numbers(grid: Grid, config: VisionConfig, start: int) -> tuple[Tensor, PlacedGrid]:
    """Returns the numbers of `grid` on the host, and the grid with its numbers at `start` of an arena.

    The numbers are int32 `[count]`, with indices that begin at 0: `num_columns(config)` per patch, then, with windows,
    two per token and one per window. Raises `ValueError` for an invalid grid.
    """
    merge = config.spatial_merge_size
    geometry.check_grid(grid, merge)
    rows = [geometry.rope_positions(grid, merge).to(torch.int32)]
    after_rows: list[Tensor] = []
    window_lengths: tuple[int, ...] = ()
    if config.num_position_embeddings:
        indices, weights = geometry.position_taps(grid, config.position_side, merge)
        rows += [indices.to(torch.int32), weights.view(torch.int32)]
    if config.window_size:
        order, window_lengths = geometry.window_order(grid, merge, config.window_tokens)
        # Blocks process patches in window order, so rotary positions are reordered here, once per grid.
        rows[0] = rows[0].view(-1, config.merge_unit, 2)[order].flatten(0, 1)
        starts = torch.tensor((0, *accumulate(window_lengths[:-1])))
        after_rows = [torch.stack((order, geometry.inverse_permutation(order)), 1).flatten(), starts]
    numbers = torch.cat([torch.cat(rows, 1).flatten(), *(part.to(torch.int32) for part in after_rows)])
    return numbers, PlacedGrid(
        start,
        num_tokens=geometry.num_patches(grid) // config.merge_unit,
        frame_lengths=geometry.frame_lengths(grid),
        window_lengths=window_lengths,
    )
