"""Towers with massive activations, as published ones have them: no published checkpoint can be downloaded everywhere.

In trained towers a few channels of the residual stream hold values hundreds to thousands of times the others', nearly
the same in every row (https://arxiv.org/abs/2402.17762). They cost precision: a channel's updates are rounded to the
last bits of its large value. `massive_tower` plants such channels in a random tower:

- one feature of the MLP of block `AFTER` has the same value in every row, and its second layer multiplies it to
  `magnitude`, with alternating signs, in `CHANNELS` channels;
- every later norm's weight grows by what these channels add to the row's length, so that all other channels, and the
  rounding errors of the massive ones, leave it as large as before;
- what the massive channels leave it with on average is subtracted again, by a LayerNorm's bias, or by the biases of the
  layers after an RMSNorm.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ladder.towers import random_patches, random_tower
from encoder.checkpoint.vision_config import VisionConfig
from encoder.metadata.geometry import Grid
from encoder.towers.layers import ACTIVATIONS, MLP, Block, GatedMLP, PatchMerger
from encoder.towers.tower import VisionTower

logger = logging.getLogger(__name__)

CHANNELS, AFTER = 16, 1
_FEATURE = 7
COSINE = 0.985
"""The magnitude is about the smallest for which bfloat16's embeddings of an image have at most this cosine with
float32's."""
_FIRST_MAGNITUDE, _LAST_MAGNITUDE, _HALVINGS = 32.0, 65_536.0, 4
_GRIDS: tuple[Grid, ...] = (*((1, 14, 14),) * 8, (1, 16, 20), (1, 24, 18), (1, 48, 48))


@torch.inference_mode()
def massive_tower(config: VisionConfig, *, seed: int, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """Returns an eager tower with massive activations. Weights are rounded to bfloat16 for any `dtype`, as those of
    `random_tower`.

    Raises:
        ValueError: the tower has too few blocks, or no magnitude moves its embeddings far enough.
    """
    if config.depth < AFTER + 2:
        raise ValueError(f"massive activations are planted after block {AFTER}; the tower has {config.depth} blocks")
    patches = random_patches(config, sum(h * w for _, h, w in _GRIDS), seed=seed, device=device).float()

    def planted(magnitude: float) -> VisionTower | None:
        tower = random_tower(config, seed=seed, dtype=torch.float32, device=device)
        plant(tower, magnitude, patches, _GRIDS)
        found = lowest_cosine(copy.deepcopy(tower).bfloat16(), tower, patches, _GRIDS)
        logger.info("massive activations of %.0f: the lowest cosine of bfloat16 with float32 is %.4f", magnitude, found)
        return tower if found <= COSINE else None

    magnitude = _FIRST_MAGNITUDE
    while (tower := planted(magnitude)) is None:
        magnitude *= 2
        if magnitude > _LAST_MAGNITUDE:
            raise ValueError(
                f"with massive activations of {_LAST_MAGNITUDE:.0f}, no image has a cosine of at most {COSINE}"
            )
    step = magnitude / 4
    for _ in range(_HALVINGS):
        magnitude -= step
        if (smaller := planted(magnitude)) is not None:
            tower = smaller
        else:
            magnitude += step
        step /= 2
    return tower.to(dtype)


@torch.inference_mode()
def lowest_cosine(found: VisionTower, expected: VisionTower, patches: Tensor, grids: Sequence[Grid]) -> float:
    """Returns the lowest cosine of an image's embeddings by two towers."""
    counts = [t * h * w // expected.config.merge_unit for t, h, w in grids]
    ours, theirs = (tower(patches, tower.prepare(grids)).double().split(counts) for tower in (found, expected))
    return min(
        float(F.cosine_similarity(one.flatten(), other.flatten(), 0)) for one, other in zip(ours, theirs, strict=True)
    )


@torch.inference_mode()
def plant(tower: VisionTower, magnitude: float, patches: Tensor, grids: Sequence[Grid]) -> None:
    """Changes the weights of a float32 tower. Each norm is adjusted to what it reads of a batch: patches `[num_patches,
    patch_dim]` and their grids."""
    hidden = tower.config.hidden_size
    step = hidden // CHANNELS
    channels = torch.arange(CHANNELS, device=tower.device) * step + step // 2
    signs = torch.tensor([1.0, -1.0], device=tower.device).repeat(CHANNELS // 2)
    first = tower.blocks[AFTER]
    assert isinstance(first, Block)
    if isinstance(first.mlp, GatedMLP):
        up, second = [first.mlp.gate_proj, first.mlp.up_proj], first.mlp.down_proj
    else:
        assert isinstance(first.mlp, MLP)
        up, second = [first.mlp.linear_fc1], first.mlp.linear_fc2
    for layer in up:
        layer.weight[_FEATURE] = 0.0
        layer.bias[_FEATURE] = 1.0
    second.weight[:, _FEATURE] = 0.0
    feature = float(ACTIVATIONS[tower.config.hidden_act](torch.ones(())))
    second.weight[channels, _FEATURE] = (magnitude / feature * signs).bfloat16().to(second.weight.dtype)
    hooks = [
        norm.register_forward_pre_hook(partial(_adjust, channels, hidden, layers))
        for norm, layers in _norms_after(tower, AFTER)
    ]
    try:
        tower(patches, tower.prepare(grids))
    finally:
        for hook in hooks:
            hook.remove()


def _norms_after(tower: VisionTower, block: int) -> list[tuple[nn.Module, list[nn.Linear]]]:
    """Returns norms behind a block, with the layers that read them."""
    found: list[tuple[nn.Module, list[nn.Linear]]] = []
    mergers = [tower.merger]
    for index, one in enumerate(tower.blocks):
        assert isinstance(one, Block)
        if index >= block and (level := tower.level_merger(index)) is not None:
            mergers.append(level)
        if index > block:
            assert isinstance(one.mlp, MLP | GatedMLP)
            up = [one.mlp.gate_proj, one.mlp.up_proj] if isinstance(one.mlp, GatedMLP) else [one.mlp.linear_fc1]
            found += [(one.norm1, [one.attn.qkv]), (one.norm2, up)]
    for merger in mergers:
        assert isinstance(merger, PatchMerger)
        norm, layer, _ = merger.layers
        found.append((norm, [layer]))
    return found


def _adjust(
    channels: Tensor, hidden: int, layers: list[nn.Linear], norm: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    """Adjusts a norm, and the layers that read it, to its input `[rows, width]`; a norm over merged rows holds each
    channel several times, and so does a layer over merged rows."""
    x, weight, bias = inputs[0], norm.weight, getattr(norm, "bias", None)
    assert isinstance(weight, Tensor)
    width = int(weight.shape[0])
    massive = torch.cat([channels + start for start in range(0, width, hidden)])
    others = torch.ones(width, dtype=torch.bool, device=x.device)
    others[massive] = False
    length = x.std(-1, correction=0) if bias is not None else x.pow(2).mean(-1).sqrt()
    _round(weight, weight * (length.mean() / x[:, others].std(-1).mean()))
    rest = torch.zeros(width, device=x.device)
    rest[massive] = norm.forward(x).mean(0)[massive]
    if bias is not None:
        _round(bias, bias - rest)
        return
    for layer in layers:
        _round(layer.bias, layer.bias - layer.weight @ rest.repeat(layer.weight.shape[1] // width))


def _round(parameter: Tensor, value: Tensor) -> None:
    parameter.data = value.to(torch.bfloat16).to(parameter.dtype)


WEIGHTS = {"random": "random weights", "massive": "random weights with massive activations"}
"""Names of the weights on the command line and in reports."""
TOWERS = {"random": random_tower, "massive": massive_tower}
"""What makes a tower with these weights."""
