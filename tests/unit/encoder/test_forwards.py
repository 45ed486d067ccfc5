"""Which forward runs: eager, compiled or fused, by the settings and the device, and what a warning says of it."""

from __future__ import annotations

import copy

import pytest
import torch

from configs.encoder_config import EncoderConfig
from encoder import forwards
from encoder.device_errors import check_device
from encoder.forwards import TowerForward, choose_forward
from encoder.metadata.segments import AttentionBackend
from encoder.packing.run_counts import Fallback, Reason
from encoder.runner import TowerRunner
from encoder.start_check import FusionError
from encoder.towers.backends import BackendUnavailableError
from encoder.towers.tower import VisionTower


def test_compiling_leaves_the_plain_tower_as_it_was(tower: VisionTower) -> None:
    forward = choose_forward(tower, EncoderConfig(compile_mm_encoder=True))
    compiled = forward.run
    assert isinstance(compiled, torch.nn.Module)
    assert (forward.name, forward.may_compile) == ("compiled", True)
    assert not choose_forward(tower, EncoderConfig()).may_compile
    assert [block._compiled_call_impl is not None for block in compiled.blocks] == [True] * len(tower.blocks)  # type: ignore[union-attr]
    assert [block._compiled_call_impl for block in tower.blocks] == [None] * len(tower.blocks)
    ours, theirs = dict(compiled.named_parameters()), dict(tower.named_parameters())
    assert all(ours[name].data_ptr() == parameter.data_ptr() for name, parameter in theirs.items())


class CompilerError(Exception):
    """Of a kernel's compiler: derived from nothing that Python's own errors share."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CompilerError("no such instruction"), Fallback.KERNELS),
        (FusionError("no such instruction"), Fallback.DIFFERS),
        (BackendUnavailableError("no such instruction"), Fallback.BACKEND),
        (None, Fallback.UNSUPPORTED),
    ],
)
def test_without_fused_kernels_the_plain_tower_runs(
    tower: VisionTower, monkeypatch: pytest.MonkeyPatch, error: Exception | None, reason: Fallback
) -> None:
    """Nothing but a warning told that an encoder ran without them, and 2 to 9 times as slow."""
    told: list[str] = []

    def broken(*_: object) -> TowerForward:
        assert error is not None
        raise error

    unsupported = "no such instruction" if error is None else None
    monkeypatch.setattr("encoder.forwards._on_gpu", lambda tower: True)
    monkeypatch.setattr("encoder.forwards._fused_unsupported_reason", lambda tower: unsupported)
    monkeypatch.setattr("encoder.forwards._fused", broken)
    monkeypatch.setattr("encoder.forwards.logger.warning", lambda text, *values: told.append(text % values))
    runner = TowerRunner.build(choose_forward(tower, EncoderConfig()), EncoderConfig())
    assert (runner.forward.name, runner.counts.fusion_fallback) == ("eager", reason)
    assert told == ["no fused kernels: no such instruction"]


def test_attention_of_torch_runs_the_plain_tower(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all other settings at their defaults; it ended the start of an encoder on any GPU."""
    monkeypatch.setattr("encoder.forwards._on_gpu", lambda tower: True)
    forward = choose_forward(tower, config := EncoderConfig(attention_backend="sdpa"))
    assert (forward.name, forward.backend, forward.fallback) == ("eager", AttentionBackend.SDPA, None)
    monkeypatch.setattr("encoder.runner._no_graphs_reason", lambda forward, config: Reason.ATTENTION)
    assert TowerRunner.build(forward, config).forward is forward


def test_a_lost_device_is_not_gone_on_with(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward runs after an illegal access; after a missing kernel image the plain tower does."""

    def lost(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def broken(*_: object) -> TowerForward:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr("encoder.forwards._on_gpu", lambda tower: True)
    monkeypatch.setattr("encoder.forwards._fused_unsupported_reason", lambda tower: None)
    monkeypatch.setattr("encoder.forwards._fused", broken)
    assert choose_forward(tower, EncoderConfig()).name == "eager"
    monkeypatch.setattr("torch.cuda.synchronize", lost)
    monkeypatch.setattr("encoder.forwards.check_device", lambda device: check_device(torch.device("cuda")))
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        choose_forward(tower, EncoderConfig())


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [((8, 0), torch.float64, "float64"), ((7, 5), torch.bfloat16, "7.5"), ((8, 0), torch.bfloat16, None)],
)
def test_it_says_why_a_gpu_runs_no_fused_kernels(
    tower: VisionTower,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    reason: str | None,
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    found = forwards._fused_unsupported_reason(copy.deepcopy(tower).to(dtype))
    assert found is None if reason is None else reason in str(found)
