"""Validates a tower with 8-bit GEMMs on a checkpoint's own weights: its error against float32, as a multiple of the
same tower's error in bfloat16.

How much rounding matters depends on the weights: bfloat16 moves one checkpoint's embeddings by 1 %, another's by 15 %.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.encoder_config import EncoderConfig
from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.vision_config import VisionConfig
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
    """Errors ‖found - expected‖ / ‖expected‖ of the worst trial image. All but `whole_error` are of the part of the
    width, main or a deepstack level, for which they are largest beside bfloat16's error."""

    over_bfloat16: float
    """The largest of `error` and `batch_error`, as a multiple of `bfloat16_error`."""
    error: float
    """Against float32, in a batch or alone, whichever is larger."""
    batch_error: float
    """In a batch against the same image alone."""
    bfloat16_error: float
    """Of the tower in bfloat16 against float32."""
    whole_error: float
    """Against float32, over the whole width."""
    share: str = ""
    """The share in 8 bits, as text."""


def part_errors(found: Tensor, expected: Tensor, image_tokens: Sequence[int], out_hidden_size: int) -> Tensor:
    """Returns ‖found - expected‖ / ‖expected‖ of the worst image, `[parts]` of the width; infinite for NaN."""
    ours, theirs = (x.float().unflatten(1, (-1, out_hidden_size)).split(list(image_tokens)) for x in (found, expected))
    errors = torch.stack(
        [(one - other).norm(dim=(0, 2)) / other.norm(dim=(0, 2)) for one, other in zip(ours, theirs, strict=True)]
    )
    return errors.nan_to_num(float("inf"), posinf=float("inf")).amax(0)


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
    expected: Tensor,
    tower: VisionConfig,
    config: EncoderConfig,
    *,
    patches: Tensor,
    grids: Sequence[Grid],
) -> tuple[RunGrids, Agreement]:
    """Returns the first of `SHARES` whose errors on a batch of images stay within the settings' multiple of the error
    of `wide`: each image's in the batch, each image's alone, and what it differs by between the two, because kernels
    depend on a batch's size and 8 bits amplify rounding.

    `narrow`: returns the run of the tower with a share in 8 bits. `wide`: in bfloat16. `expected`: the batch's
    embeddings in float32.

    Raises:
        Fp8RefusedError: no share does.
    """
    counts = [t * h * w // tower.merge_unit for t, h, w in grids]
    rows = patches.split([t * h * w for t, h, w in grids])

    def errors(found: Tensor, other: Tensor) -> Tensor:
        return part_errors(found, other, counts, tower.out_hidden_size)

    own = errors(wide(patches, grids), expected).clamp(min=torch.finfo(torch.float32).tiny)
    complaint = ""
    for share in SHARES:
        run = narrow(share)
        together = run(patches, grids)
        alone = torch.cat([run(one, [grid]) for one, grid in zip(rows, grids, strict=True)])
        error = torch.maximum(errors(together, expected), errors(alone, expected))
        batch_error = errors(together, alone)
        ratios = (torch.maximum(error, batch_error) / own).masked_fill(own.isinf(), float("inf"))
        worst = int(ratios.argmax())
        found = Agreement(
            over_bfloat16=float(ratios[worst]),
            error=float(error[worst]),
            batch_error=float(batch_error[worst]),
            bfloat16_error=float(own[worst]),
            whole_error=float(part_errors(together, expected, counts, tower.width)),
            share=str(share),
        )
        complaint = _disagreement(found, config)
        logger.info(
            "fp8 for %s on %d trial images: error %.2e, %.2e between a batch and an image alone, of bfloat16 %.2e; %s",
            share, len(grids), found.error, found.batch_error, found.bfloat16_error, complaint or "used",
        )  # fmt: skip
        if not complaint:
            return run, found
        del run  # frees its weights before the next share's are made
    raise Fp8RefusedError(
        f"fp8 is true, and on this checkpoint, even with no more than {SHARES[-1]} in 8 bits, {complaint}"
    )


def _disagreement(found: Agreement, config: EncoderConfig) -> str:
    if found.over_bfloat16 <= config.fp8_max_error:
        return ""
    what = "error of an image" if found.error >= found.batch_error else "difference of an image between batches"
    return (
        f"the largest {what} is {found.over_bfloat16:.2f} times the error of bfloat16 ({found.bfloat16_error:.2e}); "
        f"the limit is {config.fp8_max_error:g} (fp8_max_error)"
    )
