"""The forward pass over packed batches: transformers' Qwen3-VL modules, without its loops over pictures.

The same arithmetic as the model's own forward, which a test compares, at fixed shapes, so that it can be compiled. Must
not know where batches come from.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from training.batches import Batch, Limits

Untyped = Any  # a module of transformers, whose parts mypy does not see

# What asks for causal attention: a window in later versions of torch, a switch in earlier ones.
_CAUSAL: dict[str, Any] = (
    {"window_size": (-1, 0)} if "window_size" in signature(varlen_attn).parameters else {"is_causal": True}
)


def attend(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, causal: bool) -> Tensor:
    """Attention within segments; `[tokens, heads, width]` in and out, fewer heads for keys and values allowed."""
    if query.is_cuda:
        copies = query.shape[1] // key.shape[1]
        q, k, v = (t.to(torch.bfloat16) for t in (query, _repeat(key, copies), _repeat(value, copies)))
        mixed = varlen_attn(q, k, v, borders, borders, longest, longest, **(_CAUSAL if causal else {}))
        assert isinstance(mixed, Tensor)
        return mixed
    pieces = []
    edges = borders.unique().tolist()
    for start, end in pairwise(edges):
        q, k, v = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


def _repeat(heads: Tensor, copies: int) -> Tensor:
    return heads.repeat_interleave(copies, 1) if copies > 1 else heads


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x: [tokens, heads, width]`, `cos`, `sin`: `[tokens, width]`."""
    first, second = x.float().chunk(2, -1)
    return x.float() * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def vision_block(block: Untyped, x: Tensor, cos: Tensor, sin: Tensor, borders: Tensor, longest: int) -> Tensor:
    attention = block.attn
    qkv = attention.qkv(block.norm1(x)).view(len(x), 3, attention.num_heads, -1)
    query, key = _rotated(qkv[:, 0], cos, sin), _rotated(qkv[:, 1], cos, sin)
    mixed = attend(query, key, qkv[:, 2], borders, longest, False)
    x = x + attention.proj(mixed.reshape(len(x), -1))
    out: Tensor = x + block.mlp(block.norm2(x))
    return out


def text_layer(layer: Untyped, x: Tensor, cos: Tensor, sin: Tensor, borders: Tensor, longest: int) -> Tensor:
    attention = layer.self_attn
    normed = layer.input_layernorm(x)
    heads = (len(x), -1, attention.head_dim)
    query = _rotated(attention.q_norm(attention.q_proj(normed).view(heads)), cos, sin)
    key = _rotated(attention.k_norm(attention.k_proj(normed).view(heads)), cos, sin)
    mixed = attend(query, key, attention.v_proj(normed).view(heads), borders, longest, True)
    x = x + attention.o_proj(mixed.reshape(len(x), -1))
    out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out


class PackedModel(nn.Module):
    """Holds transformers' model and runs it over batches; `compiled` fuses each layer."""

    def __init__(self, model: Untyped, limits: Limits, *, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self.limits = limits
        wrap: Callable[..., Any] = torch.compile if compiled else lambda function: function
        self._vision_block, self._text_layer = wrap(vision_block), wrap(text_layer)
        self._merge = wrap(lambda merger, x: merger(x))
        self._loss = wrap(_loss)

    def pictures(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """`[tokens, width]` of all pictures, and the same of each deepstack level."""
        visual = self.model.model.visual
        pixels = batch["patches"].float() / 127.5 - 1
        x = F.linear(pixels, visual.patch_embed.proj.weight.flatten(1), visual.patch_embed.proj.bias).float()
        # As a product: the gradient of a lookup would add up a quarter million rows into 256.
        table = visual.pos_embed.weight
        between = batch["tap_weights"].new_zeros(len(x), len(table)).scatter_add(1, batch["taps"], batch["tap_weights"])
        x = x + between @ table
        cos, sin = visual.rotary_pos_emb(x, batch["places"])
        levels: list[Tensor] = []
        for index, block in enumerate(visual.blocks):
            x = self._vision_block(block, x, cos, sin, batch["picture_borders"], self.limits.picture_patches)
            if index in visual.deepstack_visual_indexes:
                levels.append(self._merge(visual.deepstack_merger_list[len(levels)], x))
        return self._merge(visual.merger, x), levels

    def hidden(self, batch: Batch) -> Tensor:
        """`[tokens, width]` after the last norm."""
        embeds, levels = self.pictures(batch)
        language, places = self.model.model.language_model, batch["picture_places"]
        x = language.embed_tokens(batch["ids"])
        x = x.index_copy(0, places, embeds.to(x.dtype))
        cos, sin = language.rotary_emb(x[None], batch["positions"].T[:, None])
        for index, layer in enumerate(language.layers):
            borders, longest = batch["conversation_borders"], self.limits.conversation_tokens
            x = self._text_layer(layer, x, cos[0].float(), sin[0].float(), borders, longest)
            if index < len(levels):
                x = x.index_add(0, places, levels[index].to(x.dtype))
        normed: Tensor = language.norm(x)
        return normed

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean loss over the labels, and for each label whether it is the likeliest token, `[labels]`."""
        chosen = self.hidden(batch)[batch["label_places"]]
        loss, right = self._loss(chosen, self.model.model.language_model.embed_tokens.weight, batch["labels"])
        return loss, right


def _loss(hidden: Tensor, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, embeddings).float()
    return F.cross_entropy(logits, labels, ignore_index=-100), logits.argmax(-1) == labels
