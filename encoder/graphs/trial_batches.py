"""Batches of image grids, within a graph's capacity, for its check and its timing."""

from __future__ import annotations

from itertools import cycle, islice
from math import isqrt

from encoder.checkpoint.vision_config import VisionConfig
from encoder.graphs.buffers import GraphCapacity
from encoder.metadata.geometry import Grid


def trial_batch(shape: GraphCapacity, config: VisionConfig) -> list[Grid]:
    """Returns the batch of a graph's check: grids of unequal sizes that leave part of the budget as padding."""
    merge = config.spatial_merge_size
    longest = shape.key.max_seqlen // config.merge_unit
    grids: list[Grid] = []
    tokens = 0
    for rows in islice(cycle(range(3, 11)), shape.max_images):
        # Each image takes about a third of the rest, with varying aspect; few distinct grids, as each costs host time.
        columns = min((shape.key.budget - tokens) // 3, longest) // rows
        if columns < 1:
            break
        columns = 1 << columns.bit_length() - 1
        grids.append((1, rows * merge, columns * merge))
        tokens += rows * columns
    return grids or [(1, merge, merge)]


def timing_batch(shape: GraphCapacity, config: VisionConfig) -> list[Grid]:
    """Returns the timing batch: as many equal images as fit, which keeps attention (quadratic in length) small."""
    number = min(shape.max_images, shape.key.budget)
    tokens = min(shape.key.budget // number, shape.key.max_seqlen // config.merge_unit)
    return [compact_grid(tokens, config)] * number


def compact_grid(tokens: int, config: VisionConfig) -> Grid:
    """Returns the grid of a roughly square image of at most `tokens` tokens."""
    rows, merge = isqrt(tokens), config.spatial_merge_size
    return 1, rows * merge, tokens // rows * merge
