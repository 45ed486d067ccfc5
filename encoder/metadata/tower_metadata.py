"""Inputs of a tower's forward other than the patches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from encoder.checkpoint.vision_config import VisionConfig
from encoder.metadata.expand import Expand
from encoder.metadata.segments import AttentionBackend, Segments


@dataclass(frozen=True)
class TowerMetadata:
    """Inputs of a tower's forward other than the patches. Tensors are on the tower's device, ints on the host.

    The first five are those of `Expanded`.
    `frames`: full attention, one segment per frame; `windows`: windowed attention, None for towers without.
    `image_tokens`: tokens of each image, in order; they add up to `num_tokens`.
    """

    rope_positions: Tensor
    position_indices: Tensor | None
    position_weights: Tensor | None
    window_order: Tensor | None
    window_inverse: Tensor | None
    num_patches: int
    num_tokens: int
    image_tokens: tuple[int, ...]
    frames: Segments
    windows: Segments | None

    def segments(self, *, windowed: bool) -> Segments:
        """Returns the segments of a block with windowed or full attention."""
        found = self.windows if windowed else self.frames
        assert found is not None
        return found

    def check(self, patches: Tensor, patch_dim: int) -> None:
        """Raises `ValueError` if `patches` does not have the shape that these grids require."""
        if patches.shape != (self.num_patches, patch_dim):
            raise ValueError(f"patches have shape {tuple(patches.shape)}, not {(self.num_patches, patch_dim)}")


def expanded_metadata(
    expand: Expand,
    arena: Tensor,
    description: Tensor,
    config: VisionConfig,
    backend: AttentionBackend,
    *,
    tokens: int,
    frames: int,
    windows: int,
    max_seqlen: int,
    image_tokens: tuple[int, ...],
) -> TowerMetadata:
    """Expands a batch's description to metadata on the device; sizes are capacities. No synchronisation.

    `frames`: segments of full attention, at most the description's slots. The segments have no groups, which the SDPA
    backend requires.
    """
    expanded, borders = expand(arena, description, config, tokens, windows)
    return TowerMetadata(
        **vars(expanded),
        num_patches=tokens * config.merge_unit,
        num_tokens=tokens,
        image_tokens=image_tokens,
        frames=Segments(backend, description[3, : frames + 1], max_seqlen),
        windows=None if borders is None else Segments(backend, borders, config.window_patches),
    )
