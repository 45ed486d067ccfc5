"""A checkpoint to serve: a published vision tower and a small language model of its width, all weights random.

Written on the device that is there and in one file, so that a gigabyte takes a second. What such a model says is noise;
how long it takes is not. It must not know who loads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.peer_vllm import published_files
from training.architectures import shapes_of

NORM_SPREAD = 0.05


def make_published(arch: str, folder: Path, *, seed: int = 0, text: Mapping[str, int] = MappingProxyType({})) -> Path:
    """The files in `folder`, bfloat16. What lies there of the name is written over.

    The language model says letters alone: a client that waits for text gets some with every token. `text`: of its
    configuration, what is not to be small, such as `num_hidden_layers`.
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
    """Of each token, whether it is made of letters of ASCII: neither special nor a part of a character."""
    vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    plain = {number for token, number in vocabulary.items() if token.isascii() and token.isalpha()}
    return [number in plain for number in range(count)]
