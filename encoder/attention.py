"""Attention over packed segments of different lengths, behind one function.

It knows tensors and segment borders, not grids, windows or layers. Every backend gives the same result up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor


class AttentionBackend(StrEnum):
    """`SDPA`: one dense call per segment length. The others: one kernel that reads the borders on the device.

    Those are torch's own (FlashAttention-2), ours, `flash-attn` 2.8, FlashAttention-4, and vLLM's FlashAttention-3.
    """

    VARLEN = "varlen"
    SDPA = "sdpa"
    TRITON = "triton"
    FLASH_ATTN = "flash_attn"
    FA4 = "fa4"
    FA3 = "fa3"


@dataclass(frozen=True)
class BackendChoice:
    """The backend for a device and dtype, and why it is not the device's fast one (None where it is)."""

    backend: AttentionBackend
    fallback: str | None = None


@dataclass(frozen=True)
class SegmentGroup:
    """`count` segments of one length. Their rows are neighbours from `start` on, or `rows` lists them.

    `rows`: int64 `[count * length]` on the device of the queries, or None.
    """

    length: int
    count: int
    start: int
    rows: Tensor | None


@dataclass(frozen=True)
class Segments:
    """How packed rows are cut into segments that attend within themselves.

    `cu_seqlens`: int32 `[segments + 1]` on the device; `max_seqlen`: the longest segment or a bound on it.
    `groups`: the same cut by length, for the SDPA backend alone; empty for the others.
    """

    backend: AttentionBackend
    cu_seqlens: Tensor
    max_seqlen: int
    groups: tuple[SegmentGroup, ...] = ()


def choose_backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> BackendChoice:
    """The backend for this device and dtype. A choice with a `fallback` is one to count and to show."""
    if device.type != "cuda":
        return BackendChoice(AttentionBackend.SDPA)
    if dtype not in (torch.bfloat16, torch.float16):
        return BackendChoice(AttentionBackend.SDPA, f"no variable-length kernel for {dtype}")
    if head_dim % 8 or head_dim > 256:
        return BackendChoice(AttentionBackend.SDPA, f"no variable-length kernel for head dimension {head_dim}")
    if torch.cuda.get_device_capability(device) < (8, 0):
        return BackendChoice(AttentionBackend.SDPA, "no variable-length kernel before compute capability 8.0")
    return BackendChoice(AttentionBackend.VARLEN)


def group_segments(lengths: Sequence[int]) -> tuple[SegmentGroup, ...]:
    """Segments of equal length together, in order of first appearance; `rows` on the host."""
    starts_of: dict[int, list[int]] = {}
    start = 0
    for length in lengths:
        starts_of.setdefault(length, []).append(start)
        start += length
    groups = []
    for length, starts in starts_of.items():
        neighbours = starts[-1] - starts[0] == (len(starts) - 1) * length
        rows = None if neighbours else (torch.tensor(starts).unsqueeze(-1) + torch.arange(length)).reshape(-1)
        groups.append(SegmentGroup(length, len(starts), starts[0], rows))
    return tuple(groups)


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """Full (not causal) attention within each segment, scaled by 1/√head_dim.

    `q`, `k`, `v`: `[rows, heads, head_dim]`, last dimension contiguous. Returns the same shape. No synchronisation.
    Rows of no segment come out as anything. Raises `BackendUnavailableError` if the backend's package is not there.
    """
    if segments.backend is AttentionBackend.SDPA:
        return _grouped_sdpa(q, k, v, segments.groups)
    # Imported here: a device without CUDA has no use for it.
    from encoder.attention_backends import load

    return load(segments.backend)(q, k, v, segments.cu_seqlens, segments.max_seqlen)


def _grouped_sdpa(q: Tensor, k: Tensor, v: Tensor, groups: tuple[SegmentGroup, ...]) -> Tensor:
    if len(groups) == 1:
        return _dense(q, k, v, groups[0])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for group in groups:
        if group.rows is None:
            end = group.start + group.count * group.length
            part = [tensor[group.start : end] for tensor in (q, k, v)]
            out[group.start : end] = _dense(part[0], part[1], part[2], group)
        else:
            part = [tensor.index_select(0, group.rows) for tensor in (q, k, v)]
            out.index_copy_(0, group.rows, _dense(part[0], part[1], part[2], group))
    return out


def _dense(q: Tensor, k: Tensor, v: Tensor, group: SegmentGroup) -> Tensor:
    """Segments of one length, rows in order, as a batch."""
    batch = [tensor.view(group.count, group.length, *tensor.shape[1:]).transpose(1, 2) for tensor in (q, k, v)]
    return F.scaled_dot_product_attention(batch[0], batch[1], batch[2]).transpose(1, 2).flatten(0, 1)
