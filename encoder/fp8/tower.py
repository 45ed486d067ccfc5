"""A fused tower with 8-bit GEMMs, validated before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from configs.encoder_config import EncoderConfig
from encoder.checkpoint.image_rules import ImageRules
from encoder.fp8.calibration_images import trial_batch
from encoder.fp8.channel_means import channel_means
from encoder.fp8.sensitivity import Layers
from encoder.fp8.validation import Agreement, RunGrids, default_rules, try_fp8
from encoder.metadata.geometry import Grid
from encoder.towers.tower import VisionTower

if TYPE_CHECKING:
    from encoder.fused.tower import FusedTower

CAPABILITY = (9, 0)
"""First compute capability that has 8-bit GEMMs with a scale per row."""


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raises `ValueError` if a tower on `device`, in `dtype`, cannot have 8-bit GEMMs."""
    needed = f"{CAPABILITY[0]}.{CAPABILITY[1]}"
    if device.type != "cuda":
        raise ValueError(
            f"fp8 is true, and the device is {device}: it needs a GPU of compute capability {needed} or newer"
        )
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        raise ValueError(
            f"fp8 is true, and the GPU has compute capability {found[0]}.{found[1]}: it needs {needed} or newer"
        )
    if dtype != torch.bfloat16:
        raise ValueError(f"fp8 is true, and the tower is in {dtype}: it needs dtype to be bfloat16")


def build_fp8_tower(
    tower: VisionTower, wide: FusedTower, config: EncoderConfig, rules: ImageRules | None
) -> tuple[FusedTower, Agreement]:
    """Returns `wide`, made of `tower`, with as many layers in 8 bits as the settings' limit allows, and the errors.

    A copy of `tower` in float32 is on the device for one run.

    Raises:
        Fp8RefusedError: errors are larger than the settings allow, whatever the layers.
    """
    from encoder.fp8.gemm import Fp8Gemm
    from encoder.fused.tower import FusedTower

    def run_of(fused: FusedTower) -> RunGrids:
        return lambda patches, grids: fused(patches, fused.prepare(grids))

    patches, grids = trial_batch(rules or default_rules(tower.config), tower.device, 1)
    means = channel_means(tower, patches, grids)
    expected = _in_float32(tower, patches, grids)
    made: list[FusedTower] = []

    def narrow(layers: Layers) -> RunGrids:
        first = not made
        made.clear()
        with torch.cuda.device(tower.device):
            gemm = Fp8Gemm(wide.gemm, layers=layers, means=means)
            made.append(FusedTower(tower, wide.attention_plan, gemm))
        if first:
            made[0].compile_kernels()
        return run_of(made[0])

    _, agreement = try_fp8(
        narrow,
        run_of(wide),
        expected,
        tower.config,
        config,
        patches=patches,
        grids=grids,
    )
    return made[0], agreement


@torch.inference_mode()
def _in_float32(tower: VisionTower, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Returns the embeddings `[num_tokens, width]` of a float32 copy of the tower, whose memory is returned."""
    exact = tower.in_float32()
    found = exact(patches, exact.prepare(grids))
    del exact
    torch.cuda.empty_cache()
    return found
