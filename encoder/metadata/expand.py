"""Expands the description of a batch and the numbers of its grids to the tower's metadata, on the device.

Sizes are capacities, not the batch's own, so that a captured graph can include the expansion; entries past the batch
are inert. `expand` is plain torch and the reference; `encoder.metadata.expand_kernel` is one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.checkpoint.vision_config import VisionConfig
from encoder.metadata.grid_numbers import num_columns


@dataclass(frozen=True)
class Expanded:
    """Tables of positions and orders whose sizes are capacities. Entries past the batch are zero, or their own index in
    `window_order` and `window_inverse`."""

    rope_positions: Tensor
    """int32 `[num_patches, 2]`: row and column, in the order in which the blocks process the patches."""
    position_indices: Tensor | None
    """int32 `[num_patches, 4]`; None for towers without a position table."""
    position_weights: Tensor | None
    """float32 `[num_patches, 4]`; None for towers without a position table."""
    window_order: Tensor | None
    """int32 `[num_tokens]`; None for towers without windows."""
    window_inverse: Tensor | None
    """int32 `[num_tokens]`; None for towers without windows."""


Expand = Callable[[Tensor, Tensor, VisionConfig, int, int], tuple[Expanded, Tensor | None]]
"""`(arena, description, config, tokens, windows)`: expands a batch description (`Layout.device_description`) and
`arena` to `tokens` tokens, `windows` windows.

Returns the tables, and the borders of the windows in patches, int32 `[windows + 1]`, or None for towers without
windows. Borders past the batch repeat its last one.
"""


def expand(
    arena: Tensor, description: Tensor, config: VisionConfig, tokens: int, windows: int
) -> tuple[Expanded, Tensor | None]:
    """See `Expand`. Runs on any device, without synchronisation."""
    places, first_patch, first_window, _ = description.unbind(0)
    table, unit = bool(config.num_position_embeddings), config.merge_unit
    width = num_columns(config)

    def image_of(index: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the image that contains each index, and whether one does."""
        image = torch.searchsorted(first, index, right=True) - 1
        return image, index < first[-1]

    def picked(source: Tensor, inside: Tensor) -> Tensor:
        # Selected, not multiplied by a mask: some numbers are the bits of floats.
        return torch.where(inside, arena[torch.where(inside, source, 0)], 0)

    row = torch.arange(tokens * unit, device=arena.device, dtype=torch.int32)
    image, inside = image_of(row, first_patch)
    start = places[image] + (row - first_patch[image]) * width
    column = torch.arange(width, device=arena.device, dtype=torch.int32)
    rows = picked(start[:, None] + column, inside[:, None])
    rope = rows[:, :2].contiguous()
    taps = rows[:, 2:6].contiguous() if table else None
    weights = rows[:, 6:].contiguous().view(torch.float32) if table else None
    if not config.window_size:
        return Expanded(rope, taps, weights, None, None), None

    token = row[:tokens]
    first_token = first_patch // unit
    image, inside = image_of(token, first_token)
    ends = torch.cat((first_patch[1:], first_patch[-1:]))
    after_rows = places + (ends - first_patch) * width
    source = after_rows[image] + 2 * (token - first_token[image])
    order = torch.where(inside, picked(source, inside) + first_token[image], token)
    inverse = torch.where(inside, picked(source + 1, inside) + first_token[image], token)
    window = torch.arange(windows + 1, device=arena.device, dtype=torch.int32)
    image, inside = image_of(window, first_window)
    after_tokens = after_rows + 2 * (ends - first_patch) // unit
    source = after_tokens[image] + window - first_window[image]
    borders = torch.where(inside, picked(source, inside) + first_patch[image], first_patch[-1])
    return Expanded(rope, taps, weights, order, inverse), borders
