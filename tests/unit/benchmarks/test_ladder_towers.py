"""The towers and batches that the encoder benchmark measures."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ladder.towers import SECTIONS, config_of, random_tower, shapes_of, unseen_grids
from encoder.checkpoint.vision_config import VisionConfig

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("arch", "tflop"),
    [("qwen3_vl", [0.166, 2.655, 5.768, 5.455, 20.634]), ("qwen2_5_vl", [0.326, 5.220, 10.568, 7.564, 29.843])],
)
def test_operations_are_those_of_the_published_table(arch: str, tflop: list[float]) -> None:
    config = config_of(arch, tiny=False, dtype="bfloat16")
    assert [round(shape.tflop, 3) for shape in shapes_of(config, tiny=False) if not shape.held_out] == tflop


def test_tower_of_qwen3_5_is_that_of_its_checkpoints() -> None:
    """Its checkpoints name no deepstack levels; with Qwen3-VL's default ones the tower would be another function."""
    published = {key: value for key, value in SECTIONS["qwen3_5"].items() if key != "deepstack_visual_indexes"}
    read = VisionConfig.from_dict({"model_type": "qwen3_5", "dtype": "bfloat16", "vision_config": published})
    assert config_of("qwen3_5", tiny=False, dtype="bfloat16") == read
    assert read.width == read.out_hidden_size


def test_a_seed_gives_one_function_in_any_dtype() -> None:
    config = config_of("qwen3_vl", tiny=True, dtype="bfloat16")
    low = random_tower(config, seed=4, dtype=torch.bfloat16, device=CPU).state_dict()
    high = random_tower(config, seed=4, dtype=torch.float32, device=CPU).state_dict()
    other = random_tower(config, seed=5, dtype=torch.float32, device=CPU).state_dict()
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(low[name].float(), high[name])
    assert not torch.equal(other[name], high[name])


def test_unseen_grids_are_new_and_all_different() -> None:
    config = config_of("qwen2_5_vl", tiny=False, dtype="bfloat16")
    known = [grid for shape in shapes_of(config, tiny=False) for grid in shape.grids]
    pool = unseen_grids(config, known, tiny=False, seed=0)
    assert len(pool) == len(set(pool)) > 6 * 6 * 8  # six ways, six batches, eight images
    assert not set(pool) & set(known)
    assert (1, 32, 32) in known
    assert (1, 32, 32) in unseen_grids(config, [], tiny=False, seed=0)
