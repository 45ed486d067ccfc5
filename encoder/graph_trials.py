"""What a graph is checked and timed with: images that fit its capacity. It must not know how graphs are made."""

from __future__ import annotations

from itertools import cycle, islice
from math import isqrt

from encoder.geometry import Grid
from encoder.graph_inputs import GraphClass
from encoder.vision_config import VisionConfig


def trial_batch(shape: GraphClass, config: VisionConfig) -> list[Grid]:
    """Images of unequal sizes that leave some of the budget as padding: what a graph is checked with."""
    merge = config.spatial_merge_size
    longest = shape.key.max_seqlen // config.merge_unit
    grids: list[Grid] = []
    tokens = 0
    for rows in islice(cycle(range(3, 11)), shape.max_images):
        # About a third of what is left, in ever other proportions, but few in all: each grid is computed on the host.
        columns = min((shape.key.budget - tokens) // 3, longest) // rows
        if columns < 1:
            break
        columns = 1 << columns.bit_length() - 1
        grids.append((1, rows * merge, columns * merge))
        tokens += rows * columns
    return grids or [(1, merge, merge)]


def timing_batch(shape: GraphClass, config: VisionConfig) -> list[Grid]:
    """As many images alike as there may be: attention, which grows with their squares, takes the least of the time."""
    number = min(shape.max_images, shape.key.budget)
    tokens = min(shape.key.budget // number, shape.key.max_seqlen // config.merge_unit)
    return [compact_grid(tokens, config)] * number


def compact_grid(tokens: int, config: VisionConfig) -> Grid:
    """An image about as wide as high, of at most `tokens` tokens."""
    rows, merge = isqrt(tokens), config.spatial_merge_size
    return 1, rows * merge, tokens // rows * merge
