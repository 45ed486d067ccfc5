"""The comparison of a fused forward with float32 before it serves."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.ladder.towers import config_of
from configs.encoder_config import EncoderConfig
from encoder.metadata.device_tables import batch_metadata
from encoder.metadata.geometry import Grid
from encoder.metadata.segments import AttentionBackend
from encoder.metadata.tower_metadata import TowerMetadata
from encoder.start_check import BATCHES, FusionError, StartCheck, largest_error_on_device, rounding_tolerance

ROOT = Path(__file__).parents[3]
SIZES = [(sum(t * h * w for t, h, w in grids), max(h * w for _, h, w in grids)) for grids in BATCHES]
"""Rows and the longest segment of each batch."""


class Tower:
    """Stands in for the eager tower: a token is its patches, one after the other."""

    config = dataclasses.replace(config_of("qwen3_vl", tiny=True, dtype="float32"), patch_size=2)
    dtype, device = torch.float32, torch.device("cpu")

    def in_float32(self) -> Tower:
        return self

    def prepare(self, grids: Sequence[Grid]) -> TowerMetadata:
        return batch_metadata(grids, self.config, self.device, AttentionBackend.VARLEN)

    def __call__(self, patches: Tensor, metadata: TowerMetadata) -> Tensor:
        return patches.view(metadata.num_tokens, -1)


TOWER = Tower()


@pytest.fixture(scope="module")
def check() -> StartCheck:
    return StartCheck(TOWER)  # type: ignore[arg-type]


def wrong_where(wrong: Callable[[int, int], bool]) -> Callable[[Tensor, TowerMetadata], Tensor]:
    """As `TOWER`, but for batches whose rows and longest segment are `wrong`."""

    def run(patches: Tensor, metadata: TowerMetadata) -> Tensor:
        found = TOWER(patches, metadata)
        return found * 1.4 if wrong(metadata.num_patches, metadata.frames.max_seqlen) else found

    return run


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rows, longest: rows <= 256,
        lambda rows, longest: 256 < rows <= 512,
        lambda rows, longest: 512 < rows <= 1024,
        lambda rows, longest: 1024 < rows <= 4000,
        lambda rows, longest: 4000 < rows < 8192,
        lambda rows, longest: rows >= 8192,
        lambda rows, longest: longest <= 64 and rows <= 256,
        lambda rows, longest: longest <= 64 and rows > 1024,
        lambda rows, longest: 64 < longest <= 256 and rows > 1024,
        lambda rows, longest: 256 < longest <= 1024 and rows <= 1024,
        lambda rows, longest: 256 < longest <= 1024 and rows > 1024,
        lambda rows, longest: 1024 < longest <= 4096,
        lambda rows, longest: longest > 4096,
    ],
)
def test_a_wrong_kernel_of_any_class_is_found(check: StartCheck, wrong: Callable[[int, int], bool]) -> None:
    """Kernels for up to 256 rows, for more than 1024 and for long or short segments were used without a comparison:
    the start-up check ran one batch of 600 rows in segments of up to 320."""
    run = wrong_where(wrong)
    errors = check.errors(lambda patches, grids: run(patches, TOWER.prepare(grids)))
    assert [(one.num_patches, one.max_seqlen) for one in errors] == SIZES
    expected = [pytest.approx(0.4, rel=1e-3) if wrong(*size) else 0 for size in SIZES]
    assert [one.error for one in errors] == expected
    with pytest.raises(FusionError, match=r"by 4\.00e-01, .* by up to 0\.00e\+00; the limit is 1\.00e-02, on"):
        check(lambda patches, grids: run(patches, TOWER.prepare(grids)), 1e-2)


@pytest.mark.parametrize("wrong", [None, lambda rows, longest: longest > 4096])
def test_a_fused_forward_is_checked_as_it_serves(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[int, int], bool] | None
) -> None:
    """A fused forward that was wrong for images of more than 4096 patches alone was taken."""
    pytest.importorskip("triton", reason="the fused towers are made of Triton's kernels")
    from encoder.forwards import _fused
    from encoder.fused.rope_attention import AttentionKernel, AttentionPlan
    from encoder.metadata.expand import expand

    class Fused:
        attention_plan = AttentionPlan.single(AttentionKernel(AttentionBackend.VARLEN))
        __call__ = staticmethod(wrong_where(wrong or (lambda rows, longest: False)))
        into = staticmethod(lambda *_: None)
        compile_kernels = staticmethod(lambda batches: None)

    monkeypatch.setattr("encoder.metadata.expand_kernel.expand", expand)
    monkeypatch.setattr("encoder.fused.tower.fuse", lambda *_: Fused())
    if wrong is None:
        assert _fused(TOWER, EncoderConfig(), None).name == "fused"  # type: ignore[arg-type]
    else:
        with pytest.raises(FusionError, match="segments of up to 5472"):
            _fused(TOWER, EncoderConfig(), None)  # type: ignore[arg-type]


def test_no_number_is_no_agreement() -> None:
    found = torch.ones(4, 2)
    found[3] = float("nan")
    assert largest_error_on_device(found, torch.ones(4, 2), (3, 1)) == float("inf")


class Rounded(Tower):
    """In bfloat16, off by `error` for batches of up to 256 rows."""

    dtype = torch.bfloat16

    def __init__(self, error: float) -> None:
        self.error = error

    def in_float32(self) -> Tower:
        return TOWER

    def __call__(self, patches: Tensor, metadata: TowerMetadata) -> Tensor:
        return super().__call__(patches, metadata) * (1 + self.error * (metadata.num_patches <= 256))


@pytest.mark.parametrize(("own", "limit"), [(0.01, 0.04), (0.17, 0.34)])
def test_a_forward_may_be_off_by_twice_the_eager_towers_own_error(own: float, limit: float) -> None:
    """With massive activations bfloat16 is off by 0.17 from float32, and two bfloat16 forwards by over 0.2 from one
    another; the limit was on their difference, so that such checkpoints ran eagerly."""
    check = StartCheck(Rounded(own))  # type: ignore[arg-type]
    assert check.eager_error == pytest.approx(own, rel=1e-3)
    assert check.tolerance == pytest.approx(limit, rel=1e-3)
    for error in (-0.9 * limit, 0.9 * limit, 1.1 * limit):
        errors = check.errors(lambda patches, grids: (1 + error) * TOWER(patches, TOWER.prepare(grids)))  # noqa: B023
        assert [one.error for one in errors] == pytest.approx([abs(error)] * len(SIZES), rel=1e-3)
    with pytest.raises(FusionError, match="the limit is"):
        check(lambda patches, grids: (1 + error) * TOWER(patches, TOWER.prepare(grids)))


def test_the_limit_is_that_of_each_class_and_never_that_of_anything() -> None:
    check = StartCheck(Rounded(0.17))  # type: ignore[arg-type]
    wrong = wrong_where(lambda rows, longest: rows > 256)
    with pytest.raises(FusionError, match=r"by 4\.00e-01, .*; the limit is 4\.00e-02, on a batch of 480 patches"):
        check(lambda patches, grids: wrong(patches, TOWER.prepare(grids)))
    useless = StartCheck(Rounded(0.9))  # type: ignore[arg-type]
    assert useless.tolerance == 0.7
    with pytest.raises(FusionError, match=r"by 1\.00e\+00, .*; the limit is 7\.00e-01, on a batch of 232 patches"):
        useless(lambda patches, grids: torch.zeros_like(TOWER(patches, TOWER.prepare(grids))))


def test_no_number_of_the_eager_tower_excuses_none_of_the_fused_one() -> None:
    check = StartCheck(Rounded(float("nan")))  # type: ignore[arg-type]
    with pytest.raises(FusionError, match=r"by inf, the eager tower by up to inf; the limit is 7\.00e-01"):
        check(lambda patches, grids: float("nan") * TOWER(patches, TOWER.prepare(grids)))


def test_float32_allows_little(check: StartCheck) -> None:
    assert check.tolerance == 1e-3
    assert rounding_tolerance(TOWER) == 1e-3  # type: ignore[arg-type]


def test_batches_lie_on_both_sides_of_every_bound_that_kernels_change_at() -> None:
    rows, longest = zip(*SIZES, strict=True)
    for path, name in (
        ("encoder/kernels/tiles.py", "_FEW_ROWS"),
        ("encoder/fused/tower.py", "_MOST_ROWS_BESIDE"),
        ("encoder/fused/gemm_tiles.py", "FEW_ROWS"),
        ("encoder/fused/gemm_tiles.py", "_MORE_ROWS"),
        ("encoder/fused/gemm_tiles.py", "_MOST_ODD_ROWS"),
    ):
        bound = constant(path, name)
        assert isinstance(bound, int)
        assert min(rows) < bound < max(rows), (path, name)
    classes = constant("encoder/fused/attention_plan.py", "_CLASSES")
    assert isinstance(classes, dict)
    for low, high in zip([0, *classes], [*classes, 10**6], strict=True):
        assert any(low < each <= high for each in longest), (low, high)
    # Triton compiles apart for numbers that are multiples of 16.
    assert {each % 16 == 0 for each in rows if each <= 1024} == {each % 16 == 0 for each in rows if each > 1024}


def constant(path: str, name: str) -> object:
    """Of a module that may not be importable here."""
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = value.elts if isinstance(value, ast.Tuple) else [value]
            for one, literal in zip(names, values, strict=False):
                if isinstance(one, ast.Name) and one.id == name:
                    return ast.literal_eval(literal)
    raise AssertionError(f"{path} has no {name}")
