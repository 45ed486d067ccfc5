"""Inputs of a tower's forward other than the patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.metadata.segments import Segments


@dataclass(frozen=True)
class TowerMetadata:
    """Inputs of a tower's forward other than the patches. Tensors are on the tower's device, ints on the host.

    `rope_positions`: int32 `[num_patches, 2]`, row and column, in the order in which the blocks process the patches.
    `frames`: full attention, one segment per frame; `windows`: windowed attention, None for towers without.
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

    def segments(self, *, windowed: bool) -> Segments:
        """Returns the segments of a block with windowed or full attention."""
        found = self.windows if windowed else self.frames
        assert found is not None
        return found

    def check(self, patches: Tensor, patch_dim: int) -> None:
        """Raises `ValueError` if `patches` does not have the shape that these grids require."""
        if patches.shape != (self.num_patches, patch_dim):
            raise ValueError(f"patches have shape {tuple(patches.shape)}, not {(self.num_patches, patch_dim)}")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies without synchronisation: through pinned memory, since a copy from pageable memory makes the host wait."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
