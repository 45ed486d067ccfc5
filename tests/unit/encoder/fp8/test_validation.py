"""What 8 bits are refused for, how agreement is counted, and what a tower is tried with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.ladder.towers import config_of, random_patches, random_tower
from configs.encoder_config import EncoderConfig
from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.vision_config import VisionConfig
from encoder.fp8.calibration_images import trial_batch, trial_images
from encoder.fp8.channel_means import channel_means
from encoder.fp8.sensitivity import Layers, describe
from encoder.fp8.tower import check_fp8
from encoder.fp8.validation import (
    Agreement,
    Fp8RefusedError,
    default_rules,
    image_errors,
    try_fp8,
)
from encoder.fused.affine import Affine
from encoder.fused.gemm import Layer
from encoder.metadata.geometry import Grid
from tests.embedding_difference import Difference, compare_embeddings

CPU = torch.device("cpu")
FP8 = EncoderConfig(fused_kernels=True, fp8=True)
OUT = 8


@pytest.fixture(scope="module")
def tower() -> VisionConfig:
    return dataclasses.replace(config_of("qwen3_vl", tiny=True, dtype="bfloat16"), out_hidden_size=OUT)


def embeddings(config: VisionConfig, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Tokens as wide as the tower's, made of the patches alone."""
    tokens = patches.unflatten(0, (-1, config.merge_unit)).mean(1)
    mixed = torch.randn(tokens.shape[1], config.width, generator=torch.Generator().manual_seed(0))
    return tokens @ mixed + torch.randn(config.width, generator=torch.Generator().manual_seed(1))


def wrong(config: VisionConfig, patches: Tensor, grids: Sequence[Grid], error: float, last: float = 1.0) -> Tensor:
    """The same with an error of this size in the last part of the width of each image; `last` times for the last."""
    found = embeddings(config, patches, grids)
    images = found.split([t * h * w // config.merge_unit for t, h, w in grids])
    for image, times in zip(images, [*[1.0] * (len(grids) - 1), last], strict=True):
        part = image[:, -OUT:]
        noise = torch.randn(part.shape, generator=torch.Generator().manual_seed(2))
        part += times * error * noise * (part.norm() / noise.norm())
    return found


OWN = 0.01
"""The tower's error in bfloat16."""


def tried(
    config: EncoderConfig,
    tower: VisionConfig,
    error: float | Callable[[Layers], float],
    *,
    alone: float | None = None,
    last: float = 1.0,
) -> Agreement:
    """With narrow runs of this error, which may depend on the layers in 8 bits; `alone` where an image is run alone.
    `last`: how many times the others' the error of the last image in bfloat16 is."""

    def narrow(layers: Layers, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        found = error(layers) if callable(error) else error
        return wrong(tower, patches, grids, alone if alone is not None and len(grids) == 1 else found)

    patches, grids = trial_batch(default_rules(tower), CPU, 1)
    run, found = try_fp8(
        lambda layers: partial(narrow, layers),
        lambda patches, grids: wrong(tower, patches, grids, -OWN, last),
        embeddings(tower, patches, grids),
        tower,
        config,
        patches=patches,
        grids=grids,
    )
    assert isinstance(run, partial)
    assert [describe(layers) for layers in run.args] == [found.layers]
    return found


def test_a_tower_that_agrees_is_taken_and_its_figures_are_kept(
    tower: VisionConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = tried(FP8, tower, 0.02)
    assert found.error == pytest.approx(0.02)
    assert found.bfloat16_error == pytest.approx(OWN)
    assert found.over_bfloat16 == pytest.approx(2)
    assert "error 2.00e-02" in caplog.text
    assert "of bfloat16 1.00e-02; used" in caplog.text


def test_an_error_over_the_limit_refuses_naming_value_and_limit(tower: VisionConfig) -> None:
    with pytest.raises(
        Fp8RefusedError,
        match=r"with qkv of blocks 0-2; MLP of blocks 0-2 in 8 bits, an image's "
        r"error is 5\.00 times its error in bfloat16 \(1\.00e-02\); the limit is 3 \(fp8_max_error\)",
    ):
        tried(FP8, tower, 0.05)
    assert tried(dataclasses.replace(FP8, fp8_max_error=6), tower, 0.05).over_bfloat16 == pytest.approx(5)


def test_each_image_is_compared_with_its_own_error_in_bfloat16(tower: VisionConfig) -> None:
    """The largest of all images was the limit: beside one that is off by 0.47 in bfloat16, others that are off by 0.11
    could be off by 0.6 in fp8."""
    with pytest.raises(Fp8RefusedError, match=r"an image's error is 5\.00 times its error in bfloat16 \(1\.00e-02\)"):
        tried(FP8, tower, 0.05, last=5)
    found = tried(FP8, tower, 0.02, last=0.8)
    assert found.error == pytest.approx(0.02)
    assert found.bfloat16_error == pytest.approx(0.8 * OWN)
    assert found.over_bfloat16 == pytest.approx(2.5)


def test_a_tower_that_is_not_finite_in_bfloat16_is_no_reason_to_accept(
    tower: VisionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.encoder.fp8.test_validation.OWN", float("nan"))
    with pytest.raises(Fp8RefusedError, match="the limit is"):
        tried(FP8, tower, 0.01)


@pytest.mark.parametrize(("together", "blocks", "over"), [(1.0, "8-15", 2.99), (1.5, "12-15", 2.45)])
def test_layers_are_chosen_by_the_error_that_each_adds(
    tower: VisionConfig, together: float, blocks: str, over: float
) -> None:
    """Squares of errors add up. Where several groups add more than their sum, fewer of them are chosen."""
    deep = dataclasses.replace(tower, depth=16)

    def error(layers: Layers) -> float:
        added = sum({Layer.QKV: 20.0, Layer.UP: 12 / (1 + block), Layer.DOWN: 0.0}[layer] for block, layer in layers)
        return OWN * math.sqrt(1 + added * (together if len(layers) > 4 else 1))

    found = tried(FP8, deep, error)
    assert found.layers == f"MLP of blocks {blocks}"
    assert found.over_bfloat16 == pytest.approx(over, abs=0.01)


def test_an_image_that_differs_between_batches_refuses(tower: VisionConfig) -> None:
    """8 bits were used from some number of rows in a batch on: one digest had two embeddings, and the first was cached.
    Only batches were compared, never an image alone."""
    assert tried(FP8, tower, 0.02, alone=0.02).batch_error == 0
    assert tried(FP8, tower, 0.01, alone=0.02).error == pytest.approx(0.02), "the larger one"
    with pytest.raises(Fp8RefusedError, match=r"an image's difference between batches is (3\.9\d|4\.0\d) times"):
        tried(FP8, tower, 0.02, alone=-0.02)


@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl"])
def test_means_are_those_of_channels_with_massive_activations(arch: str) -> None:
    config = config_of(arch, tiny=True, dtype="float32")
    eager = random_tower(config, seed=0, dtype=torch.float32, device=CPU)
    grids = [(1, 4, 6), (1, 2, 8)]
    patches = random_patches(config, 40, seed=1, device=CPU).float()
    assert not channel_means(eager, patches, grids), "random weights have no such channels"
    block: Any = eager.blocks[0]
    rows: list[Tensor] = []

    def massive(_: object, inputs: object, out: Tensor) -> Tensor:
        rows.append(out + 1000 * torch.nn.functional.one_hot(torch.tensor(5), config.hidden_size))
        return rows[-1]

    block.norm1.register_forward_hook(massive)
    means = channel_means(eager, patches, grids)
    assert (0, Layer.QKV) in means
    assert means[0, Layer.QKV][5] == pytest.approx(float(rows[-1][:, 5].mean()))
    assert means[0, Layer.QKV].count_nonzero() == 1
    assert not block.attn.qkv._forward_pre_hooks


def test_a_centered_layer_is_the_same_function() -> None:
    random = torch.Generator().manual_seed(0)
    layer = Affine(torch.randn(24, 16, generator=random), torch.randn(24, generator=random))
    x, center = torch.randn(5, 16, generator=random), 100 * torch.randn(16, generator=random)
    centered = layer.centered(center)
    assert torch.allclose((x - center) @ centered.weight.T + centered.bias, x @ layer.weight.T + layer.bias, atol=1e-2)


def test_all_numbers_of_rows_are_in_8_bits_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of up to 1023 rows ran in bfloat16, and rows from attention up to 8191."""
    pytest.importorskip("triton", reason="rows are scaled by a Triton kernel")
    from encoder.fp8 import gemm as fp8_products
    from encoder.fused.gemm import CublasGemm

    def scaled_rows(x: Tensor, activation: str = "none") -> tuple[Tensor, Tensor]:
        scales = x.abs().amax(1, keepdim=True).float() / 448
        return (x / scales).to(torch.float8_e4m3fn), scales

    def product(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, bias: Tensor, **_: object) -> Tensor:
        return (a.double() * scale_a) @ (b.double() * scale_b) + (0 if bias is None else bias)

    monkeypatch.setattr(fp8_products, "scaled_rows", scaled_rows)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    random = torch.Generator().manual_seed(0)
    products = fp8_products.Fp8Gemm(CublasGemm())
    x = torch.randn(1, 32, generator=random)
    for part in Layer:
        layer = products.load(Affine(torch.randn(16, 32, generator=random), torch.zeros(16)), part, 0)
        alone = products(layer, x)
        assert not torch.equal(alone.float(), CublasGemm()(layer, x))
        for rows in (2, 1023, 1024, 8191, 8192):
            assert torch.allclose(products(layer, x.repeat(rows, 1)), alone, rtol=1e-12)


def test_what_is_no_number_refuses(tower: VisionConfig) -> None:
    with pytest.raises(Fp8RefusedError, match=r"an image's error is inf times"):
        tried(FP8, tower, float("nan"))


def test_parts_of_the_width_and_images_count_apart() -> None:
    expected = torch.randn(6, 2 * OUT, generator=torch.Generator().manual_seed(0))
    # A part of small numbers would drown in a cosine of the whole width.
    expected[:, OUT:] *= 1e-4
    found = expected.clone()
    found[2:, OUT:] *= -1
    told = compare_embeddings(found, expected, (2, 4), OUT)
    assert told.lowest_token_cosine == pytest.approx(-1)
    assert told.lowest_image_cosine == pytest.approx(-1)
    assert compare_embeddings(expected, expected, (2, 4), OUT) == Difference(pytest.approx(1), pytest.approx(1), 0.0)  # type: ignore[arg-type]
    assert told.largest_error < 1e-3
    assert image_errors(found, expected, (2, 4), OUT).tolist() == [[0, 0], [0, pytest.approx(2)]]
    assert image_errors(found * float("nan"), expected, (2, 4), OUT).tolist() == [[float("inf")] * 2] * 2


@pytest.mark.parametrize("patch_size", [14, 16])
def test_trial_images_go_through_the_rules_and_fill_the_rows(patch_size: int) -> None:
    rules = ImageRules(patch_size=patch_size, image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5))
    patches, grids = trial_batch(rules, CPU, 9000)
    assert patches.shape == (sum(t * h * w for t, h, w in grids), 3 * 2 * patch_size**2)
    assert patches.shape[0] >= 9000
    assert len(set(grids)) >= 3
    assert float(patches.min()) == pytest.approx(-1, abs=0.02)
    assert float(patches.max()) == pytest.approx(1, abs=0.02)
    again, _ = trial_batch(rules, CPU, 9000)
    assert torch.equal(patches, again)


def test_trial_images_are_of_many_kinds() -> None:
    images = [np.asarray(image, np.float32) for image in trial_images()]
    steps = [float(np.abs(np.diff(image, axis=1)).mean()) for image in images]
    assert min(steps) == 0
    assert max(steps) > 60
    assert len({round(step, 1) for step in steps}) == len(images)


def test_rules_of_a_tower_that_came_without(tower: VisionConfig) -> None:
    assert default_rules(tower).patch_size == tower.patch_size
    assert default_rules(tower).factor == tower.patch_size * tower.spatial_merge_size


def test_devices_and_dtypes_that_cannot_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"the device is cpu: it needs a GPU of compute capability 9\.0 or newer"):
        check_fp8(CPU, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"compute capability 8\.0: it needs 9\.0"):
        check_fp8(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match=r"torch\.float32: it needs dtype to be bfloat16"):
        check_fp8(torch.device("cuda"), torch.float32)
    check_fp8(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp8": True, "fused_kernels": False}, "fused_kernels is False; fp8 needs fused_kernels"),
        ({"fp8": True, "fused_kernels": "auto", "compile_mm_encoder": True}, "beside compile_mm_encoder"),
        ({"fp8": True, "attention_backend": "sdpa"}, "fp8 is true, and attention_backend is 'sdpa'"),
        (
            {"fused_kernels": True, "attention_backend": "sdpa"},
            "fused_kernels is true, and attention_backend is 'sdpa'",
        ),
        ({"fp8_max_error": 0}, "fp8_max_error is 0; it must be greater than 0"),
        ({"fp8_max_error": float("nan")}, "fp8_max_error is nan"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderConfig(**settings)  # type: ignore[arg-type]
