"""Attention backends behind one signature; each is imported on first use.

They take tensors and borders; `encoder.fused.attention_plan` measures which one is fastest.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from encoder.metadata.segments import AttentionBackend

_MODULES = {
    AttentionBackend.VARLEN: "torch_varlen",
    AttentionBackend.TRITON: "triton_segments",
    AttentionBackend.FLASH_ATTN: "flash_attn2",
    AttentionBackend.FA4: "flash_attn4",
    AttentionBackend.FA3: "vllm_fa3",
}
_INSTALL = {
    AttentionBackend.VARLEN: "torch 2.11 or newer, built for CUDA",
    AttentionBackend.TRITON: "triton, which torch's CUDA builds bring: pip install triton",
    AttentionBackend.FLASH_ATTN: "flash-attn 2.8: pip install --no-build-isolation 'flash-attn>=2.8,<3'",
    AttentionBackend.FA4: "FlashAttention-4: pip install 'flash-attn-4>=4.0.0b36,<5' 'nvidia-cutlass-dsl[cu13]>=4.6.2'",
    AttentionBackend.FA3: "vLLM for CUDA, whose FlashAttention-3 it is: pip install vllm",
}
# The first compute capability that is supported, and the first that no longer is (None: no upper limit).
_CAPABILITIES: dict[AttentionBackend, tuple[tuple[int, int], tuple[int, int] | None]] = {
    AttentionBackend.VARLEN: ((8, 0), None),
    AttentionBackend.TRITON: ((8, 0), None),
    AttentionBackend.FLASH_ATTN: ((8, 0), None),
    AttentionBackend.FA4: ((9, 0), (12, 0)),
    AttentionBackend.FA3: ((9, 0), (10, 0)),
}
# Smallest and largest head dimension; all are multiples of 8. A matrix product in Triton has a minimum depth.
_HEAD_DIMS: dict[AttentionBackend, tuple[int, int]] = {AttentionBackend.TRITON: (16, 128)}
_OTHERS_HEAD_DIMS = (8, 256)
# The Triton kernel computes float32 in float32; the other backends round to 16 bits.
_ANY_DTYPE = frozenset({AttentionBackend.TRITON})


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
    if backend not in _MODULES:
        raise BackendUnavailableError(f"attention backend {backend.value!r} has no kernel that reads segment borders")
    try:
        module = import_module(f"{__name__}.{_MODULES[backend]}")
    except ImportError as error:
        raise BackendUnavailableError(
            f"attention backend {backend.value!r} needs {_INSTALL[backend]} ({error})"
        ) from error
    attend: VarlenAttention = module.attend
    return attend


def unsupported_reason(
    backend: AttentionBackend, capability: tuple[int, int], dtype: torch.dtype, head_dim: int
) -> str | None:
    """Returns why `backend` does not support this device, dtype and head dimension; None if it does, once installed."""
    if backend not in _MODULES:
        return "reads no borders on the device"
    first, end = _CAPABILITIES[backend]
    if capability < first or (end is not None and capability >= end):
        return f"compute capability {capability[0]}.{capability[1]} is not supported"
    if dtype not in (torch.bfloat16, torch.float16) and not (backend in _ANY_DTYPE and dtype == torch.float32):
        return f"{dtype} is not supported"
    smallest, largest = _HEAD_DIMS.get(backend, _OTHERS_HEAD_DIMS)
    if head_dim % 8 or not smallest <= head_dim <= largest:
        return f"head dimension {head_dim} is not supported"
    return None


def check_backend(backend: AttentionBackend, dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    """Raises `BackendUnavailableError` for a backend that does not fit or is not installed; says what to install."""
    reason = unsupported_reason(backend, torch.cuda.get_device_capability(device), dtype, head_dim)
    if reason is not None:
        raise BackendUnavailableError(f"attention backend {backend.value!r}: {reason}")
    load(backend)
