"""Which groups of layers a tower has, and which of them fit into an error."""

from __future__ import annotations

import dataclasses
from itertools import chain

import pytest
import torch

from benchmarks.ladder.towers import config_of
from encoder.fp8.sensitivity import LayerGroup, choose_groups, describe, layer_groups
from encoder.fused.gemm import Layer

GROUPS = [LayerGroup(frozenset({(block, Layer.QKV)}), weights) for block, weights in enumerate((10, 10, 20, 10))]


@pytest.mark.parametrize("depth", [1, 3, 8, 24, 27, 32])
def test_every_layer_is_in_one_group(depth: int) -> None:
    config = dataclasses.replace(
        config_of("qwen3_vl", tiny=False, dtype="bfloat16"), depth=depth, deepstack_visual_indexes=()
    )
    groups = layer_groups(config)
    layers = list(chain.from_iterable(group.layers for group in groups))
    assert sorted(layers) == sorted((block, layer) for block in range(depth) for layer in Layer)
    assert len(groups) == 2 * min(depth, -(-depth // -(-depth // 8)))
    assert sum(group.weights for group in groups) == depth * (3 * 1152**2 + 2 * 1152 * 4304)


def chosen(added: list[list[list[float]]], room: list[list[float]]) -> list[int]:
    return [
        block
        for block, _ in chain(*(one.layers for one in choose_groups(GROUPS, torch.tensor(added), torch.tensor(room))))
    ]


def test_groups_with_the_most_weights_for_their_error_come_first() -> None:
    added = [[[3.0]], [[1.0]], [[5.0]], [[4.0]]]
    assert chosen(added, [[100.0]]) == [1, 2, 0, 3]
    assert chosen(added, [[6.0]]) == [1, 2]
    assert chosen(added, [[4.0]]) == [1, 0]
    assert chosen(added, [[0.5]]) == []


def test_no_image_and_no_part_has_more_than_its_room() -> None:
    added = [[[2.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 2.0]], [[0.0, 0.0], [0.0, 3.0]], [[0.0, 2.0], [0.0, 0.0]]]
    assert chosen(added, [[2.0, 2.0], [2.0, 4.0]]) == [2, 0, 3]
    assert chosen(added, [[2.0, 2.0], [2.0, 2.5]]) == [1, 0, 3]


def test_what_is_not_finite_is_not_chosen() -> None:
    added = [[[float("inf")]], [[1.0]], [[float("inf")]], [[0.0]]]
    assert chosen(added, [[2.0]]) == [3, 1]
    assert chosen(added, [[float("nan")]]) == []


def test_layers_as_text() -> None:
    layers = frozenset({*((block, Layer.QKV) for block in (0, 1, 2, 5)), (7, Layer.UP), (7, Layer.DOWN)})
    assert describe(layers) == "qkv of blocks 0-2, 5; MLP of blocks 7"
    assert describe(frozenset()) == "no layers"
