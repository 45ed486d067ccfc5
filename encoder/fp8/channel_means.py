"""Means of channels with massive activations in the inputs of layers in 8 bits, subtracted before rows are quantised.

Trained towers have massive activations: a few channels whose values are up to thousands of times the others' and nearly
the same in every row. A layer's weights and bias cancel what they have in common, but 8 bits round it by up to 6 %,
which is more than all other channels hold. The mean's product with the unquantised weight, computed in float32, is
added to the bias, so that only deviations from the mean are rounded to 8 bits. Other channels stay as they are: their
means differ between images, so that subtracting one image's from another's adds to what is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from encoder.fused.gemm import Layer
from encoder.metadata.geometry import Grid
from encoder.towers.layers import MLP, Block, GatedMLP
from encoder.towers.tower import VisionTower

ChannelMeans = Mapping[tuple[int, Layer], Tensor]
"""Means, float32 `[in]`, 0 for channels without massive activations, by block and layer; none for layers without such
channels, and for the MLP's second layer, whose input follows an activation."""

MASSIVE = 8.0
"""A channel has massive activations if its mean is this many times as large as its deviations from it."""


@torch.inference_mode()
def channel_means(tower: VisionTower, patches: Tensor, grids: Sequence[Grid]) -> ChannelMeans:
    """Returns the means over all rows of a batch: patches `[num_patches, patch_dim]`, and the grids of the images.
    Synchronises."""
    means: dict[tuple[int, Layer], Tensor] = {}

    def record(key: tuple[int, Layer], _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        deviation, mean = torch.std_mean(inputs[0].float(), 0)
        massive = mean.abs() > MASSIVE * deviation
        if massive.any():
            means[key] = mean * massive

    hooks = []
    for index, block in enumerate(tower.blocks):
        assert isinstance(block, Block)
        assert isinstance(block.mlp, MLP | GatedMLP)
        up = block.mlp.up_proj if isinstance(block.mlp, GatedMLP) else block.mlp.linear_fc1
        for layer, linear in ((Layer.QKV, block.attn.qkv), (Layer.UP, up)):
            hooks.append(linear.register_forward_pre_hook(partial(record, (index, layer))))
    try:
        tower(patches, tower.prepare(grids))
    finally:
        for hook in hooks:
            hook.remove()
    return means
