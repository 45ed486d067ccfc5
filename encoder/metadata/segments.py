"""Segments of packed rows, and the attention backends that read their borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class AttentionBackend(StrEnum):
    """Attention kernels. `SDPA` makes one dense call per segment length; the others read the borders on the device.

    `VARLEN` is torch's FlashAttention-2, `TRITON` this project's kernel, `FLASH_ATTN` the package `flash-attn` 2.8,
    `FA4` FlashAttention-4, and `FA3` vLLM's FlashAttention-3.
    """

    VARLEN = "varlen"
    SDPA = "sdpa"
    TRITON = "triton"
    FLASH_ATTN = "flash_attn"
    FA4 = "fa4"
    FA3 = "fa3"


@dataclass(frozen=True)
class SegmentGroup:
    """`count` segments of one length. Their rows are contiguous from `start`, or `rows` lists them.

    `rows`: int64 `[count * length]` on the device of the queries, or None.
    """

    length: int
    count: int
    start: int
    rows: Tensor | None


@dataclass(frozen=True)
class Segments:
    """Segments of packed rows; rows attend within their segment.

    `cu_seqlens`: int32 `[segments + 1]` on the device; `max_seqlen`: the longest segment or a bound on it. `groups`:
    the segments grouped by length, for the SDPA backend only; empty for the others.
    """

    backend: AttentionBackend
    cu_seqlens: Tensor
    max_seqlen: int
    groups: tuple[SegmentGroup, ...] = ()


def group_segments(lengths: Sequence[int]) -> tuple[SegmentGroup, ...]:
    """Groups segments of equal length, in order of first appearance; `rows` is on the host."""
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
