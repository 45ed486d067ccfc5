"""Attention backends behind one signature; each is imported on first use.

They take tensors and borders; `encoder.fused.attention_plan` measures which one is fastest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from encoder.metadata.segments import AttentionBackend


@dataclass(frozen=True)
class _Backend:
    """A function that computes attention, and what it supports."""

    module: str
    install: str
    """Package that brings the module."""
    function: str = "flash_attn_varlen_func"
    borders: tuple[str, ...] = ("cu_seqlens_q", "cu_seqlens_k")
    """Arguments that take the segments' borders."""
    longest: tuple[str, ...] = ("max_seqlen_q", "max_seqlen_k")
    """Arguments that take the longest segment."""
    options: Mapping[str, object] = field(default_factory=dict)
    capabilities: tuple[tuple[int, int], tuple[int, int] | None] = ((8, 0), None)
    """First compute capability that is supported, and first that no longer is (None: no upper limit)."""
    head_dims: tuple[int, int] = (8, 256)
    """Smallest and largest head dimension; all are multiples of 8."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)


_BACKENDS = {
    AttentionBackend.VARLEN: _Backend(
        "torch.nn.attention.varlen",
        "torch 2.11 or newer, built for CUDA",
        "varlen_attn",
        borders=("cu_seq_q", "cu_seq_k"),
        longest=("max_q", "max_k"),
    ),
    AttentionBackend.TRITON: _Backend(
        "encoder.towers.triton_segments",
        "triton, which torch's CUDA builds bring: pip install triton",
        "attend",
        borders=("cu_seqlens",),
        longest=("max_seqlen",),
        head_dims=(16, 128),  # a matrix product in Triton has a minimum depth
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
    ),
    AttentionBackend.FLASH_ATTN: _Backend(
        "flash_attn", "flash-attn 2.8: pip install --no-build-isolation 'flash-attn>=2.8,<3'"
    ),
    AttentionBackend.FA4: _Backend(
        "flash_attn.cute",
        "FlashAttention-4: pip install 'flash-attn-4>=4.0.0b36,<5' 'nvidia-cutlass-dsl[cu13]>=4.6.2' "
        "'quack-kernels>=0.6.4,<0.7'",
        capabilities=((9, 0), (12, 0)),
    ),
    AttentionBackend.FA3: _Backend(
        "vllm.vllm_flash_attn",
        "vLLM for CUDA, whose FlashAttention-3 it is: pip install vllm",
        options={"fa_version": 3},
        capabilities=((9, 0), (10, 0)),
    ),
}


class VarlenAttention(Protocol):
    """Full attention within packed segments, scaled by 1/√head_dim.

    `q`, `k`, `v`: `[rows, heads, head_dim]`, the heads of a row contiguous; `cu_seqlens`: int32 `[segments + 1]` on the
    device; `max_seqlen`: the longest segment or a bound on it. Returns `[rows, heads, head_dim]`. Rows outside all
    segments are undefined in the result, but must be finite in the inputs, since kernels read past a segment's end and
    multiply the values there by zero.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor: ...


class BackendUnavailableError(RuntimeError):
    """A requested attention backend is not available here; the message says why, or what to install."""


@cache
def load(backend: AttentionBackend) -> VarlenAttention:
    """Imports a backend and returns its function. Raises `BackendUnavailableError` if its package is missing."""
    if backend not in _BACKENDS:
        raise BackendUnavailableError(f"attention backend {backend.value!r} has no kernel that reads segment borders")
    row = _BACKENDS[backend]
    # FlashAttention-4 reads it when it is imported; the default is off, and every process then compiles again.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    try:
        module = import_module(row.module)
        if not hasattr(module, row.function):  # another package of that name
            raise ImportError(f"{row.module} has no {row.function}")
    except ImportError as error:
        raise BackendUnavailableError(f"attention backend {backend.value!r} needs {row.install} ({error})") from error
    function = getattr(module, row.function)

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        borders, longest = dict.fromkeys(row.borders, cu_seqlens), dict.fromkeys(row.longest, max_seqlen)
        result = function(q, k, v, **borders, **longest, **row.options)
        # Some versions of FlashAttention-4 also return the log-sum-exp.
        out = result[0] if isinstance(result, tuple) else result
        assert isinstance(out, Tensor)
        return out

    return attend


def unsupported_reason(
    backend: AttentionBackend, capability: tuple[int, int], dtype: torch.dtype, head_dim: int
) -> str | None:
    """Returns why `backend` does not support this device, dtype and head dimension; None if it does, once installed."""
    if backend not in _BACKENDS:
        return "reads no borders on the device"
    row = _BACKENDS[backend]
    first, end = row.capabilities
    if capability < first or (end is not None and capability >= end):
        return f"compute capability {capability[0]}.{capability[1]} is not supported"
    if dtype not in row.dtypes:
        return f"{dtype} is not supported"
    if head_dim % 8 or not row.head_dims[0] <= head_dim <= row.head_dims[1]:
        return f"head dimension {head_dim} is not supported"
    return None


def check_backend(backend: AttentionBackend, dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    """Raises `BackendUnavailableError` for a backend that does not fit or is not installed; says what to install."""
    reason = unsupported_reason(backend, torch.cuda.get_device_capability(device), dtype, head_dim)
    if reason is not None:
        raise BackendUnavailableError(f"attention backend {backend.value!r}: {reason}")
    load(backend)
