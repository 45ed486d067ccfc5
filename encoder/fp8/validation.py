"""Validates a tower with 8-bit GEMMs against the same tower in bfloat16, on a checkpoint's own weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.encoder_config import EncoderConfig
from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.vision_config import VisionConfig
from encoder.fp8.calibration_images import trial_batch
from encoder.fused.gemm import Layer
from encoder.metadata.geometry import Grid

logger = logging.getLogger(__name__)

RunGrids = Callable[[Tensor, Sequence[Grid]], Tensor]
"""Computes `[num_tokens, width]` from patches `[num_patches, patch_dim]` and grids."""


@dataclass(frozen=True)
class Share:
    """Share of a tower that is in 8 bits."""

    skipped: float
    """Fraction of the blocks, from the first on, that stay in bfloat16."""
    layers: tuple[Layer, ...]
    """Layers of the other blocks that are in 8 bits."""

    def first_block(self, depth: int) -> int:
        return math.ceil(self.skipped * depth)

    def __str__(self) -> str:
        return f"{', '.join(self.layers)} of all but the first {self.skipped:.0%} of the blocks"


_WITHOUT_QKV = (Layer.UP, Layer.DOWN)
_ALL = (Layer.QKV, *_WITHOUT_QKV)
SHARES = (
    Share(0, _ALL),
    Share(1 / 8, _ALL),
    Share(1 / 4, _ALL),
    Share(1 / 8, _WITHOUT_QKV),
    Share(1 / 4, _WITHOUT_QKV),
    Share(1 / 2, _WITHOUT_QKV),
)
"""Shares in the order in which they are tried. Later blocks amplify errors of the first ones, and attention's logits
amplify errors of q and k."""


class Fp8RefusedError(ValueError):
    """8-bit GEMMs change a checkpoint's embeddings by more than the settings allow."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of embeddings with expected ones; cosines are taken per part, main or deepstack level."""

    lowest_token_cosine: float
    lowest_image_cosine: float
    largest_error: float
    """‖found - expected‖ / ‖expected‖ of an image."""
    share: str = ""
    """The share in 8 bits, as text."""


def compare_embeddings(found: Tensor, expected: Tensor, image_tokens: Sequence[int], out_hidden_size: int) -> Agreement:
    """Compares embeddings `[num_tokens, width]`; NaN agrees with nothing. Synchronises."""
    ours, theirs = (x.double().unflatten(1, (-1, out_hidden_size)) for x in (found, expected))
    pairs = list(zip(ours.split(list(image_tokens)), theirs.split(list(image_tokens)), strict=True))
    images = torch.stack([F.cosine_similarity(*(x.transpose(0, 1).flatten(1) for x in pair)) for pair in pairs])
    errors = torch.stack([(one - other).norm() / other.norm() for one, other in pairs])
    tokens = F.cosine_similarity(ours, theirs, dim=-1)
    return Agreement(
        float(tokens.nan_to_num(-1.0).min()),
        float(images.nan_to_num(-1.0).min()),
        float(errors.nan_to_num(float("inf"), posinf=float("inf")).max()),
    )


def default_rules(config: VisionConfig) -> ImageRules:
    """Returns the processor's default rules, for a tower without rules."""
    return ImageRules(
        patch_size=config.patch_size,
        temporal_patch_size=config.temporal_patch_size,
        merge_size=config.spatial_merge_size,
    )


@torch.inference_mode()
def try_fp8(
    narrow: Callable[[Share], RunGrids],
    wide: RunGrids,
    tower: VisionConfig,
    config: EncoderConfig,
    *,
    rules: ImageRules | None,
    device: torch.device,
) -> tuple[RunGrids, Agreement]:
    """Returns the first of `SHARES` whose embeddings of `trial_batch` agree, within the settings' limits, with `wide`
    and with its own embeddings of each image alone: kernels depend on a batch's size, and 8 bits amplify rounding.

    `narrow`: returns the run of the tower with a share in 8 bits.

    Raises:
        Fp8RefusedError: no share agrees.
    """
    patches, grids = trial_batch(rules or default_rules(tower), device, 1)
    counts = [t * h * w // tower.merge_unit for t, h, w in grids]
    expected = wide(patches, grids)
    complaint = ""
    for share in SHARES:
        run = narrow(share)
        together = run(patches, grids)
        rows = patches.split([t * h * w for t, h, w in grids])
        alone = torch.cat([run(one, [grid]) for one, grid in zip(rows, grids, strict=True)])
        found = replace(compare_embeddings(together, expected, counts, tower.out_hidden_size), share=str(share))
        batched = compare_embeddings(together, alone, counts, tower.out_hidden_size)
        complaint = _disagreement(found, config, "bfloat16") or _disagreement(batched, config, "the same image alone")
        logger.info(
            "fp8 for %s beside bfloat16 on %d trial images: lowest cosine of a token %.5f, of an image %.6f; "
            "largest error %.2e; beside each image alone %.5f, %.6f, %.2e; %s",
            share,
            len(grids),
            found.lowest_token_cosine,
            found.lowest_image_cosine,
            found.largest_error,
            batched.lowest_token_cosine,
            batched.lowest_image_cosine,
            batched.largest_error,
            complaint or "used",
        )
        if not complaint:
            return run, found
        del run  # frees its weights before the next share's are made
    raise Fp8RefusedError(
        f"fp8 is true, and on this checkpoint, even with no more than {SHARES[-1]} in 8 bits, {complaint}"
    )


def _disagreement(found: Agreement, config: EncoderConfig, other: str) -> str:
    for what, value, name in (
        ("a token", found.lowest_token_cosine, "fp8_min_token_cosine"),
        ("an image", found.lowest_image_cosine, "fp8_min_image_cosine"),
    ):
        limit = getattr(config, name)
        if not value >= limit:
            return f"the lowest cosine of {what} with {other} is {value:.5f}; the limit is {limit} ({name})"
    return ""
