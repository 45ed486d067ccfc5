"""What a small checkpoint consists of: its config.json and the names and shapes of its tensors, as on the hub.

Two architectures, each with what makes it hard to serve. Qwen2.5-VL: windowed attention with full layers between, an
MLP width whose bf16 rows are not 16-byte aligned. Qwen3-VL: learned and interpolated positions, two deepstack levels.
Head sizes of the towers are the real ones (80 and 72). Must not know how the tensors are filled or stored.
"""

from __future__ import annotations

from typing import Any

ARCHITECTURES = ("qwen2_5_vl", "qwen3_vl")

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


def config_of(arch: str, *, vocab_size: int, token_ids: dict[str, int], dtype: str) -> Config:
    """config.json for `arch`; `token_ids` maps the special tokens to their numbers."""
    common: Config = {
        "model_type": arch,
        "dtype": dtype,
        "image_token_id": token_ids["<|image_pad|>"],
        "video_token_id": token_ids["<|video_pad|>"],
        "vision_start_token_id": token_ids["<|vision_start|>"],
        "vision_end_token_id": token_ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }
    text: Config = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "attention_dropout": 0.0,
        "eos_token_id": token_ids["<|im_end|>"],
        "pad_token_id": token_ids["<|endoftext|>"],
    }
    if arch == "qwen2_5_vl":
        # The hub's Qwen2.5-VL files keep the text settings at the top level.
        return (
            common
            | text
            | {
                "architectures": ["Qwen2_5_VLForConditionalGeneration"],
                "rope_theta": 1000000.0,
                "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
                "sliding_window": 32768,
                "use_sliding_window": False,
                "max_window_layers": 4,
                "vision_config": {
                    "model_type": "qwen2_5_vl",
                    "depth": 4,
                    "hidden_size": 160,
                    "intermediate_size": 212,
                    "num_heads": 2,
                    "in_chans": 3,
                    "out_hidden_size": 128,
                    "hidden_act": "silu",
                    "patch_size": 14,
                    "spatial_patch_size": 14,
                    "spatial_merge_size": 2,
                    "temporal_patch_size": 2,
                    "window_size": 112,
                    "fullatt_block_indexes": [1, 3],
                    "tokens_per_second": 2,
                },
            }
        )
    if arch == "qwen3_vl":
        return common | {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "text_config": text
            | {
                "model_type": "qwen3_vl_text",
                "dtype": dtype,
                "head_dim": 64,
                "attention_bias": False,
                "rope_theta": 5000000,
                "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]},
            },
            "vision_config": {
                "model_type": "qwen3_vl",
                "depth": 4,
                "hidden_size": 144,
                "intermediate_size": 288,
                "num_heads": 2,
                "in_channels": 3,
                "out_hidden_size": 128,
                "hidden_act": "gelu_pytorch_tanh",
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "num_position_embeddings": 576,
                "deepstack_visual_indexes": [0, 2],
            },
        }
    raise ValueError(f"unknown architecture {arch!r}, one of {', '.join(ARCHITECTURES)}")


def preprocessors_of(arch: str) -> tuple[Config, Config]:
    """preprocessor_config.json and video_preprocessor_config.json: at least 4 and at most 1024 tokens a picture."""
    if arch == "qwen2_5_vl":
        pixels: Config = {"min_pixels": 56 * 56, "max_pixels": 1024 * 28 * 28}
        # CLIP's statistics, which the hub's files of this architecture carry.
        mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
        patch, processor = 14, "Qwen2_5_VLProcessor"
        image_class, video_class = "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"
    else:
        pixels = {"size": {"shortest_edge": 64 * 64, "longest_edge": 1024 * 32 * 32}}
        mean, std = [0.5] * 3, [0.5] * 3
        patch, processor = 16, "Qwen3VLProcessor"
        image_class, video_class = "Qwen2VLImageProcessorFast", "Qwen3VLVideoProcessor"
    common: Config = pixels | {
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": mean,
        "image_std": std,
        "processor_class": processor,
    }
    return common | {"image_processor_type": image_class}, common | {"video_processor_type": video_class}


def shapes_of(config: Config) -> Shapes:
    """Every tensor of the checkpoint that `config` (config.json) describes, in the hub's naming of its architecture."""
    newer = config["model_type"] == "qwen3_vl"
    text = config["text_config"] if newer else config
    prefix = "model.language_model." if newer else "model."
    head_dim = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"])
    tower = _qwen3_tower if newer else _qwen25_tower
    shapes = {("model.visual." if newer else "visual.") + name: shape for name, shape in tower(config).items()}
    shapes |= {prefix + name: shape for name, shape in _language_model(text, head_dim, qk_norm=newer).items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (text["vocab_size"], text["hidden_size"])
    return shapes


def _linear(name: str, rows: int, columns: int, *, bias: bool = True) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (rows, columns)}
    return shapes | {f"{name}.bias": (rows,)} if bias else shapes


def _norm(name: str, width: int, *, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (width,)}
    return shapes | {f"{name}.bias": (width,)} if bias else shapes


def _language_model(text: Config, head_dim: int, *, qk_norm: bool) -> Shapes:
    hidden, mlp = text["hidden_size"], text["intermediate_size"]
    shapes: Shapes = {"embed_tokens.weight": (text["vocab_size"], hidden), "norm.weight": (hidden,)}
    for index in range(text["num_hidden_layers"]):
        layer = f"layers.{index}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes |= _norm(layer + name, hidden, bias=False)
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            shapes |= _linear(f"{layer}self_attn.{name}_proj", text[heads] * head_dim, hidden, bias=not qk_norm)
        if qk_norm:
            shapes |= _norm(layer + "self_attn.q_norm", head_dim, bias=False)
            shapes |= _norm(layer + "self_attn.k_norm", head_dim, bias=False)
        shapes |= _linear(layer + "self_attn.o_proj", hidden, text["num_attention_heads"] * head_dim, bias=False)
        for name in ("gate_proj", "up_proj"):
            shapes |= _linear(f"{layer}mlp.{name}", mlp, hidden, bias=False)
        shapes |= _linear(layer + "mlp.down_proj", hidden, mlp, bias=False)
    return shapes


def _qwen25_tower(config: Config) -> Shapes:
    vision = config["vision_config"]
    width, mlp, merged = vision["hidden_size"], vision["intermediate_size"], vision["hidden_size"] * 4
    patch = vision["patch_size"]
    shapes: Shapes = {
        "patch_embed.proj.weight": (width, vision["in_chans"], vision["temporal_patch_size"], patch, patch)
    }
    for index in range(vision["depth"]):
        block = f"blocks.{index}."
        shapes |= _norm(block + "norm1", width, bias=False) | _norm(block + "norm2", width, bias=False)
        shapes |= _linear(block + "attn.qkv", 3 * width, width) | _linear(block + "attn.proj", width, width)
        shapes |= _linear(block + "mlp.gate_proj", mlp, width) | _linear(block + "mlp.up_proj", mlp, width)
        shapes |= _linear(block + "mlp.down_proj", width, mlp)
    shapes |= _norm("merger.ln_q", width, bias=False) | _linear("merger.mlp.0", merged, merged)
    return shapes | _linear("merger.mlp.2", vision["out_hidden_size"], merged)


def _qwen3_tower(config: Config) -> Shapes:
    vision = config["vision_config"]
    width, mlp, merged = vision["hidden_size"], vision["intermediate_size"], vision["hidden_size"] * 4
    patch = vision["patch_size"]
    shapes: Shapes = {
        "patch_embed.proj.weight": (width, vision["in_channels"], vision["temporal_patch_size"], patch, patch),
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (vision["num_position_embeddings"], width),
    }
    for index in range(vision["depth"]):
        block = f"blocks.{index}."
        shapes |= _norm(block + "norm1", width, bias=True) | _norm(block + "norm2", width, bias=True)
        shapes |= _linear(block + "attn.qkv", 3 * width, width) | _linear(block + "attn.proj", width, width)
        shapes |= _linear(block + "mlp.linear_fc1", mlp, width) | _linear(block + "mlp.linear_fc2", width, mlp)
    levels = range(len(vision["deepstack_visual_indexes"]))
    for merger in ("merger.", *(f"deepstack_merger_list.{level}." for level in levels)):
        shapes |= _norm(merger + "norm", width if merger == "merger." else merged, bias=True)
        shapes |= _linear(merger + "linear_fc1", merged, merged)
        shapes |= _linear(merger + "linear_fc2", vision["out_hidden_size"], merged)
    return shapes
