"""Validates a tower with 8-bit GEMMs on a checkpoint's own weights: its error against float32, as a multiple of the
same tower's error in bfloat16.

How much rounding matters depends on the weights: bfloat16 moves one checkpoint's embeddings by 1 %, another's by 15 %.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.encoder_config import EncoderConfig
from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.vision_config import VisionConfig
from encoder.fp8.sensitivity import Layers, choose_groups, describe, layer_groups, layers_of
from encoder.metadata.geometry import Grid

logger = logging.getLogger(__name__)

RunGrids = Callable[[Tensor, Sequence[Grid]], Tensor]
"""Computes `[num_tokens, width]` from patches `[num_patches, patch_dim]` and grids."""


_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of the chosen groups of layers, at least one group, that are tried until their error is within the limit."""


class Fp8RefusedError(ValueError):
    """8-bit GEMMs change a checkpoint's embeddings by more than the settings allow."""


@dataclass(frozen=True)
class Agreement:
    """Errors ‖found - expected‖ / ‖expected‖. All but `whole_error` are of one trial image and one part of the width,
    main or a deepstack level: those for which they are largest beside bfloat16's error."""

    over_bfloat16: float
    """The largest of `error` and `batch_error`, as a multiple of `bfloat16_error`."""
    error: float
    """Against float32, in a batch or alone, whichever is larger."""
    batch_error: float
    """In a batch against the same image alone."""
    bfloat16_error: float
    """Of the tower in bfloat16 against float32."""
    whole_error: float
    """Against float32, over the whole width, of the worst image."""
    layers: str = ""
    """The layers in 8 bits, as text."""


def image_errors(found: Tensor, expected: Tensor, image_tokens: Sequence[int], out_hidden_size: int) -> Tensor:
    """Returns ‖found - expected‖ / ‖expected‖, `[images, parts]` of the width; infinite for NaN."""
    ours, theirs = (x.float().unflatten(1, (-1, out_hidden_size)).split(list(image_tokens)) for x in (found, expected))
    errors = torch.stack(
        [(one - other).norm(dim=(0, 2)) / other.norm(dim=(0, 2)) for one, other in zip(ours, theirs, strict=True)]
    )
    return errors.nan_to_num(float("inf"), posinf=float("inf"))


def default_rules(config: VisionConfig) -> ImageRules:
    """Returns the processor's default rules, for a tower without rules."""
    return ImageRules(
        patch_size=config.patch_size,
        temporal_patch_size=config.temporal_patch_size,
        merge_size=config.spatial_merge_size,
    )


@torch.inference_mode()
def try_fp8(
    narrow: Callable[[Layers], RunGrids],
    wide: RunGrids,
    expected: Tensor,
    tower: VisionConfig,
    config: EncoderConfig,
    *,
    patches: Tensor,
    grids: Sequence[Grid],
) -> tuple[RunGrids, Agreement]:
    """Returns the run of a tower with layers in 8 bits in which each image's error is at most the settings' multiple of
    its error in `wide`: with all of them, or those chosen by the error that each group of layers causes alone.

    The limit holds for an image's error in the batch, for its error alone, and for what it differs by between the two,
    because kernels depend on a batch's size and 8 bits amplify rounding.

    `narrow`: returns the run of the tower with these layers in 8 bits. `wide`: in bfloat16. `expected`: the batch's
    embeddings in float32.

    Raises:
        Fp8RefusedError: no choice stays within the limit.
    """
    trials = _Trials(wide, expected, tower, patches, grids)
    refusal = ""
    for layers in _choices(narrow, trials, tower, config.fp8_max_error):
        run = narrow(layers)
        found = trials.agreement(run, layers)
        complaint = _disagreement(found, config)
        logger.info(
            "fp8 for %s on %d trial images: error %.2e, %.2e between a batch and an image alone, of bfloat16 %.2e; %s",
            found.layers, len(grids), found.error, found.batch_error, found.bfloat16_error, complaint or "used",
        )  # fmt: skip
        if not complaint:
            return run, found
        refusal = f"with {found.layers} in 8 bits, {complaint}"
        del run  # frees its weights before the next ones are made
    raise Fp8RefusedError(f"fp8 is true, and on this checkpoint, {refusal}")


def _choices(
    narrow: Callable[[Layers], RunGrids], trials: _Trials, tower: VisionConfig, limit: float
) -> Iterator[Layers]:
    """Yields all layers, then choices by the error that each group of layers adds, the largest first."""
    groups = layer_groups(tower)
    yield layers_of(groups)
    added = torch.stack([trials.added_error(narrow(group.layers)) for group in groups])
    chosen = choose_groups(groups, added, trials.room(limit))
    numbers = {max(math.ceil(share * len(chosen)), 1) for share in _SHARES if chosen} - {len(groups)}
    yield from (layers_of(chosen[:number]) for number in sorted(numbers, reverse=True))


class _Trials:
    """Trial images, their embeddings in float32, and the errors of bfloat16 on them."""

    def __init__(
        self, wide: RunGrids, expected: Tensor, tower: VisionConfig, patches: Tensor, grids: Sequence[Grid]
    ) -> None:
        self._expected, self._tower, self._patches, self._grids = expected, tower, patches, grids
        self._counts = [t * h * w // tower.merge_unit for t, h, w in grids]
        self._own = self._errors(wide(patches, grids), expected).clamp(min=torch.finfo(torch.float32).tiny)

    def agreement(self, run: RunGrids, layers: Layers) -> Agreement:
        """Returns the errors of the run with these layers in 8 bits."""
        together = run(self._patches, self._grids)
        rows = self._patches.split([t * h * w for t, h, w in self._grids])
        alone = torch.cat([run(one, [grid]) for one, grid in zip(rows, self._grids, strict=True)])
        error = torch.maximum(self._errors(together, self._expected), self._errors(alone, self._expected))
        batch_error = self._errors(together, alone)
        own = self._own
        ratios = (torch.maximum(error, batch_error) / own).masked_fill(own.isinf(), float("inf"))
        worst = divmod(int(ratios.argmax()), ratios.shape[1])
        return Agreement(
            over_bfloat16=float(ratios[worst]),
            error=float(error[worst]),
            batch_error=float(batch_error[worst]),
            bfloat16_error=float(own[worst]),
            whole_error=float(image_errors(together, self._expected, self._counts, self._tower.width).max()),
            layers=describe(layers),
        )

    def added_error(self, run: RunGrids) -> Tensor:
        """Returns the squared error that the run's layers in 8 bits add to bfloat16's, `[images, parts]`."""
        errors = self._errors(run(self._patches, self._grids), self._expected)
        return (errors.square() - self._own.square()).clamp(min=0)

    def room(self, limit: float) -> Tensor:
        """Returns the squared error that may be added so that no image has more than `limit` times its error in
        bfloat16, `[images, parts]`; less than 0 for a limit below 1."""
        return (limit**2 - 1) * self._own.square()

    def _errors(self, found: Tensor, expected: Tensor) -> Tensor:
        return image_errors(found, expected, self._counts, self._tower.out_hidden_size)


def _disagreement(found: Agreement, config: EncoderConfig) -> str:
    if found.over_bfloat16 <= config.fp8_max_error:
        return ""
    what = "error" if found.error >= found.batch_error else "difference between batches"
    return (
        f"an image's {what} is {found.over_bfloat16:.2f} times its error in bfloat16 ({found.bfloat16_error:.2e}); "
        f"the limit is {config.fp8_max_error:g} (fp8_max_error)"
    )
