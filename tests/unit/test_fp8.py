"""What 8 bits are refused for, how agreement is counted, and what a tower is tried with."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.encoder_config import EncoderConfig
from encoder.fp8_tower import check_fp8
from encoder.fp8_trial import SHARES, Agreement, Fp8RefusedError, Share, agreement, rules_for, try_fp8
from encoder.geometry import Grid
from encoder.image_rules import ImageRules
from encoder.trial_images import trial_batch, trial_images
from encoder.vision_config import VisionConfig

CPU = torch.device("cpu")
FP8 = EncoderConfig(fusion=True, fp8=True)
OUT = 8


@pytest.fixture(scope="module")
def tower() -> VisionConfig:
    from benchmarks.towers import config_of

    return dataclasses.replace(config_of("qwen3_vl", tiny=True, dtype="bfloat16"), out_hidden_size=OUT)


def embeddings(config: VisionConfig, patches: Tensor, grids: list[Grid]) -> Tensor:
    """Tokens as wide as the tower's, made of the patches alone."""
    tokens = patches.unflatten(0, (-1, config.merge_unit)).mean(1)
    mixed = torch.randn(tokens.shape[1], config.width, generator=torch.Generator().manual_seed(0))
    return tokens @ mixed + torch.randn(config.width, generator=torch.Generator().manual_seed(1))


def tried(config: EncoderConfig, tower: VisionConfig, *spoils: float, rows: int = 4096) -> Agreement:
    """With narrow runs that turn the first token of the last image by one of `spoils` for each of `SHARES`, the last
    for the rest."""

    def wide(patches: Tensor, grids: list[Grid]) -> Tensor:
        return embeddings(tower, patches, grids)

    def narrow(share: Share, patches: Tensor, grids: list[Grid]) -> Tensor:
        spoil = spoils[min(SHARES.index(share), len(spoils) - 1)]
        assert patches.shape[0] >= rows
        found = embeddings(tower, patches, grids)
        first = -(grids[-1][1] * grids[-1][2] // tower.merge_unit)
        token = found[first, -OUT:]
        aside = torch.linalg.qr(torch.stack((token, torch.ones(OUT)), 1))[0][:, 1]
        found[first, -OUT:] = token + spoil * token.norm() * aside
        return found

    run, found = try_fp8(
        lambda share: partial(narrow, share),  # type: ignore[arg-type]
        wide,  # type: ignore[arg-type]
        tower,
        config,
        rules=None,
        device=CPU,
        fewest_rows=rows,
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


def test_what_is_no_number_refuses(tower: VisionConfig) -> None:
    with pytest.raises(Fp8RefusedError, match=r"is -1\.00000"):
        tried(FP8, tower, float("nan"))


def test_parts_of_the_width_and_images_count_apart() -> None:
    expected = torch.randn(6, 2 * OUT, generator=torch.Generator().manual_seed(0))
    # A part of small numbers would drown in a cosine of the whole width.
    expected[:, OUT:] *= 1e-4
    found = expected.clone()
    found[2:, OUT:] *= -1
    told = agreement(found, expected, (2, 4), OUT)
    assert told.lowest_token_cosine == pytest.approx(-1)
    assert told.lowest_image_cosine == pytest.approx(-1)
    assert agreement(expected, expected, (2, 4), OUT) == Agreement(pytest.approx(1), pytest.approx(1), 0.0)  # type: ignore[arg-type]


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
    assert rules_for(tower).patch_size == tower.patch_size
    assert rules_for(tower).factor == tower.patch_size * tower.spatial_merge_size


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
        ({"fp8": True, "fusion": False}, "fusion is False; 8 bits need fusion"),
        ({"fp8": True, "fusion": "auto", "compile_mm_encoder": True}, "beside compile_mm_encoder"),
        ({"fp8_min_token_cosine": 1.5}, r"fp8_min_token_cosine is 1\.5; a cosine lies between -1 and 1"),
        ({"fp8_min_image_cosine": float("nan")}, "fp8_min_image_cosine is nan"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderConfig(**settings)  # type: ignore[arg-type]
