"""Checkpoints of architectures whose tower takes squares: one for an image, or tiles of it."""

from __future__ import annotations

from tests.models.checkpoints import HALF, VISION, Draft, Settings, delta_net, prefix

SQUARE = {"height": 112, "width": 112}
SIGLIP = {**VISION, "vision_use_head": False}
GEMMA3_TEXT = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 512}
PINPOINTS = [[112, 112], [112, 224], [224, 112], [224, 224]]


def _with_vision_model(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1) if ".vision_model." not in name else name


def gemma3(
    to: Draft, *, side: int = 112, tokens: int = 16, text: Settings = GEMMA3_TEXT, vision: Settings = VISION
) -> None:
    """SigLIP with 16 tokens a picture between two of their own; pictures attend to themselves in both directions."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    newlines = ["\n" * count for count in range(1, 5)]  # vLLM looks these up in the vocabulary
    to.tokens(*names.values(), *newlines, image="Picture <start_of_image> ends.")
    to.tokenizer_config(**names, extra_special_tokens=names)
    config = Gemma3Config(
        text_config=to.text(**text),
        vision_config={**vision, "image_size": side, "vision_use_head": False},
        mm_tokens_per_image=tokens,
        **{key: to.id(names[key.removesuffix("_index")]) for key in ("boi_token_index", "eoi_token_index")},
        image_token_index=to.id("<image_soft_token>"),
    )
    to.weights(Gemma3ForConditionalGeneration, config, prefix("vision_tower.", "vision_tower.vision_model."))
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": tokens}
    to.json("processor_config.json", processor)
    image = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": side, "width": side}, **HALF}
    to.json("preprocessor_config.json", {**image, **processor})


def llava(to: Draft) -> None:
    """CLIP; the processor produces pixels only, so that the header has no metadata."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    to.tokens("<image>", image="<image>\n")
    to.tokenizer_config("LlamaTokenizerFast", image_token="<image>", extra_special_tokens={"image_token": "<image>"})
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**{**VISION, "num_hidden_layers": 3}, projection_dim=64),
        text_config=LlamaConfig(**to.text()),
        image_token_index=to.id("<image>"),
        image_seq_length=64,
    )
    to.weights(LlavaForConditionalGeneration, config, prefix("vision_tower.", "vision_tower.vision_model."))
    image = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 112}, "crop_size": SQUARE}
    to.json("preprocessor_config.json", {**image, "processor_class": "LlavaProcessor"})
    processor = {"processor_class": "LlavaProcessor", "patch_size": 14, "num_additional_image_tokens": 1}
    to.json(
        "processor_config.json",
        {**processor, "vision_feature_select_strategy": "default", "image_token": "<image>"},
    )


def llava_next(to: Draft) -> None:
    """CLIP over tiles of any resolution."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaNextConfig, LlavaNextForConditionalGeneration

    to.tokens("<image>", image="<image>\n")
    to.tokenizer_config("LlamaTokenizerFast", image_token="<image>", extra_special_tokens={"image_token": "<image>"})
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**{**VISION, "num_hidden_layers": 3}, projection_dim=64),
        text_config=LlamaConfig(**to.text()),
        image_token_index=to.id("<image>"),
        image_grid_pinpoints=PINPOINTS,
    )
    to.weights(LlavaNextForConditionalGeneration, config, _with_vision_model)
    kind = {"processor_class": "LlavaNextProcessor"}
    image = {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 112}, "crop_size": SQUARE}
    to.json("preprocessor_config.json", {**image, **kind, "image_grid_pinpoints": PINPOINTS})
    processor = {**kind, "patch_size": 14, "num_additional_image_tokens": 1, "image_token": "<image>"}
    to.json("processor_config.json", {**processor, "vision_feature_select_strategy": "default"})


def llava_onevision(to: Draft) -> None:
    """SigLIP over tiles of any resolution, with a learned row end."""
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        Qwen2Config,
        SiglipVisionConfig,
    )

    to.tokens("<image>", "<video>", image="<image>\n")
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**SIGLIP),
        text_config=Qwen2Config(**to.text()),
        image_token_index=to.id("<image>"),
        video_token_index=to.id("<video>"),
        image_grid_pinpoints=PINPOINTS,
    )
    to.weights(LlavaOnevisionForConditionalGeneration, config, _with_vision_model)
    kind = {"processor_class": "LlavaOnevisionProcessor"}
    image = {"image_processor_type": "LlavaOnevisionImageProcessor", "size": SQUARE, **HALF, **kind}
    to.json("preprocessor_config.json", {**image, "image_grid_pinpoints": PINPOINTS})
    video = {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": SQUARE, **HALF}
    to.json("video_preprocessor_config.json", {**video, **kind})
    to.json("processor_config.json", {**kind, "num_image_tokens": 64, "vision_feature_select_strategy": "full"})


def internvl(to: Draft) -> None:
    """InternViT over tiles, a quarter of the tokens by pixel shuffle."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLVisionConfig, Qwen2Config

    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    to.tokens(*names.values(), image="<IMG_CONTEXT>\n")
    to.tokenizer_config(**names, extra_special_tokens=names)
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(**VISION),
        text_config=Qwen2Config(**to.text(tie_word_embeddings=False)),
        image_token_id=to.id("<IMG_CONTEXT>"),
        image_seq_length=16,
        tie_word_embeddings=False,
    )
    to.weights(InternVLForConditionalGeneration, config)
    kind = {"processor_class": "InternVLProcessor"}
    image = {"image_processor_type": "GotOcr2ImageProcessor", "size": SQUARE, "crop_to_patches": True}
    to.json("preprocessor_config.json", {**image, "min_patches": 1, "max_patches": 4, **HALF, **kind})
    to.json(
        "video_preprocessor_config.json",
        {"video_processor_type": "InternVLVideoProcessor", "size": SQUARE, **HALF, **kind},
    )
    to.json("processor_config.json", {**kind, "image_seq_length": 16})


def idefics3(to: Draft) -> None:
    """SigLIP over tiles with text between them; tower and language model are built together."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    to.tokens("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles, image="<image>")
    config = Idefics3Config(
        vision_config=VISION,
        text_config=LlamaConfig(**to.text()),
        image_token_id=to.id("<image>"),
        pad_token_id=to.id("<|endoftext|>"),
        scale_factor=2,
    )
    to.weights(Idefics3ForConditionalGeneration, config)
    image = {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 224}, **HALF}
    largest = {"max_image_size": {"longest_edge": 112}, "processor_class": "Idefics3Processor"}
    to.json("preprocessor_config.json", {**image, **largest})
    to.json("processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": 16})


def minicpmv4_6(to: Draft) -> None:
    """SigLIP over slices, merged within and after the tower; the language model is Qwen3.5's."""
    from transformers import MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration

    names = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    }
    to.tokens(*list(names.values())[2:], image="<|image_pad|>")
    to.tokenizer_config("Qwen2Tokenizer", **names, extra_special_tokens=names)
    config = MiniCPMV4_6Config(
        text_config={"model_type": "qwen3_5_text", **delta_net(to)},
        vision_config={**VISION, "num_hidden_layers": 3, "insert_layer_id": 1},
        insert_layer_id=1,
        image_size=112,
        image_token_id=to.id("<|image_pad|>"),
        video_token_id=to.id("<|video_pad|>"),
    )
    to.weights(MiniCPMV4_6ForConditionalGeneration, config)
    shared = {"processor_class": "MiniCPMV4_6Processor", "scale_resolution": 112, "max_slice_nums": 4, **HALF}
    to.json("preprocessor_config.json", {"image_processor_type": "MiniCPMV4_6ImageProcessor", **shared})
    to.json("video_preprocessor_config.json", {"video_processor_type": "MiniCPMV4_6VideoProcessor", **shared})


def paligemma(to: Draft) -> None:
    """SigLIP with its embeddings at the start of the prompt, whatever the prompt is."""
    from transformers import GemmaConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration, SiglipVisionConfig

    to.tokens("<image>", "\n", image="")  # vLLM looks the newline up in the vocabulary
    to.tokenizer_config(
        bos_token="<|endoftext|>", image_token="<image>", extra_special_tokens={"image_token": "<image>"}
    )
    config = PaliGemmaConfig(
        vision_config=SiglipVisionConfig(**SIGLIP, projection_dim=128),
        text_config=GemmaConfig(**to.text(head_dim=32)),
        image_token_index=to.id("<image>"),
        projection_dim=128,
    )
    to.weights(PaliGemmaForConditionalGeneration, config, _with_vision_model)
    image = {"image_processor_type": "SiglipImageProcessor", "size": SQUARE, "image_seq_length": 64, **HALF}
    to.json("preprocessor_config.json", {**image, "processor_class": "PaliGemmaProcessor"})
