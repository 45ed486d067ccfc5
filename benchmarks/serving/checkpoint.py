"""Makes a checkpoint to serve: a published vision tower and a small language model of its width, with random weights.

It is written from the device into one file, so that a gigabyte takes a second. The output of such a model is noise, but
its timing is realistic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.peers.vllm_tower import published_files
from training.architectures import shapes_of

NORM_SPREAD = 0.05


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
