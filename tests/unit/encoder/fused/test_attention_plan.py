"""Attention kernels are measured on the device; one that does not run there is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from encoder.fused import attention_plan
from encoder.fused.attention_plan import measure_backends
from encoder.fused.rope_attention import AttentionKernel
from encoder.metadata.segments import AttentionBackend
from encoder.towers.backends import BackendUnavailableError

CPU = torch.device("cpu")
INSTALLED = (AttentionBackend.TRITON, AttentionBackend.VARLEN, AttentionBackend.FLASH_ATTN)


def measure(monkeypatch: pytest.MonkeyPatch, *broken: AttentionBackend) -> tuple[set[AttentionBackend], list[str]]:
    """Returns the backends of the plan, and the warnings. FlashAttention would be the fastest."""

    def microseconds(kernel: AttentionKernel, *_: int, **__: Any) -> float:
        if kernel.backend in broken:
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
        return 10.0 - INSTALLED.index(kernel.backend)

    told: list[str] = []
    monkeypatch.setattr(attention_plan, "_available", lambda kernel, *_: kernel.backend in INSTALLED)
    monkeypatch.setattr(attention_plan, "_microseconds", microseconds)
    monkeypatch.setattr(attention_plan.logger, "warning", lambda text, *values: told.append(text % values))
    plan = measure_backends(4, 80, torch.bfloat16, CPU)
    return {kernel.backend for kernel in plan.kernels}, told


def test_a_package_without_kernels_for_the_gpu_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tower ran eagerly, though other kernels would have worked."""
    assert measure(monkeypatch) == ({AttentionBackend.FLASH_ATTN}, [])
    backends, told = measure(monkeypatch, AttentionBackend.FLASH_ATTN)
    assert backends == {AttentionBackend.VARLEN}
    (warning,) = told
    assert warning.startswith("attention is computed without flash_attn")
    assert "no kernel image" in warning


def test_without_any_kernel_that_runs_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match="no attention backend for"):
        measure(monkeypatch, *INSTALLED)
