"""vLLM's inputs as a peer: files of a checkpoint, budgets of its encoder graphs, and names of its rows.

This module must not import vLLM; `vllm_process.py` does so in a separate process.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.ladder.towers import ARCHITECTURES, SECTIONS, TINY_SECTIONS, Shape
from encoder.towers.tower import VisionTower

MAX_IMAGES = 16
BUDGETS = [64 * 2**power for power in range(8)]
"""vLLM's default budgets from 64 tokens on."""
FINE_BUDGETS = [64, 128, 256, *range(512, 8193, 512)]
PREFIX, FP8_PREFIX = "vllm", "vllm-fp8"
_QWEN3_TEXT = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_TEXT = {
    "qwen3_vl": _QWEN3_TEXT,
    "qwen3_5": _QWEN3_TEXT,
    "qwen2_5_vl": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
    "qwen3_vl_2b": {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}
_SECTIONS = {"qwen3_vl": [24, 20, 20], "qwen2_5_vl": [16, 24, 24]}


def compiles(tower: str) -> bool:
    """Whether vLLM 0.26 compiles this tower; `compile_mm_encoder` has no effect on the others."""
    return ARCHITECTURES[tower] == "qwen2_5_vl"


def compiled_shape(shapes: Sequence[Shape]) -> Shape:
    """Returns the largest shape: vLLM compiles its tower for the first batch, which is the largest in its engine.

    torch.compile decides by this batch which GEMMs to pad to multiples of 16 bytes. Qwen2.5-VL's MLP has 3420 columns:
    without padding, its second GEMM is slow for every batch size.
    """
    return max(shapes, key=lambda shape: shape.tokens)


MAX_CAPTURED_IMAGE_TOKENS = 2048
"""Maximum width of a captured image in tokens after the merge, which is half its width in patches."""


def fitted_budgets(shapes: Sequence[Shape]) -> dict[int, list[int]]:
    """Returns by number of images the budgets that shapes with this number fill without padding.

    vLLM also sizes a graph's buffers by the number of images, so a shape only fills a graph of its own number.
    """
    found: dict[int, set[int]] = defaultdict(set)
    for shape in shapes:
        found[len(shape.grids)].add(shape.tokens)
    return {images: sorted(budgets) for images, budgets in sorted(found.items())}


def graph_images(images: int, budgets: Sequence[int]) -> int:
    """Returns the number of images, at least `images`, with which graphs of `budgets` are captured.

    vLLM captures a graph with its budget divided among this number of images, each one merged token high. With few
    images in a large budget, the width exceeds the 8,192 positions of its rotary table, and the gather asserts on the
    device.
    """
    return max(images, -(-max(budgets) // MAX_CAPTURED_IMAGE_TOKENS))


def published_files(
    tower: str, folder: Path, *, text: Mapping[str, int] = MappingProxyType({}), tiny: bool = False
) -> Path:
    """Writes a small checkpoint's files with the published tower and a language model of its width; reads no weights.

    `text`: values of the language model's configuration that replace the small ones. The tower's output has the width
    `hidden_size`.
    """
    from training.checkpoints import make_checkpoint

    arch = ARCHITECTURES[tower]
    make_checkpoint(arch, folder, dtype="bfloat16")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"] = config["vision_config"] | dict((TINY_SECTIONS if tiny else SECTIONS)[tower])
    if not tiny:
        language = config.get("text_config", config)
        language |= {"intermediate_size": 4096, "num_hidden_layers": 4, **_TEXT[tower], **text}
        config["vision_config"]["out_hidden_size"] = language["hidden_size"]
        for key in ("rope_scaling", "rope_parameters"):
            if isinstance(language.get(key), dict):
                language[key]["mrope_section"] = _SECTIONS[arch]
    path.write_text(json.dumps(config))
    return folder


def write_weights(tower: VisionTower, folder: Path) -> None:
    """Writes our tower's weights as the checkpoint's only tensors, with the names and shapes of published ones."""
    from safetensors.torch import save_file

    config = tower.config
    prefix = "model.visual." if config.architecture == "qwen3_vl" else "visual."
    tensors = {name: parameter.detach() for name, parameter in tower.named_parameters()}
    patch = tensors["patch_embed.proj.weight"]
    kernel = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    tensors["patch_embed.proj.weight"] = patch.view(config.hidden_size, *kernel)
    (folder / "model.safetensors").unlink(missing_ok=True)
    stored = {prefix + name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
