"""What 8 bits cost on trained weights, which have outliers where random ones have none: the small shipped model.

It must not know how figures are shown.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from benchmarks.record import ROOT
from configs.encoder_config import EncoderConfig
from encoder.attention_backends import BackendUnavailableError
from encoder.forwards import TowerForward, choose_forward
from encoder.fp8_trial import Agreement, agreement
from encoder.image_rules import ImageRules
from encoder.metadata import MetadataBuilder
from encoder.trial_images import trial_batch
from encoder.weights import load_tower

MODEL = "models/scenes-8m"
# More than the fewest rows that any layer wants in 8 bits.
_ROWS = 8192


@torch.inference_mode()
def trained_agreement(device: torch.device) -> dict[str, object]:
    """Cosines and errors on trial images: 8 bits beside bfloat16, and each beside float32; or why there are none."""
    path = ROOT / MODEL
    rules = ImageRules.from_checkpoint(path)
    exact = load_tower(path, dtype=torch.float32, device=device)
    patches, grids = trial_batch(rules, device, _ROWS)
    counts = [t * h * w // exact.config.merge_unit for t, h, w in grids]
    expected = exact(patches, exact.prepare(grids))

    def of(forward: TowerForward) -> Agreement:
        metadata = MetadataBuilder(forward.config).build(grids, device=device, backend=forward.backend)
        return agreement(forward.run(patches, metadata), expected, counts, forward.config.out_hidden_size)

    found: dict[str, object] = {"model": MODEL, "images": len(grids), "patches": patches.shape[0]}
    try:
        rounded = load_tower(path, dtype=torch.bfloat16, device=device)
        narrow = choose_forward(
            rounded, EncoderConfig(fusion=True, fp8=True, fp8_min_token_cosine=0, fp8_min_image_cosine=0), rules
        )
        assert narrow.agreement is not None
        return found | {
            "fp8_beside_bfloat16": asdict(narrow.agreement),
            "fp8_beside_float32": asdict(of(narrow)),
            "bfloat16_beside_float32": asdict(of(choose_forward(rounded, EncoderConfig(fusion=True), rules))),
        }
    except (ValueError, BackendUnavailableError) as error:
        return found | {"reason": str(error)}
