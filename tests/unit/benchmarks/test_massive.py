"""Towers with massive activations, planted for measurements."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from benchmarks.ladder import ladder, massive, rungs
from benchmarks.ladder.gpu_clock import Readings
from benchmarks.ladder.massive import AFTER, CHANNELS, COSINE, lowest_cosine, massive_tower, plant
from benchmarks.ladder.measure import Deadline
from benchmarks.ladder.towers import config_of, random_patches, random_tower
from configs.encoder_config import EncoderConfig
from encoder.towers.layers import Block
from tests.unit.benchmarks.test_bench_encoder import ASKED

CPU = torch.device("cpu")
GRIDS = ((1, 8, 8), (1, 6, 10))


@pytest.mark.parametrize("arch", ["qwen3_vl", "qwen2_5_vl"])
def test_a_few_channels_are_massive_and_the_others_as_before(arch: str) -> None:
    config = config_of(arch, tiny=True, dtype="bfloat16")
    patches = random_patches(config, sum(h * w for _, h, w in GRIDS), seed=1, device=CPU).float()
    plain = random_tower(config, seed=0, dtype=torch.float32, device=CPU)
    planted = copy.deepcopy(plain)
    plant(planted, 4096.0, patches, GRIDS)
    streams: list[Tensor] = []
    normed: list[Tensor] = []
    for tower in (plain, planted):
        block = tower.blocks[AFTER + 1]
        assert isinstance(block, Block)
        block.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
        block.norm1.register_forward_hook(lambda _, inputs, output: normed.append(output))
        tower(patches, tower.prepare(GRIDS))
    massive = streams[1].abs().amin(0) > 4000
    assert int(massive.sum()) == CHANNELS
    assert streams[1].abs().amax(0)[massive].max() < 4200
    for before, after in (streams, normed):
        assert float(after[:, ~massive].std() / before[:, ~massive].std()) == pytest.approx(1, rel=0.1)


def test_bfloat16_is_as_far_off_as_asked_for() -> None:
    config = config_of("qwen3_vl", tiny=True, dtype="bfloat16")
    tower = massive_tower(config, seed=0, dtype=torch.bfloat16, device=CPU)
    assert all(parameter.dtype == torch.bfloat16 for parameter in tower.parameters())
    grids = massive._GRIDS
    patches = random_patches(config, sum(h * w for _, h, w in grids), seed=0, device=CPU).float()
    assert COSINE - 0.015 < lowest_cosine(tower, tower.in_float32(), patches, grids) <= COSINE
    plain = random_tower(config, seed=0, dtype=torch.bfloat16, device=CPU)
    assert lowest_cosine(plain, plain.in_float32(), patches, grids) > 0.999


def test_too_few_blocks_are_named() -> None:
    config = dataclasses.replace(config_of("qwen3_5", tiny=True, dtype="bfloat16"), depth=2)
    with pytest.raises(ValueError, match="planted after block 1; the tower has 2 blocks"):
        massive_tower(config, seed=0, dtype=torch.bfloat16, device=CPU)


def test_weights_with_massive_activations_are_named_and_measured_beside_transformers() -> None:
    asked = dataclasses.replace(ASKED, peers=("transformers",), weights="massive", dtype=torch.bfloat16)
    record = ladder.new_record("qwen3_vl", asked)
    assert "random weights with massive activations (tiny)" in record["model"]
    ladder.Ladder(
        "qwen3_vl", asked, record, peak_tflops=1.0, deadline=Deadline(300), readings=Readings(None), save=lambda: None
    ).measure()
    cells = {row["name"]: row["cells"]["mix"] for row in record["rows"]}
    assert cells["eager"]["error"] > 0.1
    assert cells["eager"]["error_over_transformers"] == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(("limited", "limit"), [(True, 3.0), (False, 1e6)])
def test_fp8_is_limited_as_in_a_server_if_asked(monkeypatch: pytest.MonkeyPatch, limited: bool, limit: float) -> None:
    asked: list[EncoderConfig] = []

    def refuse(tower: object, config: EncoderConfig, rules: object) -> None:
        asked.append(config)
        raise ValueError("no GPU")

    monkeypatch.setattr(rungs, "choose_forward", refuse)
    with pytest.raises(rungs.RungUnavailableError, match="no GPU"):
        rungs.make_rung("fp8", None, limited=limited)  # type: ignore[arg-type]
    assert [config.fp8_max_error for config in asked] == [limit]
