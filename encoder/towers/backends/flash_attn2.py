"""The package `flash-attn` 2.8: FlashAttention-2, on compute capability 8.0 and up."""

from __future__ import annotations

from flash_attn import flash_attn_varlen_func
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """See `VarlenAttention`."""
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    assert isinstance(out, Tensor)
    return out
