"""Error of fp8 on trained weights, which have outliers that random ones lack: measured on the small included model."""

from __future__ import annotations

from dataclasses import asdict

import torch

from benchmarks.record import ROOT
from configs.encoder_config import EncoderConfig
from encoder.checkpoint.image_rules import ImageRules
from encoder.forwards import TowerForward, choose_forward
from encoder.fp8.calibration_images import trial_batch
from encoder.fp8.validation import Difference, compare_embeddings
from encoder.metadata.builder import MetadataBuilder
from encoder.towers.backends import BackendUnavailableError
from encoder.towers.weights import load_tower

MODEL = "models/scenes-8m"
# More than the minimum rows at which any layer runs in fp8.
_ROWS = 8192


@torch.inference_mode()
def trained_agreement(device: torch.device) -> dict[str, object]:
    """Returns cosines and errors on trial images: fp8 against bfloat16, each against float32; or why there are none."""
    path = ROOT / MODEL
    rules = ImageRules.from_checkpoint(path)
    exact = load_tower(path, dtype=torch.float32, device=device)
    patches, grids = trial_batch(rules, device, _ROWS)
    counts = [t * h * w // exact.config.merge_unit for t, h, w in grids]
    expected = exact(patches, exact.prepare(grids))

    def of(forward: TowerForward) -> Difference:
        metadata = MetadataBuilder(forward.config).build(grids, device=device, backend=forward.backend)
        return compare_embeddings(forward.run(patches, metadata), expected, counts, forward.config.out_hidden_size)

    found: dict[str, object] = {"model": MODEL, "images": len(grids), "patches": patches.shape[0]}
    try:
        rounded = load_tower(path, dtype=torch.bfloat16, device=device)
        narrow = choose_forward(rounded, EncoderConfig(fused_kernels=True, fp8=True, fp8_max_error=float("inf")), rules)
        assert narrow.agreement is not None
        return found | {
            "fp8_on_trial_images": asdict(narrow.agreement),
            "fp8_beside_float32": asdict(of(narrow)),
            "bfloat16_beside_float32": asdict(of(choose_forward(rounded, EncoderConfig(fused_kernels=True), rules))),
        }
    except (ValueError, BackendUnavailableError) as error:
        return found | {"reason": str(error)}
