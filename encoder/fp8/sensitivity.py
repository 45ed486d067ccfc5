"""Chooses the layers of a tower that are in 8 bits by the error that each group of them causes alone.

Rounding errors of different layers are nearly uncorrelated, so that their squares add up: on the CPU, 2.9 times
bfloat16's error was predicted and 2.6 measured (benchmarks/log/2026-11-27-fp8-sensitivity.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor

from encoder.checkpoint.vision_config import VisionConfig
from encoder.fused.gemm import Layer

Layers = frozenset[tuple[int, Layer]]
"""Layers in 8 bits, by block, counted from 0, and layer."""

_SECTIONS = 8
"""Sections of consecutive blocks whose layers are measured together: each costs two runs at the start."""

_KINDS = {"qkv": (Layer.QKV,), "MLP": (Layer.UP, Layer.DOWN)}
"""The MLP's layers are in 8 bits together, since one kernel writes what the next one reads."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are in 8 bits together or not at all."""

    layers: Layers
    weights: int
    """Number of weights, to which the time of GEMMs is proportional."""


def layer_groups(config: VisionConfig) -> list[LayerGroup]:
    """Returns the qkv layers and the MLPs of each section of the tower's blocks."""
    inner = config.hidden_size * config.intermediate_size
    weights = {"qkv": 3 * config.hidden_size**2, "MLP": (3 if config.traits.gated_mlp else 2) * inner}
    length = -(-config.depth // _SECTIONS)
    sections = [range(first, min(first + length, config.depth)) for first in range(0, config.depth, length)]
    return [
        LayerGroup(frozenset((block, layer) for block in section for layer in layers), weights[kind] * len(section))
        for section in sections
        for kind, layers in _KINDS.items()
    ]


def choose_groups(groups: Sequence[LayerGroup], added: Tensor, room: Tensor) -> list[LayerGroup]:
    """Returns the groups that fit into `room` together, those with the most weights for their error first.

    `added`: squared error that each group in 8 bits adds, `[groups, images, parts]`. `room`: the largest accepted sum,
    `[images, parts]`. Synchronises.
    """
    used = (added / room).nan_to_num(0.0, posinf=float("inf")).amax((1, 2)).tolist()
    chosen: list[LayerGroup] = []
    total = torch.zeros_like(room)
    for index in sorted(range(len(groups)), key=lambda index: used[index] / groups[index].weights):
        if bool((total + added[index] <= room).all()):
            total += added[index]
            chosen.append(groups[index])
    return chosen


def layers_of(groups: Iterable[LayerGroup]) -> Layers:
    """Returns the layers of all groups."""
    return frozenset(chain.from_iterable(group.layers for group in groups))


def describe(layers: Layers) -> str:
    """Returns text such as `qkv of blocks 4-26; MLP of blocks 0-26`."""
    found = [
        f"{kind} of blocks {_ranges(sorted(block for block, layer in layers if layer is kinds[0]))}"
        for kind, kinds in _KINDS.items()
        if any(layer is kinds[0] for _, layer in layers)
    ]
    return "; ".join(found) or "no layers"


def _ranges(blocks: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    breaks = [0, *(index for index, (one, two) in enumerate(pairwise(blocks), 1) if two != one + 1), len(blocks)]
    runs = [blocks[first:end] for first, end in pairwise(breaks)]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
