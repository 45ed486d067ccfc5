"""Compares a fast forward with the eager tower at start-up, on every class of kernels that serving uses.

The number of rows of a batch selects the kernels of GEMMs and attention's tiles; the longest segment selects the
attention backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.fp8.validation import RunGrids
from encoder.metadata.geometry import Grid
from encoder.towers.tower import VisionTower

BATCHES: tuple[tuple[Grid, ...], ...] = (
    ((1, 8, 8),) * 3 + ((1, 4, 10),),
    ((1, 12, 20),),
    ((1, 14, 16), (1, 16, 16)),
    ((1, 26, 30), (2, 6, 8), (1, 4, 30)),
    ((1, 8, 8),) * 17 + ((1, 6, 8),),
    ((1, 14, 14),) * 21,
    ((1, 28, 28),) * 5 + ((1, 20, 30),),
    ((1, 56, 56), (1, 40, 36)),
    ((1, 72, 76), (2, 36, 38)),
)
"""Batches of up to 256, 512, 1024, 4000, 8192 and more rows, with segments of up to 64, 256, 1024, 4096 and more
patches, with few rows and with many. Some row counts are multiples of 16, for which kernels are compiled separately."""

# In bfloat16, correct forwards differed by 1e-2, since they round in different places; wrong ones by 0.4 or more.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 4e-2}
# Weights that amplify rounding errors get a larger tolerance, up to `MAX_TOLERANCE`: `_GROWN_ROUNDINGS` times the
# error caused by rounding the input.
_GROWN_ROUNDINGS, MAX_TOLERANCE = 4.0, 0.2
_ROUNDED_BATCH: tuple[Grid, ...] = ((1, 16, 20), (1, 8, 8), (1, 4, 30), (2, 6, 8))


class FusionError(ValueError):
    """Embeddings of a fused forward differ from those of the eager tower."""


@dataclass(frozen=True)
class ClassError:
    """Error of a forward, compared with the eager tower, on one class of kernels."""

    num_patches: int
    max_seqlen: int
    """The longest segment in patches."""
    error: float
    """‖found - expected‖ / ‖expected‖ of the worst image; infinite for NaN."""


class StartCheck:
    """Embeddings of `BATCHES` by the eager tower, to which forwards are compared.

    check = StartCheck(tower)
    check(lambda patches, grids: fused(patches, fused.prepare(grids)), check.tolerance)
    """

    @torch.inference_mode()
    def __init__(self, tower: VisionTower) -> None:
        self._batches = BATCHES
        self.tolerance = rounding_tolerance(tower)
        """Tolerance of a forward in the tower's dtype."""
        config = tower.config
        rows = max(sum(t * h * w for t, h, w in grids) for grids in self._batches)
        # Covers the range of normalised pixels.
        self._patches = 2 * torch.rand(rows, config.patch_dim, device=tower.device) - 1
        self._tokens = [tuple(t * h * w // config.merge_unit for t, h, w in grids) for grids in self._batches]
        self._expected = [
            tower(self._patches[: config.merge_unit * sum(tokens)], tower.prepare(grids))
            for grids, tokens in zip(self._batches, self._tokens, strict=True)
        ]

    @torch.inference_mode()
    def errors(self, run: RunGrids) -> list[ClassError]:
        """Returns the error of `run` on each batch. Synchronises once."""
        sizes = [(sum(t * h * w for t, h, w in grids), max(h * w for _, h, w in grids)) for grids in self._batches]
        errors = torch.stack(
            [
                largest_error_on_device(run(self._patches[:rows], grids), expected, tokens)
                for (rows, _), grids, expected, tokens in zip(
                    sizes, self._batches, self._expected, self._tokens, strict=True
                )
            ]
        )
        # `tolist` synchronises, once for all batches.
        return [ClassError(*size, error) for size, error in zip(sizes, errors.tolist(), strict=True)]

    def __call__(self, run: RunGrids, tolerance: float) -> list[ClassError]:
        """Returns `errors(run)`. Raises `FusionError` if an error is above `tolerance`."""
        errors = self.errors(run)
        worst = max(errors, key=lambda one: one.error)
        if not worst.error <= tolerance:
            raise FusionError(
                f"they differ from the eager tower by {worst.error:.2e}, the limit is {tolerance:.2e}, on a batch of "
                f"{worst.num_patches} patches with segments of up to {worst.max_seqlen}"
            )
        return errors


@torch.inference_mode()
def rounding_tolerance(tower: VisionTower) -> float:
    """Returns the dtype's tolerance, or a larger one if the tower amplifies rounding errors. Synchronises."""
    metadata = tower.prepare(_ROUNDED_BATCH)
    patches = torch.randn(metadata.num_patches, tower.config.patch_dim, device=tower.device)
    rounded = patches * (1 + torch.finfo(tower.dtype).eps * (torch.rand_like(patches) - 0.5))
    grown = largest_error_on_device(tower(rounded, metadata), tower(patches, metadata), metadata.image_tokens)
    return min(max(TOLERANCES[tower.dtype], _GROWN_ROUNDINGS * float(grown)), MAX_TOLERANCE)


def largest_error_on_device(found: Tensor, expected: Tensor, image_tokens: tuple[int, ...]) -> Tensor:
    """Returns the largest ‖found - expected‖ / ‖expected‖ of an image, float32, infinite for NaN, without
    synchronising."""
    errors = [
        (ours - theirs).norm() / theirs.norm()
        for ours, theirs in zip(
            found.float().split(list(image_tokens)), expected.float().split(list(image_tokens)), strict=True
        )
    ]
    # NaN counts as the largest error.
    return torch.stack(errors).nan_to_num(float("inf"), posinf=float("inf")).max()
