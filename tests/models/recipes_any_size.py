"""Checkpoints of architectures whose tower takes images of any size, and sounds."""

from __future__ import annotations

import json
from typing import Any

from tests.models.checkpoints import HALF, VISION, Draft, Settings, delta_net, prefix

QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
QWEN_WRAP = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
QWEN_AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"
WHISPER_FEATURES: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "chunk_length": 300,
    "n_fft": 400,
    "return_attention_mask": True,
}

GLM4V_TEXT = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5,
    }
}  # fmt: skip
GLM4V_VISION = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128, "image_size": 112,
}  # fmt: skip


def _qwen_processors(to: Draft, image: str, video: str, processor: str, **settings: object) -> None:
    shared = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **HALF, "processor_class": processor}
    sizes = {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 256}}
    to.json("preprocessor_config.json", {"image_processor_type": image, **shared, **sizes, **settings})
    to.json("video_preprocessor_config.json", {"video_processor_type": video, **shared, **sizes, **settings})


def mistral3(to: Draft) -> None:
    """Pixtral's tower for any size; the token at the end of a row of patches is no embedding."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    tokens = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    to.tokens(*tokens.values(), image="[IMG]")
    config = Mistral3Config(
        vision_config=PixtralVisionConfig(**{**VISION, "image_size": 448}, head_dim=32),
        text_config=MistralConfig(**to.text(head_dim=32, tie_word_embeddings=False)),
        image_token_index=to.id("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    to.weights(Mistral3ForConditionalGeneration, config)
    image = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 448}}
    patch = {"patch_size": {"height": 14, "width": 14}, "processor_class": "PixtralProcessor"}
    to.json("preprocessor_config.json", {**image, **patch})
    processor = {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2}
    to.json("processor_config.json", {**processor, **tokens})


def qwen2_vl(to: Draft) -> None:
    """Qwen2-VL, which vitray's own tower does not cover."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    to.tokens(**QWEN_WRAP)
    to.tokenizer_config("Qwen2Tokenizer", processor_class="Qwen2VLProcessor")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    config = Qwen2VLConfig(
        text_config=to.text(rope_parameters=rope),
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2},
        **{key: to.id(token) for key, token in QWEN_TOKENS.items()},
    )
    to.weights(Qwen2VLForConditionalGeneration, config)
    _qwen_processors(to, "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", "Qwen2VLProcessor")


def qwen3_vl(to: Draft) -> None:
    """Deepstack: embeddings are wider than the language model."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    to.tokens(**QWEN_WRAP)
    to.tokenizer_config("Qwen2Tokenizer", processor_class="Qwen3VLProcessor")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "mrope_section": [6, 5, 5]}
    vision = {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128}
    config = Qwen3VLConfig(
        text_config=to.text(head_dim=32, rope_parameters=rope),
        vision_config={**vision, "num_position_embeddings": 256, "deepstack_visual_indexes": [1]},
        **{key: to.id(token) for key, token in QWEN_TOKENS.items()},
    )
    to.weights(Qwen3VLForConditionalGeneration, config)
    to.copy("preprocessor_config.json", "video_preprocessor_config.json")


def qwen3_5(to: Draft) -> None:
    """Hybrid: three layers of gated delta net and one of attention; Qwen3-VL's tower without deepstack."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    to.tokens(**QWEN_WRAP)
    to.tokenizer_config("Qwen2Tokenizer", processor_class="Qwen3VLProcessor")
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128}
    config = Qwen3_5Config(
        text_config=delta_net(to),
        vision_config={**vision, "num_position_embeddings": 256},
        **{key: to.id(token) for key, token in QWEN_TOKENS.items()},
    )
    to.weights(Qwen3_5ForConditionalGeneration, config)
    to.copy("preprocessor_config.json", "video_preprocessor_config.json")


def qwen2_5_omni(to: Draft) -> None:
    """The part of Qwen2.5-Omni that vLLM serves: images and sounds in, text out."""
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    names = {
        "image_token": "<|image_pad|>",
        "audio_token": "<|AUDIO|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
    to.tokens("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", audio=QWEN_AUDIO, **QWEN_WRAP)
    to.tokenizer_config("Qwen2Tokenizer", **names, extra_special_tokens=names)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128}
    audio = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128, "d_model": 64}
    config = Qwen2_5OmniThinkerConfig(
        text_config=to.text(rope_parameters=rope, tie_word_embeddings=False),
        vision_config={**vision, "fullatt_block_indexes": [1]},
        audio_config={**audio, "output_dim": 128, "num_mel_bins": 128},
        audio_token_index=to.id("<|AUDIO|>"),
        image_token_index=to.id("<|image_pad|>"),
        video_token_index=to.id("<|video_pad|>"),
        audio_start_token_id=to.id("<|audio_bos|>"),
        audio_end_token_id=to.id("<|audio_eos|>"),
    )
    to.weights(Qwen2_5OmniThinkerForConditionalGeneration, config, lambda name: f"thinker.{name}")
    thinker = json.loads((to.out / "config.json").read_text())
    whole = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": thinker}
    to.json("config.json", {**whole, "enable_audio_output": False, "dtype": "float32"})
    image = ("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", "Qwen2_5OmniProcessor")
    _qwen_processors(to, *image, **WHISPER_FEATURES)


def qwen3_omni(to: Draft) -> None:
    """The part of Qwen3-Omni that vLLM serves: deepstack, and experts in the language model."""
    from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration

    names = {
        "image_token": "<|image_pad|>",
        "audio_token": "<|audio_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    audio_tokens = ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>")
    to.tokens(*audio_tokens, audio="".join(audio_tokens), **QWEN_WRAP)
    to.tokenizer_config("Qwen2Tokenizer", **names, extra_special_tokens=names)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "mrope_section": [6, 5, 5]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    vision = {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128}
    audio = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128, "d_model": 64}
    positions = {"num_position_embeddings": 256, "image_size": 256, "apply_vit_abs_pos_embed": True}  # as released
    config = Qwen3OmniMoeThinkerConfig(
        text_config=to.text(rope_parameters=rope, tie_word_embeddings=False, **experts),
        vision_config={**vision, **positions, "deepstack_visual_indexes": [1]},
        audio_config={**audio, "output_dim": 128, "downsample_hidden_size": 32},
        audio_token_id=to.id("<|audio_pad|>"),
        image_token_id=to.id("<|image_pad|>"),
        video_token_id=to.id("<|video_pad|>"),
        audio_start_token_id=to.id("<|audio_start|>"),
        audio_end_token_id=to.id("<|audio_end|>"),
    )
    to.weights(Qwen3OmniMoeThinkerForConditionalGeneration, config, lambda name: f"thinker.{name}")
    thinker = json.loads((to.out / "config.json").read_text())
    whole = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe"}
    to.json("config.json", {**whole, "thinker_config": thinker, "enable_audio_output": False, "dtype": "float32"})
    image = ("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", "Qwen3OmniMoeProcessor")
    _qwen_processors(to, *image, **WHISPER_FEATURES, patch_size=16)


def qwen2_audio(to: Draft) -> None:
    """Whisper's tower; the processor produces features only."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, Qwen2Config
    from transformers.models.qwen2_audio import Qwen2AudioEncoderConfig

    to.tokens("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", audio=QWEN_AUDIO)
    to.tokenizer_config("Qwen2TokenizerFast", processor_class="Qwen2AudioProcessor")
    layers = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128}
    config = Qwen2AudioConfig(
        audio_config=Qwen2AudioEncoderConfig(d_model=64, num_mel_bins=80, max_source_positions=1500, **layers),
        text_config=Qwen2Config(**to.text()),
        audio_token_index=to.id("<|AUDIO|>"),
    )
    rename = prefix("language_model.model.model.", "language_model.model.")
    to.weights(Qwen2AudioForConditionalGeneration, config, rename)
    features = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "sampling_rate": 16000}
    window = {"hop_length": 160, "chunk_length": 30, "n_fft": 400, "padding_value": 0.0, "return_attention_mask": True}
    to.json("preprocessor_config.json", {**features, **window, "processor_class": "Qwen2AudioProcessor"})


def glm4v(to: Draft, *, text: Settings = GLM4V_TEXT, vision: Settings = GLM4V_VISION, **processors: object) -> None:
    """GLM-4.1V and GLM-4.6V: positions in three dimensions, tokens of their own around an item."""
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration

    ends = {f"{kind}_{end}": f"<|{end}_of_{kind}|>" for kind in ("image", "video") for end in ("begin", "end")}
    to.tokens("<|image|>", "<|video|>", *ends.values(), image="<|begin_of_image|><|image|><|end_of_image|>")
    config = Glm4vConfig(
        text_config=to.text(**text),
        vision_config=dict(vision),
        image_token_id=to.id("<|image|>"),
        video_token_id=to.id("<|video|>"),
        image_start_token_id=to.id(ends["image_begin"]),
        image_end_token_id=to.id(ends["image_end"]),
        video_start_token_id=to.id(ends["video_begin"]),
        video_end_token_id=to.id(ends["video_end"]),
    )
    to.weights(Glm4vForConditionalGeneration, config)
    _qwen_processors(to, "Glm4vImageProcessor", "Glm4vVideoProcessor", "Glm4vProcessor", **processors)


def paddleocr_vl(to: Draft) -> None:
    """SigLIP for any resolution, positions in three dimensions."""
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    image = "<|IMAGE_PLACEHOLDER|>"
    to.tokens(image, "<|IMAGE_START|>", "<|IMAGE_END|>", image=f"<|IMAGE_START|>{image}<|IMAGE_END|>")
    to.tokenizer_config(image_token=image, extra_special_tokens={"image_token": image})
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    config = PaddleOCRVLConfig(
        text_config=to.text(head_dim=32, rope_parameters=rope, tie_word_embeddings=False),
        vision_config=VISION,
        image_token_id=to.id(image),
        video_token_id=to.id("<|vision_pad|>"),
        vision_start_token_id=to.id("<|IMAGE_START|>"),
        vision_end_token_id=to.id("<|IMAGE_END|>"),
        tie_word_embeddings=False,
    )
    to.weights(PaddleOCRVLForConditionalGeneration, config)
    sizes = {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 256}}
    to.json(
        "preprocessor_config.json",
        {
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "processor_class": "PaddleOCRVLProcessor",
            "min_pixels": 28 * 28 * 4,
            "max_pixels": 28 * 28 * 256,
            **sizes,
            **HALF,
        },
    )
    to.json("processor_config.json", {"processor_class": "PaddleOCRVLProcessor"})


def gemma4(to: Draft) -> None:
    """Patches of any aspect ratio, pooled; layers with local and global attention."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    names = {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    }
    to.tokens(*names.values(), "<|video|>", image="<|image|>")
    to.tokenizer_config(**names, extra_special_tokens=names)
    text = to.text(
        head_dim=32,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention"],
    )
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"position_embedding_size": 256, "default_output_length": 70}
    config = Gemma4Config(
        text_config=text | {"vocab_size_per_layer_input": text["vocab_size"]},
        vision_config={**vision, "num_key_value_heads": 2, "head_dim": 32, **sizes},
        audio_config=None,
        boi_token_id=to.id("<|image>"),
        eoi_token_id=to.id("<image|>"),
        image_token_id=to.id("<|image|>"),
        video_token_id=to.id("<|video|>"),
        boa_token_id=to.id("<|audio>"),
        eoa_token_index=to.id("<audio|>"),
        audio_token_id=to.id("<|audio|>"),
    )
    to.weights(Gemma4ForConditionalGeneration, config)
    kind = {"processor_class": "Gemma4Processor"}
    to.json(
        "processor_config.json",
        {
            **kind,
            "image_seq_length": 70,
            "image_processor": {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70},
            "video_processor": {"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70},
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        },
    )
