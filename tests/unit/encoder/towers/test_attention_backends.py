"""Attention backends where there is no GPU: what is missing says so, and plans choose by length."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from encoder.metadata.segments import AttentionBackend, Segments
from encoder.towers.attention import attention
from encoder.towers.backends import BackendUnavailableError, load, unsupported_reason

BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize(
    ("backend", "named"),
    [
        (AttentionBackend.FLASH_ATTN, "flash-attn 2.8: pip install"),
        (AttentionBackend.FA4, "FlashAttention-4: pip install 'flash-attn-4"),
        (AttentionBackend.FA3, "vLLM for CUDA"),
    ],
)
def test_a_missing_backend_says_what_to_install(
    backend: AttentionBackend, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("flash_attn", "flash_attn.cute", "vllm.vllm_flash_attn"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    load.cache_clear()
    q = torch.zeros(4, 2, 72)
    segments = Segments(backend, torch.tensor([0, 4], dtype=torch.int32), 4)
    with pytest.raises(BackendUnavailableError, match=f"{backend.value}.* needs {named}"):
        attention(q, q, q, segments)


def test_a_package_of_the_same_name_without_the_function_is_a_missing_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4 without `flash-attn` 2.8 leaves a package `flash_attn` without its function."""
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    load.cache_clear()
    with pytest.raises(BackendUnavailableError, match=r"needs flash-attn 2.8: .*has no flash_attn_varlen_func"):
        load(AttentionBackend.FLASH_ATTN)


@pytest.mark.parametrize(
    ("backend", "module", "logsumexp"),
    [
        (AttentionBackend.FLASH_ATTN, "flash_attn", False),
        (AttentionBackend.FA4, "flash_attn.cute", True),
        (AttentionBackend.FA3, "vllm.vllm_flash_attn", False),
    ],
)
def test_a_backend_gets_the_borders_twice(
    backend: AttentionBackend, module: str, logsumexp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = torch.arange(3 * 32, dtype=BFLOAT16).view(3, 4, 2, 4)
    borders = torch.tensor([0, 4], dtype=torch.int32)
    called: dict[str, object] = {}

    def flash_attn_varlen_func(*qkv: torch.Tensor, **arguments: object) -> object:
        assert all(map(torch.equal, qkv, (q, k, v)))
        called.update(arguments)
        return (q, v) if logsumexp else q

    package = ModuleType(module)
    monkeypatch.setattr(package, "flash_attn_varlen_func", flash_attn_varlen_func, raising=False)
    monkeypatch.setitem(sys.modules, module.split(".")[0], package)
    monkeypatch.setitem(sys.modules, module, package)
    load.cache_clear()
    try:
        assert torch.equal(load(backend)(q, k, v, borders, 7), q)
    finally:
        load.cache_clear()
    assert called.pop("cu_seqlens_q") is called.pop("cu_seqlens_k") is borders
    assert called.pop("max_seqlen_q") == called.pop("max_seqlen_k") == 7
    assert called == ({"fa_version": 3} if backend is AttentionBackend.FA3 else {})


def test_dense_attention_is_no_backend_that_reads_borders() -> None:
    with pytest.raises(BackendUnavailableError, match="'sdpa' has no kernel that reads segment borders"):
        load(AttentionBackend.SDPA)


@pytest.mark.parametrize(
    ("backend", "capability", "dtype", "head_dim", "reason"),
    [
        (AttentionBackend.VARLEN, (8, 0), BFLOAT16, 72, None),
        (AttentionBackend.TRITON, (8, 0), BFLOAT16, 80, None),
        (AttentionBackend.TRITON, (9, 0), torch.float32, 72, None),
        (AttentionBackend.FA4, (9, 0), BFLOAT16, 72, None),
        (AttentionBackend.FA4, (8, 0), BFLOAT16, 72, "compute capability 8.0 is not supported"),
        (AttentionBackend.FA3, (10, 0), BFLOAT16, 72, "compute capability 10.0 is not supported"),
        (AttentionBackend.VARLEN, (7, 5), BFLOAT16, 72, "compute capability 7.5 is not supported"),
        (AttentionBackend.VARLEN, (9, 0), torch.float32, 72, "torch.float32 is not supported"),
        (AttentionBackend.TRITON, (9, 0), torch.float64, 72, "torch.float64 is not supported"),
        (AttentionBackend.VARLEN, (9, 0), BFLOAT16, 12, "head dimension 12 is not supported"),
        (AttentionBackend.TRITON, (9, 0), BFLOAT16, 8, "head dimension 8 is not supported"),
        (AttentionBackend.TRITON, (9, 0), BFLOAT16, 256, "head dimension 256 is not supported"),
        (AttentionBackend.SDPA, (9, 0), BFLOAT16, 72, "reads no borders on the device"),
    ],
)
def test_what_a_backend_is_fit_for(
    backend: AttentionBackend, capability: tuple[int, int], dtype: torch.dtype, head_dim: int, reason: str | None
) -> None:
    assert unsupported_reason(backend, capability, dtype, head_dim) == reason


def test_a_plan_chooses_by_the_bound_on_the_length() -> None:
    pytest.importorskip("triton", reason="plans stand beside Triton's kernels")
    from encoder.fused.rope_attention import AttentionKernel, AttentionPlan
    from encoder.kernels.flash import Tile

    short, middle, long = (
        AttentionKernel(AttentionBackend.TRITON, rotates=True),
        AttentionKernel(AttentionBackend.TRITON),
        AttentionKernel(AttentionBackend.FA4),
    )
    plan = AttentionPlan((64, 256), (short, middle, long))
    assert [plan.kernel(length) for length in (1, 64, 65, 256, 257, 10**6)] == [
        short,
        short,
        middle,
        middle,
        long,
        long,
    ]
    assert AttentionPlan((64, 256), (short, middle)).kernel(300) == middle
    tiled = AttentionKernel(AttentionBackend.TRITON, tile=Tile(128, 64, 8, 3))
    few = AttentionPlan(plan.lengths, plan.kernels, tiled)
    assert [few.kernel(256, rows) for rows in (256, 257, 1024, 1025, None)] == [middle, tiled, tiled, middle, middle]
    assert few.kernel(64, 512) == short, "windows keep the kernel that rotates"
    assert str(few).endswith("longer: fa4, up to 1024 rows: triton 128×64")
    assert AttentionPlan.single(long).kernel(1) == long
    assert str(plan) == "≤64: triton+rope, ≤256: triton, longer: fa4"
    for lengths, ways in (((), ()), ((64, 256, 1024), (short, middle)), ((64,), (short, middle, long))):
        with pytest.raises(ValueError, match="a kernel for every class"):
            AttentionPlan(lengths, ways)
    with pytest.raises(ValueError, match="'fa4' does not rotate"):
        AttentionKernel(AttentionBackend.FA4, rotates=True)


def test_a_draw_goes_to_the_way_of_the_class_before() -> None:
    pytest.importorskip("triton", reason="plans are for fused towers, which are made of Triton's kernels")
    from encoder.fused.attention_plan import chosen_kernels
    from encoder.fused.rope_attention import AttentionKernel

    ours, fa3, fa4 = (
        AttentionKernel(AttentionBackend.TRITON),
        AttentionKernel(AttentionBackend.FA3),
        AttentionKernel(AttentionBackend.FA4),
    )
    costs = [{ours: 92.0, fa3: 111.0, fa4: 133.0}, {ours: 170.0, fa3: 158.0, fa4: 147.0}]
    assert chosen_kernels([*costs, {ours: 367.0, fa3: 259.0, fa4: 262.0}]) == [ours, fa4, fa4]
    assert chosen_kernels([*costs, {ours: 367.0, fa3: 220.0, fa4: 262.0}]) == [ours, fa4, fa3]
    turns = AttentionKernel(AttentionBackend.TRITON, rotates=True)
    # A way that is not there for longer segments cannot be kept.
    assert chosen_kernels([{turns: 40.0, ours: 80.0}, {ours: 92.0, fa3: 91.0}]) == [turns, fa3]
