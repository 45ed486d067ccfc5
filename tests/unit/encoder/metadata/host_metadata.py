"""Metadata of a batch on the host, image by image: the slow path with which the device tables are compared."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from encoder.checkpoint.vision_config import VisionConfig
from encoder.metadata import geometry
from encoder.metadata.geometry import Grid
from encoder.metadata.segments import AttentionBackend, Segments
from encoder.metadata.tower_metadata import TowerMetadata


def host_metadata(grid_thw: Sequence[Grid], config: VisionConfig) -> TowerMetadata:
    """Returns the metadata of a batch on the CPU, without padding and without groups of segments."""
    merge, unit = config.spatial_merge_size, config.merge_unit
    image_tokens = [t * h * w // unit for t, h, w in grid_thw]
    positions = [geometry.rope_positions(grid, merge) for grid in grid_thw]
    frame_lengths = [h * w for t, h, w in grid_thw for _ in range(t)]
    indices: Tensor | None = None
    weights: Tensor | None = None
    if config.num_position_embeddings:
        taps = [geometry.position_taps(grid, config.position_side, merge) for grid in grid_thw]
        indices, weights = torch.cat([each[0] for each in taps]).int(), torch.cat([each[1] for each in taps])
    order: Tensor | None = None
    inverse: Tensor | None = None
    windows: Segments | None = None
    if config.window_size:
        orders, lengths = zip(
            *(geometry.window_order(grid, merge, config.window_tokens) for grid in grid_thw), strict=True
        )
        positions = [each.view(-1, unit, 2)[order].flatten(0, 1) for each, order in zip(positions, orders, strict=True)]
        order = torch.cat([each + sum(image_tokens[:image]) for image, each in enumerate(orders)]).int()
        inverse = order.argsort().int()
        windows = _segments([length for image in lengths for length in image])
    return TowerMetadata(
        rope_positions=torch.cat(positions).int(),
        position_indices=indices,
        position_weights=weights,
        window_order=order,
        window_inverse=inverse,
        num_patches=sum(frame_lengths),
        num_tokens=sum(image_tokens),
        image_tokens=tuple(image_tokens),
        frames=_segments(frame_lengths),
        windows=windows,
    )


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    """Returns the borders of consecutive segments, beginning with 0: int32 `[len(lengths) + 1]`."""
    return torch.tensor((0, *accumulate(lengths)), dtype=torch.int32)


def _segments(lengths: Sequence[int]) -> Segments:
    return Segments(AttentionBackend.VARLEN, cu_seqlens(lengths), max(lengths))


def check_equal(found: TowerMetadata, expected: TowerMetadata) -> None:
    """Asserts that `found`, on the CPU, holds `expected`, and that the rest is inert: zeros, places of their own, the
    last border."""
    patches, total = expected.num_patches, expected.num_tokens
    for name in ("rope_positions", "position_indices", "position_weights"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            assert ours.is_contiguous()
            assert torch.equal(ours[:patches], theirs), name
            assert len(ours) == found.num_patches
            assert not ours[patches:].any()
    for name in ("window_order", "window_inverse"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours[:total], theirs), name
            assert ours[total:].tolist() == list(range(total, found.num_tokens))
    for ours, theirs in ((found.frames, expected.frames), (found.windows, expected.windows)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            count = len(theirs.cu_seqlens)
            assert torch.equal(ours.cu_seqlens[:count], theirs.cu_seqlens)
            assert set(ours.cu_seqlens[count:].tolist()) <= {patches}
            assert ours.max_seqlen >= theirs.max_seqlen
