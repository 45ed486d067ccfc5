"""Errors of the ladder's rungs on a checkpoint's own weights, each against the eager tower in float32.

The images are those that validate a tower before it serves (`encoder/fp8/calibration_images.py`). `main` or `level 0`
names the part of the width; a rung's figure is of the worst image and part.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.ladder.rungs import LABELS, RungUnavailableError, make_rung
from benchmarks.ladder.text import columns
from configs.encoder_config import EncoderConfig
from encoder.checkpoint.files import resolve_checkpoint
from encoder.checkpoint.image_rules import ImageRules
from encoder.fp8.calibration_images import trial_batch
from encoder.fp8.validation import image_errors
from encoder.towers.weights import load_tower


@torch.inference_mode()
def measure_accuracy(model: str, rungs: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Returns a row for each rung: the error of the image for which it is largest beside the eager tower's in bfloat16.

    Args:
        model: a checkpoint's folder, or its name on the hub.
        rungs: names of the ladder's rungs. fp8 is measured with all of its layers in 8 bits, whatever the error.

    Raises:
        CheckpointError: `model` has no tower of ours.
    """
    folder = resolve_checkpoint(model)
    rules = ImageRules.from_checkpoint(folder)
    patches, grids = trial_batch(rules, device, 1)
    exact = load_tower(folder, dtype=torch.float32, device=device)
    config = exact.config
    counts = [t * h * w // config.merge_unit for t, h, w in grids]
    expected = exact(patches, exact.prepare(grids))
    del exact
    tower = load_tower(folder, dtype=torch.bfloat16, device=device)
    own = image_errors(tower(patches, tower.prepare(grids)), expected, counts, config.out_hidden_size)
    own = own.clamp(min=torch.finfo(torch.float32).tiny)
    parts = ["main", *(f"level {number}" for number in range(own.shape[1] - 1))]
    rows: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name in rungs:
        try:
            rung = make_rung(name, tower, rules)
        except RungUnavailableError as error:
            skipped[name] = str(error)
            continue
        found = torch.cat(rung.run(patches, grids))
        errors = image_errors(found, expected, counts, config.out_hidden_size)
        ratios = errors / own
        image, part = divmod(int(ratios.argmax()), ratios.shape[1])
        rows[name] = {
            "error": float(errors[image, part]),
            "over_bfloat16": float(ratios[image, part]),
            "part": parts[part],
            "attention": rung.facts()["attention"],
        }
        del rung, found
        gc.collect()
    return {
        "model": model,
        "images": len(grids),
        "fp8_max_error": EncoderConfig.fp8_max_error,
        "rows": rows,
        "skipped": skipped,
    }


def accuracy_table(found: dict[str, Any]) -> str:
    """Returns a line for each rung."""
    lines = [
        [LABELS[name], f"{row['error']:.2e}", f"{row['over_bfloat16']:.2f}", row["part"], row["attention"]]
        for name, row in found["rows"].items()
    ]
    header = [f"{found['model']}, {found['images']} images", "error to float32", "over bfloat16's", "part", "attention"]
    skipped = [f"skipped: {name}: {reason}" for name, reason in found["skipped"].items()]
    limit = (
        f"fp8 above is of all layers. A server keeps layers in bfloat16 until each image's error is at most "
        f"{found['fp8_max_error']:g} times its error in bfloat16 (encoder.fp8_max_error)."
    )
    return "\n".join([*columns(header, lines), *skipped, limit])
