"""Checkpoints of architectures whose language model is DeepSeek's: experts, and latent attention or plain attention."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.models.checkpoints import HALF, VISION, Draft, Shapes, prefix

# The only sizes that vLLM's decode kernel for CPUs is compiled for.
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
EXPERTS = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "topk_method": "noaux_tc",
}
ENGINE_ARGS = {"attention_backend": "CPU_MLA"}
"""Without it, vLLM takes a kernel for bfloat16 where the CPU has AMX."""
KIMI_VL_PROCESSOR = Path(__file__).with_name("kimi_vl_processor.py")


def _with_bias(name: str, *shape: int) -> Shapes:
    """Returns the tensors of a linear layer, a convolution, or a layer norm."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _as_released(name: str) -> str:
    """transformers' names for saving differ from those of the released checkpoint."""
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.").removeprefix("model.")
    return name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")


def kimi_k25(to: Draft) -> None:
    """MoonViT; images and parts of videos are one modality."""
    from transformers import DeepseekV3Config, Kimi_K25Config, Kimi_K25ForConditionalGeneration

    special = ["<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>", "<|video|>"]
    to.tokens(*special, image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>")
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Kimi_K25Config(
        text_config=DeepseekV3Config(**to.text(**EXPERTS, **LATENT), tie_word_embeddings=False),
        vision_config={**vision, "pos_emb_height": 16, "pos_emb_width": 16},
        projection_hidden_size=64,
        image_token_id=to.id("<|media_pad|>"),
        video_token_id=to.id("<|video|>"),
        vision_start_token_id=to.id("<|media_begin|>"),
        vision_end_token_id=to.id("<|media_end|>"),
        use_unified_vision_chunk=True,
        tie_word_embeddings=False,
    )
    to.weights(Kimi_K25ForConditionalGeneration, config, _as_released)
    written = json.loads((to.out / "config.json").read_text())
    to.json("config.json", {**written, "architectures": ["KimiK25ForConditionalGeneration"]})  # as released
    limits = {"in_patch_limit": 1024, "patch_limit_on_one_side": 64, "in_patch_limit_each_frame": 1024}
    video = {
        "sample_fps": 2.0,
        "max_num_frames_each_video": 8,
        "in_patch_limit_video": 1024,
        "temporal_merge_kernel_size": 4,
    }
    processing = {"patch_size": 14, "merge_kernel_size": 2, "fixed_output_tokens": None, **limits, **video, **HALF}
    to.json("preprocessor_config.json", {"media_proc_cfg": processing})


def kimi_vl(to: Draft) -> None:
    """MoonViT, whose class transformers lacks; the processor is code of the checkpoint."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    special = ["<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
    to.tokens(*special, image="<|media_start|>image<|media_content|><|media_pad|><|media_end|>")
    text = DeepseekV3Config(**to.text(**EXPERTS, **LATENT), tie_word_embeddings=False)
    to.weights(DeepseekV3ForCausalLM, text, prefix("", "language_model."))
    width, mlp, merged = VISION["hidden_size"], VISION["intermediate_size"], 4 * VISION["hidden_size"]
    tower = {
        **_with_bias("patch_embed.proj", width, 3, 14, 14),
        "patch_embed.pos_emb.weight": (16, 16, width),
        **_with_bias("encoder.final_layernorm", width),
    }
    for layer in range(VISION["num_hidden_layers"]):
        block = f"encoder.blocks.{layer}"
        tower |= _with_bias(f"{block}.norm0", width) | _with_bias(f"{block}.norm1", width)
        tower |= _with_bias(f"{block}.wqkv", 3 * width, width) | _with_bias(f"{block}.wo", width, width)
        tower |= _with_bias(f"{block}.mlp.fc0", mlp, width) | _with_bias(f"{block}.mlp.fc1", width, mlp)
    to.add_weights(
        {
            **{f"vision_tower.{name}": shape for name, shape in tower.items()},
            **_with_bias("multi_modal_projector.pre_norm", width),
            **_with_bias("multi_modal_projector.linear_1", merged, merged),
            **_with_bias("multi_modal_projector.linear_2", text.hidden_size, merged),
        }
    )
    to.json(
        "config.json",
        {
            "architectures": ["KimiVLForConditionalGeneration"],
            "model_type": "kimi_vl",
            "text_config": json.loads((to.out / "config.json").read_text()),
            "vision_config": {**VISION, "init_pos_emb_height": 16, "init_pos_emb_width": 16},
            "media_placeholder_token_id": to.id("<|media_pad|>"),
            "tie_word_embeddings": False,
            "dtype": "float32",
        },
    )
    shutil.copy(KIMI_VL_PROCESSOR, to.out)
    classes = {"AutoProcessor": f"{KIMI_VL_PROCESSOR.stem}.KimiVLProcessor"}
    to.json("processor_config.json", {"processor_class": "KimiVLProcessor", "auto_map": classes})


def deepseek_ocr(to: Draft) -> None:
    """SAM and CLIP-L one after another, of full size: vLLM's class has their sizes in its code."""
    to.tokens("<image>", image="<image>\n")
    to.tokenizer_config("LlamaTokenizerFast", bos_token="<|endoftext|>")
    plain = {"q_lora_rank": None, "kv_lora_rank": None, "qk_rope_head_dim": 0, "qk_nope_head_dim": 0, "v_head_dim": 0}
    text = to.text(**{**EXPERTS, **plain, "topk_method": "greedy"}, tie_word_embeddings=False)
    width = text["hidden_size"]
    to.add_weights(
        {
            **{f"model.sam_model.{name}": shape for name, shape in _sam().items()},
            **{f"model.vision_model.{name}": shape for name, shape in _clip().items()},
            **_with_bias("model.projector.layers", width, 2048),
            "model.image_newline": (width,),
            "model.view_seperator": (width,),
            **_experts(text),
        },
        "bfloat16",
    )
    projector = {"model_type": "mlp_projector", "projector_type": "linear", "input_dim": 2048, "n_embed": width}
    to.json(
        "config.json",
        {
            "architectures": ["DeepseekOCRForCausalLM"],
            "model_type": "deepseek_vl_v2",
            "language_config": {**text, "architectures": ["DeepseekV2ForCausalLM"]},
            "projector_config": projector,
            "vision_config": {"model_name": "deeplip_b_l", "image_size": 1024},
            "tile_tag": "2D",
            "global_view_pos": "head",
            "dtype": "float32",
        },
    )
    to.json("processor_config.json", {"processor_class": "DeepseekVLV2Processor"})


def _sam() -> Shapes:
    tensors = {
        **_with_bias("patch_embed.proj", 768, 3, 16, 16),
        "pos_embed": (1, 64, 64, 768),
        "neck.0.weight": (256, 768, 1, 1),
        **_with_bias("neck.1", 256),
        "neck.2.weight": (256, 256, 3, 3),
        **_with_bias("neck.3", 256),
        "net_2.weight": (512, 256, 3, 3),
        "net_3.weight": (1024, 512, 3, 3),
    }
    for layer in range(12):
        block, side = f"blocks.{layer}", 64 if layer in (2, 5, 8, 11) else 14
        tensors |= _with_bias(f"{block}.norm1", 768) | _with_bias(f"{block}.norm2", 768)
        tensors |= _with_bias(f"{block}.attn.qkv", 3 * 768, 768) | _with_bias(f"{block}.attn.proj", 768, 768)
        tensors |= {f"{block}.attn.rel_pos_{axis}": (2 * side - 1, 64) for axis in "hw"}
        tensors |= _with_bias(f"{block}.mlp.lin1", 4 * 768, 768) | _with_bias(f"{block}.mlp.lin2", 768, 4 * 768)
    return tensors


def _clip() -> Shapes:
    tensors = {
        "embeddings.class_embedding": (1024,),
        "embeddings.patch_embedding.weight": (1024, 3, 14, 14),
        "embeddings.position_embedding.weight": (257, 1024),
        **_with_bias("pre_layrnorm", 1024),
    }
    for layer in range(24):
        block = f"transformer.layers.{layer}"
        tensors |= _with_bias(f"{block}.layer_norm1", 1024) | _with_bias(f"{block}.layer_norm2", 1024)
        tensors |= _with_bias(f"{block}.self_attn.qkv_proj", 3 * 1024, 1024)
        tensors |= _with_bias(f"{block}.self_attn.out_proj", 1024, 1024)
        tensors |= _with_bias(f"{block}.mlp.fc1", 4096, 1024) | _with_bias(f"{block}.mlp.fc2", 1024, 4096)
    return tensors


def _experts(text: dict[str, int]) -> Shapes:
    """Returns the tensors of a language model with plain attention, the first layer without experts."""
    width, vocabulary = text["hidden_size"], text["vocab_size"]
    tensors: Shapes = {"model.embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width)}
    tensors["model.norm.weight"] = (width,)
    for layer in range(text["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        tensors |= {f"{block}.{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
        tensors |= {f"{block}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        sizes = {"": text["intermediate_size"]}
        if layer:
            tensors[f"{block}.mlp.gate.weight"] = (text["n_routed_experts"], width)
            experts = [f"experts.{expert}." for expert in range(text["n_routed_experts"])]
            sizes = dict.fromkeys([*experts, "shared_experts."], text["moe_intermediate_size"])
        for part, size in sizes.items():
            tensors |= {f"{block}.mlp.{part}{name}_proj.weight": (size, width) for name in ("gate", "up")}
            tensors[f"{block}.mlp.{part}down_proj.weight"] = (width, size)
    return tensors
