"""Whether a tower with 8-bit products is close enough to itself in bfloat16 on a checkpoint's own weights.

It must not know how products are made, nor graphs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.encoder_config import EncoderConfig
from encoder.geometry import Grid
from encoder.image_rules import ImageRules
from encoder.products import Part
from encoder.trial_images import trial_batch
from encoder.vision_config import VisionConfig

logger = logging.getLogger(__name__)

RunGrids = Callable[[Tensor, Sequence[Grid]], Tensor]
"""Patches `[num_patches, patch_dim]` and grids to `[num_tokens, width]`."""


@dataclass(frozen=True)
class Share:
    """What of a tower is in 8 bits."""

    skipped: float
    """Of the blocks, from the first on: those in bfloat16."""
    parts: tuple[Part, ...]
    """Of the other blocks."""

    def first_block(self, depth: int) -> int:
        return math.ceil(self.skipped * depth)

    def __str__(self) -> str:
        return f"{', '.join(self.parts)} of all but the first {self.skipped:.0%} of the blocks"


_WITHOUT_QKV = (Part.PROJ, Part.UP, Part.DOWN)
_ALL = (Part.QKV, *_WITHOUT_QKV)
SHARES = (
    Share(0, _ALL),
    Share(1 / 8, _ALL),
    Share(1 / 4, _ALL),
    Share(1 / 8, _WITHOUT_QKV),
    Share(1 / 4, _WITHOUT_QKV),
    Share(1 / 2, _WITHOUT_QKV),
)
"""What is tried, the largest first. What the first blocks lose grows in the others, and attention's logits make much of
what is off in q and k."""


class Fp8RefusedError(ValueError):
    """8-bit products move a checkpoint's embeddings by more than is allowed."""


@dataclass(frozen=True)
class Agreement:
    """Of embeddings with those they should be; the main part and each deepstack level count apart."""

    lowest_token_cosine: float
    lowest_image_cosine: float
    largest_error: float
    """‖found - expected‖ / ‖expected‖ of an image."""
    share: str = ""
    """What was in 8 bits."""


def agreement(found: Tensor, expected: Tensor, image_tokens: Sequence[int], out_hidden_size: int) -> Agreement:
    """Of `[num_tokens, width]`. What is no number agrees with nothing. Waits for the device."""
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


def rules_for(config: VisionConfig) -> ImageRules:
    """The processor's defaults, for a tower that came without rules."""
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
    fewest_rows: int,
) -> tuple[RunGrids, Agreement]:
    """The first of `SHARES` whose run agrees with `wide` on `trial_batch`, of `fewest_rows` or more, as is asked for.

    `narrow`: the tower with this share in 8 bits.

    Raises:
        Fp8RefusedError: none does.
    """
    patches, grids = trial_batch(rules or rules_for(tower), device, fewest_rows)
    counts = [t * h * w // tower.merge_unit for t, h, w in grids]
    expected = wide(patches, grids)
    complaint = ""
    for share in SHARES:
        run = narrow(share)
        found = replace(agreement(run(patches, grids), expected, counts, tower.out_hidden_size), share=str(share))
        complaint = _complaint(found, config)
        logger.info(
            "fp8 for %s beside bfloat16 on %d trial images: lowest cosine of a token %.5f, of an image %.6f; "
            "largest error %.2e; %s",
            share,
            len(grids),
            found.lowest_token_cosine,
            found.lowest_image_cosine,
            found.largest_error,
            complaint or "used",
        )
        if not complaint:
            return run, found
        del run  # its weights, before those of the next
    raise Fp8RefusedError(
        f"fp8 is true, and on this checkpoint, even with no more than {SHARES[-1]} in 8 bits, {complaint}"
    )


def _complaint(found: Agreement, config: EncoderConfig) -> str:
    for what, value, name in (
        ("a token", found.lowest_token_cosine, "fp8_min_token_cosine"),
        ("an image", found.lowest_image_cosine, "fp8_min_image_cosine"),
    ):
        limit = getattr(config, name)
        if not value >= limit:
            return f"the lowest cosine of {what} with bfloat16 is {value:.5f}; the limit is {limit} ({name})"
    return ""
