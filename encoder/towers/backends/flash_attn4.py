"""FlashAttention-4 (`flash-attn-4`) for Hopper and Blackwell; compiled on first use, about 1.5 s."""

from __future__ import annotations

import os

from torch import Tensor

# Read when the package is imported; the default is off, and every process then compiles again.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

from flash_attn.cute import flash_attn_varlen_func


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """See `VarlenAttention`."""
    result = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
    )
    # Some versions also return the log-sum-exp.
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, Tensor)
    return out
