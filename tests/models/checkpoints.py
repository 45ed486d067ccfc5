"""Small random checkpoints of many architectures, complete for vLLM: config, weights, tokenizer, processor, template.

    python -m tests.models.checkpoints gemma3 --out DIR

Language models have 2 layers of width 128. Nothing is fetched: the tokenizer is that of models/scenes-8m, with each
architecture's special tokens added. `tests/models/recipes_*.py` have one function per architecture.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from deployments.vllm import import_shim

SCENES = Path(__file__).resolve().parent.parent.parent / "models" / "scenes-8m"
WEIGHT_SPREAD = 0.08
"""Standard deviation of the weights, so large that answers depend on the picture."""

# Loops over `message.content` by that name: else vLLM would join the texts and insert placeholders of its own.
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}{{- message.content -}}{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}{{- @image@ -}}
{%- elif part.type == 'video' -%}{{- @video@ -}}
{%- elif part.type == 'audio' -%}{{- @audio@ -}}
{%- elif part.text is defined -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}<|im_end|>
{% endfor -%}
<|im_start|>assistant
"""

TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
"""Settings of the language model, by the names that almost all configs share."""

VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 112,
    "patch_size": 14,
}

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
"""Normalisation of pixels."""

Shapes = dict[str, tuple[int, ...]]
"""Sizes of tensors by name."""

Settings = Mapping[str, Any]
"""Values of a configuration by name."""

Rename = Callable[[str], str | None]
"""Name of a tensor in released checkpoints, by its name in transformers 5; None drops the tensor."""


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint is made, and what vLLM needs to run it on a CPU."""

    write: Callable[[Draft], None]
    architecture: str
    """Name in vLLM's registry."""
    modality: str = "image"
    dtype: str = "float32"
    max_items: int = 2
    """Most items in a request."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)


class Draft:
    """A checkpoint folder that is being written."""

    def __init__(
        self, out: Path, *, dtype: str = "float32", device: str = "cpu", spread: float = WEIGHT_SPREAD
    ) -> None:
        """`dtype` and `spread`, the standard deviation: of the weights, which are made on `device`."""
        self.out = out
        self._dtype, self._device, self._spread = dtype, device, spread
        out.mkdir(parents=True, exist_ok=True)
        self._tokenizer = Tokenizer.from_file(str(SCENES / "tokenizer.json"))

    def tokens(self, *special: str, **placeholders: str) -> None:
        """Adds special tokens, and writes tokenizer and template. `placeholders`: an item's text, by modality."""
        self._tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
        self._tokenizer.save(str(self.out / "tokenizer.json"))
        template = TEMPLATE
        for modality in ("image", "video", "audio"):
            template = template.replace(f"@{modality}@", json.dumps(placeholders.get(modality, "")))
        (self.out / "chat_template.jinja").write_text(template)
        self.tokenizer_config()

    def tokenizer_config(self, kind: str = "PreTrainedTokenizerFast", **settings: object) -> None:
        fixed = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": 8192}
        self.json("tokenizer_config.json", {"tokenizer_class": kind, **fixed, **settings})

    def id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        assert found is not None, token
        return int(found)

    def text(self, **settings: object) -> dict[str, Any]:
        """Returns the settings of a language model for this tokenizer."""
        ends = {"eos_token_id": self.id("<|im_end|>"), "pad_token_id": self.id("<|endoftext|>"), "bos_token_id": None}
        vocabulary = (self._tokenizer.get_vocab_size() + 63) // 64 * 64
        return {**TEXT, **ends, "vocab_size": vocabulary, **settings}

    def json(self, name: str, value: Mapping[str, object]) -> None:
        (self.out / name).write_text(json.dumps(value, indent=2))

    def copy(self, *names: str) -> None:
        """Copies files of models/scenes-8m."""
        for name in names:
            shutil.copyfile(SCENES / name, self.out / name)

    def weights(self, model_class: type[Any], config: Any, rename: Rename | None = None) -> None:
        """Writes config.json and random weights of transformers' class."""
        import torch  # not needed by those who only look at RECIPES
        from safetensors.torch import load_file, save_file

        torch.manual_seed(0)
        config.dtype = self._dtype
        with torch.device(self._device):
            model = model_class(config).to(getattr(torch, self._dtype)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, self._spread)
        model.save_pretrained(self.out)
        if rename is not None:
            path = self.out / "model.safetensors"
            named = {rename(name): tensor for name, tensor in load_file(path).items()}
            save_file({name: tensor for name, tensor in named.items() if name}, path, metadata={"format": "pt"})

    def add_weights(self, shapes: Shapes, dtype: str = "float32") -> None:
        """Adds random weights to those that are there: for modules that transformers has no class of."""
        import torch
        from safetensors.torch import load_file, save_file

        path = self.out / "model.safetensors"
        tensors = load_file(path) if path.exists() else {}
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            if len(shape) > 1:
                tensors[name] = torch.randn(shape, generator=generator).mul_(WEIGHT_SPREAD).to(getattr(torch, dtype))
            else:
                tensors[name] = torch.full(shape, float(not name.endswith("bias")), dtype=getattr(torch, dtype))
        save_file(tensors, path, metadata={"format": "pt"})


def prefix(old: str, new: str) -> Rename:
    """Returns a `Rename` of names that begin with `old`."""
    return lambda name: new + name.removeprefix(old) if name.startswith(old) else name


def delta_net(to: Draft) -> dict[str, Any]:
    """Returns settings of a language model with three layers of gated delta net and one of attention."""
    linear = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
    linear |= {f"linear_{name}": 64 for name in ("key_head_dim", "value_head_dim")}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "mrope_section": [6, 5, 5]}
    return to.text(
        head_dim=64,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        rope_parameters={**rope, "partial_rotary_factor": 0.5},
        **linear,
    )


def make(name: str, out: Path) -> Recipe:
    """Writes the checkpoint `name` to the folder `out`, unless it is there."""
    from tests.models.recipes import RECIPES

    recipe = RECIPES[name]
    if not (out / "complete").exists():
        recipe.write(Draft(out))
        (out / "complete").touch()
    return recipe


def main(arguments: Sequence[str] | None = None) -> None:
    import_shim.activate()
    parser = argparse.ArgumentParser(description="Write small random checkpoints.")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    for name in given.names:
        make(name, given.out / name)


if __name__ == "__main__":
    main()
