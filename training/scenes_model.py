"""The small model that sees: its sizes, its tokenizer and the folder that it is stored in.

Qwen3-VL's architecture with 7.94 million parameters: a tower of 6 layers with one deepstack level, a language model of
6 layers with tied embeddings. Must not know how it is trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from training.conversations import training_conversation
from training.tokenizer import save_tokenizer, train_tokenizer

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 960
PATCH, MERGE = 16, 2
# A picture of 64² and one of 512² keep their sizes; what is larger is made smaller.
MIN_PIXELS, MAX_PIXELS = 64 * 64, 512 * 512
MAX_POSITIONS = 8192
_CORPUS_CONVERSATIONS = 4000


def scenes_tokenizer() -> Tokenizer:
    """Learns its merges from generated conversations, the same ones each time."""
    texts = []
    for seed in range(_CORPUS_CONVERSATIONS):
        conversation = training_conversation(seed)
        texts += [conversation.system, "system\n", "user\n", "assistant\n"]
        texts += [text for turn in conversation.turns for text in (turn.question, turn.answer)]
    return train_tokenizer(texts, vocab_size=VOCAB_SIZE)


def scenes_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "dtype": "bfloat16",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-6,
            "use_cache": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_theta": 10000,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]},
            "tie_word_embeddings": True,
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
            "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 6,
            "hidden_size": 192,
            "intermediate_size": 576,
            "num_heads": 3,
            "in_channels": 3,
            "out_hidden_size": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [2],
        },
    }


def save_scenes_model(folder: Path, tokenizer: Tokenizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes the whole checkpoint in bf16; `tensors` are named as in transformers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    preprocessor = {
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    # There is one right answer, so whoever asks for no temperature gets next to none.
    generation = {"do_sample": True, "temperature": 0.01}
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    for name, content in (
        ("config.json", scenes_config(tokenizer)),
        ("generation_config.json", generation | {"pad_token_id": pad, "eos_token_id": [end, pad]}),
        ("preprocessor_config.json", preprocessor | {"image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("video_preprocessor_config.json", preprocessor | {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    save_tokenizer(tokenizer, folder, processor_class="Qwen3VLProcessor", max_length=MAX_POSITIONS)
    stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    stored.pop("lm_head.weight", None)  # tied to the embeddings
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
