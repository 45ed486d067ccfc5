"""What 8 bits are refused for, how agreement is counted, and what a tower is tried with."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.encoder_config import EncoderConfig
from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.vision_config import VisionConfig
from encoder.fp8.calibration_images import trial_batch, trial_images
from encoder.fp8.tower import check_fp8
from encoder.fp8.validation import SHARES, Agreement, Fp8RefusedError, Share, compare_embeddings, default_rules, try_fp8
from encoder.metadata.geometry import Grid

CPU = torch.device("cpu")
FP8 = EncoderConfig(fused_kernels=True, fp8=True)
OUT = 8


@pytest.fixture(scope="module")
def tower() -> VisionConfig:
    from benchmarks.ladder.towers import config_of

    return dataclasses.replace(config_of("qwen3_vl", tiny=True, dtype="bfloat16"), out_hidden_size=OUT)


def embeddings(config: VisionConfig, patches: Tensor, grids: list[Grid]) -> Tensor:
    """Tokens as wide as the tower's, made of the patches alone."""
    tokens = patches.unflatten(0, (-1, config.merge_unit)).mean(1)
    mixed = torch.randn(tokens.shape[1], config.width, generator=torch.Generator().manual_seed(0))
    return tokens @ mixed + torch.randn(config.width, generator=torch.Generator().manual_seed(1))


def tried(config: EncoderConfig, tower: VisionConfig, *spoils: float, alone: float | None = None) -> Agreement:
    """With narrow runs that turn the first token of each image by one of `spoils` for each of `SHARES`, the last for
    the rest; by `alone` where an image is run alone."""

    def wide(patches: Tensor, grids: list[Grid]) -> Tensor:
        return embeddings(tower, patches, grids)

    def narrow(share: Share, patches: Tensor, grids: list[Grid]) -> Tensor:
        spoil = spoils[min(SHARES.index(share), len(spoils) - 1)]
        if alone is not None and len(grids) == 1:
            spoil = alone
        found = embeddings(tower, patches, grids)
        for image in found.split([t * h * w // tower.merge_unit for t, h, w in grids]):
            token = image[0, -OUT:].clone()
            aside = torch.linalg.qr(torch.stack((token, torch.ones(OUT)), 1))[0][:, 1]
            # Of one sign, whatever batch the token is in.
            image[0, -OUT:] = token + spoil * token.norm() * aside * aside[0].sign()
        return found

    run, found = try_fp8(
        lambda share: partial(narrow, share),
        wide,  # type: ignore[arg-type]
        tower,
        config,
        rules=None,
        device=CPU,
    )
    assert isinstance(run, partial)
    assert [str(share) for share in run.args] == [found.share]
    return found


def test_a_tower_that_agrees_is_taken_and_its_figures_are_kept(
    tower: VisionConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = tried(FP8, tower, 0.1)
    # cos(arctan(0.1)): only a part of the token's width was turned, and counts by itself.
    assert found.lowest_token_cosine == pytest.approx(1.01**-0.5, abs=1e-4)
    assert 0.999 < found.lowest_image_cosine < 1
    assert f"{found.lowest_token_cosine:.5f}" in caplog.text


def test_one_token_under_the_limit_refuses_naming_value_and_limit(tower: VisionConfig) -> None:
    with pytest.raises(
        Fp8RefusedError, match=r"cosine of a token .* is 0\.95[0-9]+; the limit is 0\.99 \(fp8_min_token"
    ):
        tried(FP8, tower, 0.3)
    allowed = dataclasses.replace(FP8, fp8_min_token_cosine=0.9, fp8_min_image_cosine=0.9)
    assert tried(allowed, tower, 0.3).lowest_token_cosine < 0.99


def test_the_largest_share_that_agrees_is_taken(tower: VisionConfig) -> None:
    for place, share in enumerate(SHARES):
        found = tried(FP8, tower, *[0.3] * place, 0.1)
        assert found.share == str(share)
        assert found.lowest_token_cosine > 0.99
    assert [share.first_block(27) for share in SHARES] == [0, 4, 7, 4, 7, 14]


def test_an_image_under_the_limit_refuses(tower: VisionConfig) -> None:
    config = dataclasses.replace(FP8, fp8_min_token_cosine=0.0, fp8_min_image_cosine=1.0)
    with pytest.raises(Fp8RefusedError, match=r"cosine of an image .* the limit is 1\.0 \(fp8_min_image_cosine\)"):
        tried(config, tower, 0.5)


def test_an_image_that_differs_between_batches_refuses(tower: VisionConfig) -> None:
    """8 bits were used from some number of rows in a batch on: one digest had two embeddings, and the first was cached.
    Only batches were compared with bfloat16, never an image alone."""
    assert tried(FP8, tower, 0.1, alone=0.1).lowest_token_cosine > 0.99
    with pytest.raises(Fp8RefusedError, match=r"cosine of a token with the same image alone is 0\.9[0-9]+; the limit"):
        tried(FP8, tower, 0.1, alone=-0.1)


def test_all_numbers_of_rows_are_in_8_bits_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of up to 1023 rows ran in bfloat16, and rows from attention up to 8191."""
    pytest.importorskip("triton", reason="rows are scaled by a Triton kernel")
    from encoder.fp8 import gemm as fp8_products
    from encoder.fused.affine import Affine
    from encoder.fused.gemm import CublasGemm, Layer

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
    with pytest.raises(Fp8RefusedError, match=r"is -1\.00000"):
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
    assert compare_embeddings(expected, expected, (2, 4), OUT) == Agreement(pytest.approx(1), pytest.approx(1), 0.0)  # type: ignore[arg-type]


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
        ({"fp8_min_token_cosine": 1.5}, r"fp8_min_token_cosine is 1\.5; a cosine lies between -1 and 1"),
        ({"fp8_min_image_cosine": float("nan")}, "fp8_min_image_cosine is nan"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderConfig(**settings)  # type: ignore[arg-type]
