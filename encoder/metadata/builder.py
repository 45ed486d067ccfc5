"""Builds the metadata of a batch on the host, without padding: for eager runs and for batches that exceed the arena."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from encoder.checkpoint.vision_config import VisionConfig
from encoder.metadata import geometry
from encoder.metadata.byte_lru import ByteLru
from encoder.metadata.device_tables import ArenaFill, Layout
from encoder.metadata.expand import expand
from encoder.metadata.geometry import Grid
from encoder.metadata.grid_numbers import GridNumbers, grid_numbers
from encoder.metadata.segments import AttentionBackend, SegmentGroup, Segments, group_segments
from encoder.metadata.tower_metadata import TowerMetadata, to_device

# A grid of 4096 patches takes about 160 KiB.
CACHE_BYTES = 64 * 2**20


class MetadataBuilder:
    """Builds `TowerMetadata` and caches each grid's numbers, up to `max_bytes`. Not thread-safe.

    metadata = MetadataBuilder(config).build([(1, 28, 28)], device=device, backend=AttentionBackend.VARLEN)
    """

    def __init__(self, config: VisionConfig, max_bytes: int = CACHE_BYTES) -> None:
        self._config = config
        self.images: ByteLru[Grid, GridNumbers] = ByteLru(
            lambda grid: grid_numbers(grid, config), lambda image: image.num_bytes, max_bytes
        )

    def build(self, grid_thw: Sequence[Grid], *, device: torch.device, backend: AttentionBackend) -> TowerMetadata:
        """Returns the metadata of a batch. `grid_thw`: one grid per image, in patches, at least one. Raises
        `ValueError` for an invalid grid."""
        if not grid_thw:
            raise ValueError("grid_thw is empty: a tower needs at least one image")
        images = [self.images.get(grid) for grid in grid_thw]
        starts = (0, *accumulate(image.numbers.numel() for image in images[:-1]))
        placed = [image.place_at(start) for image, start in zip(images, starts, strict=True)]
        layout = Layout.from_grids(placed, self._config, ArenaFill())
        arena = torch.cat([image.numbers for image in images])
        description = layout.host_description(layout.slots)
        expanded = expand(arena, description, self._config, layout.num_tokens, layout.num_windows)

        def there(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else to_device(tensor, device)

        window_lengths = [length for image in images for length in image.window_lengths]
        return TowerMetadata(
            num_patches=layout.num_patches,
            num_tokens=layout.num_tokens,
            image_tokens=layout.image_tokens,
            rope_positions=to_device(expanded.rope, device),
            frames=_segments([length for image in images for length in image.frame_lengths], device, backend),
            windows=_segments(window_lengths, device, backend) if window_lengths else None,
            position_indices=there(expanded.taps),
            position_weights=there(expanded.weights),
            window_order=there(expanded.order),
            window_inverse=there(expanded.inverse),
        )


def _segments(lengths: Sequence[int], device: torch.device, backend: AttentionBackend) -> Segments:
    groups: tuple[SegmentGroup, ...] = ()
    if backend is AttentionBackend.SDPA:
        groups = tuple(
            SegmentGroup(g.length, g.count, g.start, None if g.rows is None else to_device(g.rows, device))
            for g in group_segments(lengths)
        )
    return Segments(backend, to_device(geometry.cu_seqlens(lengths), device), max(lengths), groups)
