"""Checkpoints of `make test-models`, in the order in which they run.

In bfloat16 where vLLM's CPU build has nothing else: the gated delta net.
"""

from __future__ import annotations

from tests.models import recipes_any_size as any_size
from tests.models import recipes_deepseek as deepseek
from tests.models import recipes_square as square
from tests.models.checkpoints import Recipe

RECIPES = {
    "gemma3": Recipe(square.gemma3, "Gemma3ForConditionalGeneration"),
    "mistral3": Recipe(any_size.mistral3, "Mistral3ForConditionalGeneration"),
    "idefics3": Recipe(square.idefics3, "Idefics3ForConditionalGeneration"),
    "llava": Recipe(square.llava, "LlavaForConditionalGeneration"),
    "qwen3_vl": Recipe(any_size.qwen3_vl, "Qwen3VLForConditionalGeneration"),
    "qwen3_5": Recipe(any_size.qwen3_5, "Qwen3_5ForConditionalGeneration", dtype="bfloat16"),
    "qwen2_audio": Recipe(any_size.qwen2_audio, "Qwen2AudioForConditionalGeneration", modality="audio"),
    "llava_onevision": Recipe(square.llava_onevision, "LlavaOnevisionForConditionalGeneration"),
    "llava_next": Recipe(square.llava_next, "LlavaNextForConditionalGeneration"),
    "internvl": Recipe(square.internvl, "InternVLForConditionalGeneration"),
    "qwen2_vl": Recipe(any_size.qwen2_vl, "Qwen2VLForConditionalGeneration"),
    "qwen2_vl_video": Recipe(any_size.qwen2_vl, "Qwen2VLForConditionalGeneration", modality="video"),
    "glm4v": Recipe(any_size.glm4v, "Glm4vForConditionalGeneration"),
    "paddleocr_vl": Recipe(any_size.paddleocr_vl, "PaddleOCRVLForConditionalGeneration"),
    "gemma4": Recipe(any_size.gemma4, "Gemma4ForConditionalGeneration"),
    "qwen2_5_omni": Recipe(any_size.qwen2_5_omni, "Qwen2_5OmniModel"),
    "qwen2_5_omni_audio": Recipe(any_size.qwen2_5_omni, "Qwen2_5OmniModel", modality="audio"),
    "qwen3_omni": Recipe(any_size.qwen3_omni, "Qwen3OmniMoeForConditionalGeneration"),
    "qwen3_omni_audio": Recipe(any_size.qwen3_omni, "Qwen3OmniMoeForConditionalGeneration", modality="audio"),
    "kimi_k25": Recipe(deepseek.kimi_k25, "KimiK25ForConditionalGeneration", engine_args=deepseek.ENGINE_ARGS),
    "kimi_vl": Recipe(
        deepseek.kimi_vl,
        "KimiVLForConditionalGeneration",
        engine_args={**deepseek.ENGINE_ARGS, "trust_remote_code": True},
    ),
    "deepseek_ocr": Recipe(deepseek.deepseek_ocr, "DeepseekOCRForCausalLM"),
    "minicpmv4_6": Recipe(square.minicpmv4_6, "MiniCPMV4_6ForConditionalGeneration", dtype="bfloat16"),
    "paligemma": Recipe(square.paligemma, "PaliGemmaForConditionalGeneration", max_items=1),
}
