"""FlashAttention-3 as packaged in vLLM, for Hopper only."""

from __future__ import annotations

from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_varlen_func


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """See `VarlenAttention`."""
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=max_seqlen,
        cu_seqlens_q=cu_seqlens,
        max_seqlen_k=max_seqlen,
        cu_seqlens_k=cu_seqlens,
        fa_version=3,
    )
    assert isinstance(out, Tensor)
    return out
