"""A fused tower with 8-bit products in place of its own, tried before it is used. It must not know graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from configs.encoder_config import EncoderConfig
from encoder.fp8_range import WatchedProducts
from encoder.fp8_trial import Agreement, RunGrids, Share, rules_for, try_fp8
from encoder.image_rules import ImageRules
from encoder.products import After, TorchProducts
from encoder.trial_images import trial_batch
from encoder.weights import VisionTower

if TYPE_CHECKING:
    from encoder.fused import FusedTower

CAPABILITY = (9, 0)
"""From which on GPUs have a product in 8 bits with a scale for each row."""


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raises `ValueError` where a tower on `device`, in `dtype`, can have no 8-bit products."""
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


def narrowed(
    tower: VisionTower, wide: FusedTower, config: EncoderConfig, rules: ImageRules | None
) -> tuple[FusedTower, Agreement]:
    """`wide`, which is made of `tower`, with 8-bit products in as large a share of it as agrees with `wide`.

    Raises:
        Fp8RefusedError: with any share they differ by more than the settings allow.
    """
    from encoder.fp8_products import FEWEST_ROWS_OF_ATTENTION
    from encoder.fused import FusedTower

    def run_of(fused: FusedTower) -> RunGrids:
        return lambda patches, grids: fused(patches, fused.prepare(grids))

    rules = rules or rules_for(tower.config)
    products_of = _products_of(tower, wide, rules)
    made: list[FusedTower] = []

    def narrow(share: Share) -> RunGrids:
        made.clear()
        with torch.cuda.device(tower.device):
            made.append(FusedTower(tower, wide.attention_plan, products_of(share)))
        return run_of(made[0])

    _, agreement = try_fp8(
        narrow,
        run_of(wide),
        tower.config,
        config,
        rules=rules,
        device=tower.device,
        fewest_rows=FEWEST_ROWS_OF_ATTENTION,
    )
    return made[0], agreement


def _products_of(tower: VisionTower, wide: FusedTower, rules: ImageRules) -> Callable[[Share], TorchProducts]:
    """The products of a share: QuACK's where `wide` has them, else cuBLAS's."""
    from encoder.fp8_products import Fp8Products

    depth = tower.config.depth
    if not wide.products.turns:
        return lambda share: Fp8Products(wide.products, parts=share.parts, first_block=share.first_block(depth))
    from encoder.quack_fp8 import QuackFp8Products
    from encoder.quack_products import QuackProducts

    quack = wide.products
    assert isinstance(quack, QuackProducts)
    largest = _largest_between(tower, wide, rules)
    return lambda share: QuackFp8Products(
        quack, largest=largest, parts=share.parts, first_block=share.first_block(depth)
    )


@torch.inference_mode()
def _largest_between(tower: VisionTower, wide: FusedTower, rules: ImageRules) -> tuple[float, ...]:
    """Of each block on the trial images; nothing where what lies between the MLP's layers has a scale for each row."""
    from encoder.fused import FusedTower

    if tower.config.hidden_act != After.GELU_TANH:
        return ()
    watched = WatchedProducts(wide.products)
    patches, grids = trial_batch(rules, tower.device, 1)
    with torch.cuda.device(tower.device):
        seen = FusedTower(tower, wide.attention_plan, watched)
        seen(patches, seen.prepare(grids))
    return watched.largest()
