"""From the grids of a batch to the tensors that a tower's forward reads.

All arithmetic is on the host and remembered per grid; what a forward needs is then on the tower's device, so that the
forward itself neither computes on the host nor waits for the device. It must not know weights or layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from encoder import geometry
from encoder.attention import AttentionBackend, SegmentGroup, Segments, group_segments
from encoder.geometry import Grid
from encoder.recent import Recent
from encoder.vision_config import VisionConfig

# A grid of 4096 patches takes about 130 KiB.
GEOMETRY_CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class TowerMetadata:
    """What a tower's forward needs beside the patches. Tensors are on the tower's device, ints on the host.

    `rope_positions`: int32 `[num_patches, 2]`, row and column, in the order in which the blocks see the patches.
    `frames`: full attention, one segment a frame; `windows`: windowed attention, None for towers without.
    `position_indices`, `position_weights`: int32 and float32 `[num_patches, 4]`, None for towers without a table.
    `window_order`, `window_inverse`: int32 `[num_tokens]`, None for towers without windows.
    `image_tokens`: tokens of each image, in order; they add up to `num_tokens`.
    """

    num_patches: int
    num_tokens: int
    image_tokens: tuple[int, ...]
    rope_positions: Tensor
    frames: Segments
    windows: Segments | None = None
    position_indices: Tensor | None = None
    position_weights: Tensor | None = None
    window_order: Tensor | None = None
    window_inverse: Tensor | None = None

    def check(self, patches: Tensor, patch_dim: int) -> None:
        """Raises `ValueError` if `patches` is not of the shape that these grids ask for."""
        if patches.shape != (self.num_patches, patch_dim):
            raise ValueError(f"patches have shape {tuple(patches.shape)}, not {(self.num_patches, patch_dim)}")


@dataclass(frozen=True)
class ImageGeometry:
    """The host tensors of one grid, with indices that begin at 0."""

    num_tokens: int
    rope_positions: Tensor
    frame_lengths: tuple[int, ...]
    position_indices: Tensor | None = None
    position_weights: Tensor | None = None
    window_order: Tensor | None = None
    window_inverse: Tensor | None = None
    window_lengths: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        tensors = (
            self.rope_positions,
            self.position_indices,
            self.position_weights,
            self.window_order,
            self.window_inverse,
        )
        lengths = len(self.frame_lengths) + len(self.window_lengths)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None) + 8 * lengths


def image_geometry(grid: Grid, config: VisionConfig) -> ImageGeometry:
    """Raises `ValueError` for an impossible grid."""
    geometry.check_grid(grid, config.spatial_merge_size)
    merge = config.spatial_merge_size
    positions = geometry.rope_positions(grid, merge).to(torch.int32)
    indices = weights = order = undo = None
    window_lengths: tuple[int, ...] = ()
    if config.num_position_embeddings:
        indices, weights = geometry.position_taps(grid, config.position_side, merge)
        indices = indices.to(torch.int32)
    if config.window_size:
        order, window_lengths = geometry.window_order(grid, merge, config.window_tokens)
        # The blocks see patches in window order, so their positions are put into it here, once a grid.
        positions = positions.view(-1, config.merge_unit, 2)[order].view(-1, 2)
        undo, order = geometry.inverse(order).to(torch.int32), order.to(torch.int32)
    return ImageGeometry(
        num_tokens=geometry.num_patches(grid) // config.merge_unit,
        rope_positions=positions,
        frame_lengths=geometry.frame_lengths(grid),
        position_indices=indices,
        position_weights=weights,
        window_order=order,
        window_inverse=undo,
        window_lengths=window_lengths,
    )


class MetadataBuilder:
    """Builds `TowerMetadata` and remembers each grid's geometry, up to `max_bytes`. For one thread."""

    def __init__(self, config: VisionConfig, max_bytes: int = GEOMETRY_CACHE_BYTES) -> None:
        self._config = config
        self.images: Recent[Grid, ImageGeometry] = Recent(
            lambda grid: image_geometry(grid, config), lambda image: image.num_bytes, max_bytes
        )

    def build(self, grid_thw: Sequence[Grid], *, device: torch.device, backend: AttentionBackend) -> TowerMetadata:
        """`grid_thw`: one grid an image, in patches, at least one. Raises `ValueError` for an impossible grid."""
        if not grid_thw:
            raise ValueError("grid_thw is empty: a tower needs at least one image")
        images = [self.images.get(grid) for grid in grid_thw]
        image_tokens = tuple(image.num_tokens for image in images)
        first_token = (0, *accumulate(image_tokens))

        def packed(tensors: Iterable[Tensor | None]) -> Tensor | None:
            parts = [tensor for tensor in tensors if tensor is not None]
            return to_device(torch.cat(parts), device) if parts else None

        def shifted(part: Callable[[ImageGeometry], Tensor | None]) -> Tensor | None:
            tensors = (part(image) for image in images)
            return packed(None if t is None else t + first for t, first in zip(tensors, first_token, strict=False))

        window_lengths = [length for image in images for length in image.window_lengths]
        return TowerMetadata(
            num_patches=sum(image_tokens) * self._config.merge_unit,
            num_tokens=sum(image_tokens),
            image_tokens=image_tokens,
            rope_positions=to_device(torch.cat([image.rope_positions for image in images]), device),
            frames=_segments([length for image in images for length in image.frame_lengths], device, backend),
            windows=_segments(window_lengths, device, backend) if window_lengths else None,
            position_indices=packed(image.position_indices for image in images),
            position_weights=packed(image.position_weights for image in images),
            window_order=shifted(lambda image: image.window_order),
            window_inverse=shifted(lambda image: image.window_inverse),
        )


def _segments(lengths: Sequence[int], device: torch.device, backend: AttentionBackend) -> Segments:
    groups: tuple[SegmentGroup, ...] = ()
    if backend is AttentionBackend.SDPA:
        groups = tuple(
            SegmentGroup(g.length, g.count, g.start, None if g.rows is None else to_device(g.rows, device))
            for g in group_segments(lengths)
        )
    return Segments(backend, to_device(geometry.cu_seqlens(lengths), device), max(lengths), groups)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy without waiting: from pageable memory it would make the host wait for it."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
