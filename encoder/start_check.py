"""Compares a fast forward with the eager tower in float32 at start-up, on every class of kernels that serving uses.

The number of rows of a batch selects the kernels of GEMMs and attention's tiles; the longest segment selects the
attention backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.fp8.validation import RunGrids, image_errors
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

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 4e-2}
"""Smallest tolerance of a dtype. In bfloat16, correct forwards differed by 1e-2, since they round in different places;
wrong ones by 0.4 or more."""
MAX_TOLERANCE = 0.7
"""Largest tolerance: embeddings of zeros have an error of 1, unrelated ones of 1.4."""
_EAGER_ERRORS = 2.0
"""Weights for which bfloat16 is less precise get a larger tolerance: this many times the eager tower's own error."""
# Weights that amplify rounding errors: this many times the error caused by rounding the input.
_GROWN_ROUNDINGS = 4.0
_ROUNDED_BATCH: tuple[Grid, ...] = ((1, 16, 20), (1, 8, 8), (1, 4, 30), (2, 6, 8))


class FusionError(ValueError):
    """The error of a fused forward is too large beside the eager tower's."""


@dataclass(frozen=True)
class ClassError:
    """Error of a forward against float32 on one class of kernels."""

    num_patches: int
    max_seqlen: int
    """The longest segment in patches."""
    error: float
    """‖found - expected‖ / ‖expected‖ of the worst image; infinite for NaN."""


class StartCheck:
    """Embeddings of `BATCHES` by the eager tower in float32 (GEMMs in TF32), to which forwards are compared, and the
    eager tower's own error. A copy of the tower in float32 is on the device while they are computed.

    check = StartCheck(tower)
    check(lambda patches, grids: fused(patches, fused.prepare(grids)))
    """

    @torch.inference_mode()
    def __init__(self, tower: VisionTower) -> None:
        self._batches = BATCHES
        config = tower.config
        rows = max(sum(t * h * w for t, h, w in grids) for grids in self._batches)
        # Covers the range of normalised pixels.
        self._patches = 2 * torch.rand(rows, config.patch_dim, device=tower.device) - 1
        self._tokens = [tuple(t * h * w // config.merge_unit for t, h, w in grids) for grids in self._batches]
        exact = tower.in_float32()
        # A float32 tower is its own reference, and the forwards that are compared with it do not use TF32.
        with nullcontext() if exact is tower else _tf32():
            self._expected = [
                exact(self._patches[: config.merge_unit * sum(tokens)], exact.prepare(grids))
                for grids, tokens in zip(self._batches, self._tokens, strict=True)
            ]
        eager_errors = [0.0] * len(self._batches)
        if exact is not tower:
            del exact
            torch.cuda.empty_cache()
            eager = self.errors(lambda patches, grids: tower(patches, tower.prepare(grids)))
            eager_errors = [one.error for one in eager]
        self.eager_error = max(eager_errors)
        """The eager tower's largest error against float32."""
        least = TOLERANCES[tower.dtype]
        self.limits = [max(least, min(_EAGER_ERRORS * error, MAX_TOLERANCE)) for error in eager_errors]
        """Limit of a forward's error against float32 on each batch."""
        self.tolerance = max(self.limits)
        """Tolerance between two correct forwards in the tower's dtype."""

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

    def __call__(self, run: RunGrids, tolerance: float = 0.0) -> list[ClassError]:
        """Returns `errors(run)`. Raises `FusionError` if an error is above both its batch's limit and `tolerance`."""
        errors = self.errors(run)
        for one, limit in self.over_limit(errors, tolerance):
            raise FusionError(
                f"they differ from float32 by {one.error:.2e}, the eager tower by up to {self.eager_error:.2e}; "
                f"the limit is {limit:.2e}, on a batch of {one.num_patches} patches with segments of up to "
                f"{one.max_seqlen}"
            )
        return errors

    def over_limit(self, errors: Sequence[ClassError], tolerance: float) -> list[tuple[ClassError, float]]:
        """Returns the errors that are too large, each with its limit."""
        limits = [max(limit, tolerance) for limit in self.limits]
        return [(one, limit) for one, limit in zip(errors, limits, strict=True) if not one.error <= limit]


@torch.inference_mode()
def rounding_tolerance(tower: VisionTower) -> float:
    """Returns the tolerance between two runs of the eager tower, without a copy of it. Synchronises."""
    metadata = tower.prepare(_ROUNDED_BATCH)
    patches = torch.randn(metadata.num_patches, tower.config.patch_dim, device=tower.device)
    rounded = patches * (1 + torch.finfo(tower.dtype).eps * (torch.rand_like(patches) - 0.5))
    grown = largest_error_on_device(tower(rounded, metadata), tower(patches, metadata), metadata.image_tokens)
    return max(TOLERANCES[tower.dtype], min(_GROWN_ROUNDINGS * float(grown), MAX_TOLERANCE))


@contextmanager
def _tf32() -> Iterator[None]:
    """Lets float32 GEMMs round their inputs to TF32, an eighth of bfloat16's rounding; an A100 is 8 times as fast."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def largest_error_on_device(found: Tensor, expected: Tensor, image_tokens: tuple[int, ...]) -> Tensor:
    """Returns the largest ‖found - expected‖ / ‖expected‖ of an image, float32, infinite for NaN, without
    synchronising."""
    return image_errors(found, expected, image_tokens, found.shape[1]).max()


def rows_agree(outputs: Sequence[Tensor], others: Sequence[Tensor], limit: float) -> bool:
    """Returns whether all embeddings `[rows, width]` have the shapes of the others, and of each at most one row in a
    hundred differs by more than `limit` times the norm of the other's row."""
    if [one.shape for one in outputs] != [other.shape for other in others]:
        return False
    for one, other in zip(outputs, others, strict=True):
        lengths = other.float().norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        differences = (one.float() - other.float()).norm(dim=1) / lengths
        if not differences.quantile(0.99) <= limit:  # not `>`, since NaN must not agree
            return False
    return True
