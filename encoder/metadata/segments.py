"""Segments of packed rows, and the attention backends that read their borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from encoder.metadata.geometry import to_device


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


SegmentGroup = tuple[int, Tensor]
"""A length in rows, and the rows of all segments of that length in order, int64 `[count * length]` on the device."""


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

    def grouped(self, lengths: Sequence[int]) -> Segments:
        """Returns the same segments with groups. `lengths`: those of the segments, in order. No synchronisation."""
        return replace(self, groups=group_segments(lengths, self.cu_seqlens.device))


def group_segments(lengths: Sequence[int], device: torch.device) -> tuple[SegmentGroup, ...]:
    """Groups segments of equal length, in order of first appearance. No synchronisation."""
    starts_of: dict[int, list[int]] = {}
    start = 0
    for length in lengths:
        starts_of.setdefault(length, []).append(start)
        start += length
    return tuple(
        (length, to_device((torch.tensor(starts).unsqueeze(-1) + torch.arange(length)).flatten(), device))
        for length, starts in starts_of.items()
    )
