"""Makes checkpoints to serve: a published vision tower and a small language model of its width, with random weights.

They are written from the device into one file, so that a gigabyte takes a second. The output of such a model is noise,
but its timing is realistic. Those of GENERIC have no tower of vitray; `tests/models` has small ones of many more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.peers.vllm_tower import published_files
from deployments.vllm import import_shim
from tests.models.checkpoints import HALF, Draft, Rename, make, prefix
from training.architectures import shapes_of

NORM_SPREAD = 0.05
_SPREAD = 0.02
"""Standard deviation of the weights."""
_PIXELS = 4 * 1024**2
"""Most pixels of an image that is not resized."""


def make_published(arch: str, folder: Path, *, seed: int = 0, text: Mapping[str, int] = MappingProxyType({})) -> Path:
    """Writes the files to `folder` in bfloat16, overwriting existing ones.

    The language model generates only letters, so that a client that waits for text gets some with every token. `text`:
    values of its configuration that are not small, such as `num_hidden_layers`.
    """
    import torch
    from safetensors.torch import save_file

    published_files(arch, folder, text=text)
    shapes = shapes_of(json.loads((folder / "config.json").read_text()))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        if len(shape) > 1:
            values = noise * (0.5 if "embed" in name and "patch" not in name else noise[0].numel() ** -0.5)
        else:
            values = NORM_SPREAD * noise + (0.0 if name.endswith(".bias") else 1.0)
        if name == "lm_head.weight":
            values[~torch.tensor(_plain_words(folder, shape[0]), device=device)] = 0.0
        tensors[name] = values.to(torch.bfloat16).cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _plain_words(folder: Path, count: int) -> list[bool]:
    """Returns for each token whether it consists of ASCII letters: no special token, no part of a character."""
    vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    plain = {number for token, number in vocabulary.items() if token.isascii() and token.isalpha()}
    return [number in plain for number in range(count)]


def gemma3(to: Draft) -> None:
    """Gemma-3-4B: SigLIP of 27 layers over 896 × 896 pixels, 256 tokens for each image."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    newlines = ["\n" * count for count in range(1, 5)]  # vLLM looks these up in the vocabulary
    to.tokens(*names.values(), *newlines, image="<start_of_image>")
    to.tokenizer_config(**names, extra_special_tokens=names)
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    config = Gemma3Config(
        text_config=to.text(
            hidden_size=2560,
            intermediate_size=10240,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=1024,
            max_position_embeddings=16384,
        ),
        vision_config={**vision, "image_size": 896, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=256,
        **{key: to.id(names[key.removesuffix("_index")]) for key in ("boi_token_index", "eoi_token_index")},
        image_token_index=to.id("<image_soft_token>"),
    )
    _weights(to, Gemma3ForConditionalGeneration, config, prefix("vision_tower.", "vision_tower.vision_model."))
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 256}
    to.json("processor_config.json", processor)
    square = {"height": 896, "width": 896}
    image = {"image_processor_type": "Gemma3ImageProcessor", "size": square, **HALF}
    to.json("preprocessor_config.json", {**image, **processor})


def glm4v(to: Draft) -> None:
    """GLM-4.1V-9B: a tower of 24 layers for any size, a token for 28 × 28 pixels."""
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration

    ends = {f"{kind}_{end}": f"<|{end}_of_{kind}|>" for kind in ("image", "video") for end in ("begin", "end")}
    to.tokens("<|image|>", "<|video|>", *ends.values(), image="<|begin_of_image|><|image|><|end_of_image|>")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
    vision = {"depth": 24, "hidden_size": 1536, "intermediate_size": 13696, "num_heads": 12, "out_hidden_size": 4096}
    config = Glm4vConfig(
        text_config=to.text(
            hidden_size=4096,
            intermediate_size=13696,
            num_attention_heads=32,
            max_position_embeddings=16384,
            rope_parameters=rope,
        ),
        vision_config={**vision, "image_size": 336},
        image_token_id=to.id("<|image|>"),
        video_token_id=to.id("<|video|>"),
        image_start_token_id=to.id(ends["image_begin"]),
        image_end_token_id=to.id(ends["image_end"]),
        video_start_token_id=to.id(ends["video_begin"]),
        video_end_token_id=to.id(ends["video_end"]),
    )
    _weights(to, Glm4vForConditionalGeneration, config)
    shared = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **HALF, "processor_class": "Glm4vProcessor"}
    sizes = {"size": {"shortest_edge": 112 * 112, "longest_edge": _PIXELS}}
    to.json("preprocessor_config.json", {"image_processor_type": "Glm4vImageProcessor", **shared, **sizes})
    to.json("video_preprocessor_config.json", {"video_processor_type": "Glm4vVideoProcessor", **shared, **sizes})


GENERIC: Mapping[str, Callable[[Draft], None]] = MappingProxyType({"gemma3": gemma3, "glm4v": glm4v})
"""The checkpoints by name."""


def make_generic(name: str, folder: Path, *, tiny: bool = False) -> Path:
    """Writes the checkpoint `name` to `folder` in bfloat16, overwriting existing files; if `tiny`, the small one of
    `tests/models` in float32."""
    import_shim.activate()
    if tiny:
        make(name, folder)
    else:
        GENERIC[name](Draft(folder))
    return folder


def _weights(to: Draft, model_class: type[Any], config: Any, rename: Rename | None = None) -> None:  # noqa: ANN401
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    to.weights(model_class, config, rename, dtype="bfloat16", device=device, spread=_SPREAD)
