"""Attention over packed segments of different lengths behind one function.

All backends return the same result up to rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.metadata.segments import AttentionBackend, SegmentGroup, Segments


def choose_backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """Returns the eager tower's backend for this device, dtype and head dimension."""
    varlen = (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
    return AttentionBackend.VARLEN if varlen else AttentionBackend.SDPA


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """Full (non-causal) attention within each segment, scaled by 1/√head_dim.

    `q`, `k`, `v`: `[rows, heads, head_dim]`, last dimension contiguous. Returns the same shape. No synchronisation.
    Rows outside all segments are undefined. Raises `BackendUnavailableError` if the backend's package is missing.
    """
    if segments.backend is AttentionBackend.SDPA:
        assert segments.groups
        return _grouped_sdpa(q, k, v, segments.groups)
    # Imported here: only CUDA devices need it.
    from encoder.towers.backends import load

    return load(segments.backend)(q, k, v, segments.cu_seqlens, segments.max_seqlen)


def _grouped_sdpa(q: Tensor, k: Tensor, v: Tensor, groups: tuple[SegmentGroup, ...]) -> Tensor:
    if len(groups) == 1:
        return _dense(q, k, v, groups[0][0])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for length, rows in groups:
        # Indexing with a tensor is slower than `index_select` and `index_copy_` on a CPU.
        part = [tensor.index_select(0, rows) for tensor in (q, k, v)]
        out.index_copy_(0, rows, _dense(part[0], part[1], part[2], length))
    return out


def _dense(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Attention over segments of one length, rows in order, as one batch."""
    batch = [tensor.unflatten(0, (-1, length)).transpose(1, 2) for tensor in (q, k, v)]
    return F.scaled_dot_product_attention(batch[0], batch[1], batch[2]).transpose(1, 2).flatten(0, 1)
