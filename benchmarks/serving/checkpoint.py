"""Makes checkpoints to serve: a published vision tower and a small language model of its width, with random weights.

They are written from the device into one file, so that a gigabyte takes a second. The output of such a model is noise,
but its timing is realistic. Those of GENERIC have no tower of vitray; `tests/models` has small ones of many more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.peers.vllm_tower import published_files
from deployments.vllm import import_shim
from tests.models.checkpoints import Draft, make
from tests.models.recipes_any_size import glm4v
from tests.models.recipes_square import gemma3
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


def _gemma3(to: Draft) -> None:
    """Gemma-3-4B's SigLIP."""
    gemma3(
        to,
        side=896,
        tokens=256,
        text={
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, "max_position_embeddings": 16384,
        },
        vision={
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "patch_size": 14,
        },
    )  # fmt: skip


def _glm4v(to: Draft) -> None:
    """GLM-4.1V-9B's tower: a token for 28 × 28 pixels."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
    glm4v(
        to,
        text={
            "hidden_size": 4096, "intermediate_size": 13696, "num_attention_heads": 32,
            "max_position_embeddings": 16384, "rope_parameters": rope,
        },
        vision={
            "depth": 24, "hidden_size": 1536, "intermediate_size": 13696, "num_heads": 12, "out_hidden_size": 4096,
            "image_size": 336,
        },
        size={"shortest_edge": 112 * 112, "longest_edge": _PIXELS},
    )  # fmt: skip


GENERIC: Mapping[str, Callable[[Draft], None]] = MappingProxyType({"gemma3": _gemma3, "glm4v": _glm4v})
"""The checkpoints by name."""


def make_generic(name: str, folder: Path, *, tiny: bool = False) -> Path:
    """Writes the checkpoint `name` to `folder` in bfloat16, overwriting existing files; if `tiny`, the small one of
    `tests/models` in float32."""
    import_shim.activate()
    import torch

    if tiny:
        make(name, folder)
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        GENERIC[name](Draft(folder, dtype="bfloat16", device=device, spread=_SPREAD))
    return folder
