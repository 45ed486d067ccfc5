"""Small checkpoints with random weights in the Hugging Face layout, complete and valid, for tests and first steps.

    python -m training.checkpoints --arch qwen3_vl --out checkpoints/qwen3_vl

The same arguments give the same bytes on any machine. The weights are scaled so that the answer depends on the
picture: attention is neither flat nor saturated, and a picture's tokens weigh more than the text's. What it answers is
noise all the same.
Must not know anything of serving, nor of transformers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from training.architectures import ARCHITECTURES, config_of, preprocessors_of, shapes_of
from training.chat_samples import SAMPLES

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16")
# By the end of a matrix's name, how large its outputs are (standard deviation) for inputs of unit variance: keys and
# queries so that attention prefers some tokens, values and the mergers' last layers so that pictures outweigh the
# constant rest, the head so that bf16's rounding of the logits stays near 1e-2. Chosen by the shift of the first
# token's log-probability between pictures (0.1 to 0.9) over its rounding error in bf16 (0.015).
_GAINS = {
    "q_proj.weight": 1.5,
    "k_proj.weight": 1.5,
    "v_proj.weight": 2.0,
    "o_proj.weight": 2.0,
    "qkv.weight": 1.5,
    "merger.mlp.2.weight": 3.0,
    "merger.linear_fc2.weight": 3.0,
    "deepstack_merger_list.0.linear_fc2.weight": 3.0,
    "deepstack_merger_list.1.linear_fc2.weight": 3.0,
    "lm_head.weight": 0.7,
}
_VOCAB_SIZE = 512
_RECIPE = "recipe.json"


def make_checkpoint(arch: str, out: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Writes a checkpoint with random weights to `out`; one of the same recipe that is already there is kept.

    The folder appears at once and complete, or not at all; several processes may make the same one.

    Args:
        arch: "qwen2_5_vl" or "qwen3_vl".
        dtype: of the stored tensors, "float32" or "bfloat16".

    Raises:
        ValueError: unknown `arch` or `dtype`.
        FileExistsError: `out` is there and is not a checkpoint made by this function.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {arch!r}, one of {', '.join(ARCHITECTURES)}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}, one of {', '.join(DTYPES)}")
    out = Path(out)
    recipe = {"arch": arch, "seed": seed, "dtype": dtype, "source": _source_digest()}
    if _recipe_of(out) == recipe:
        return out
    if out.exists() and _recipe_of(out) is None and any(out.iterdir()):
        raise FileExistsError(f"{out} exists and is not a checkpoint of this command: name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        fresh = scratch / "fresh"
        fresh.mkdir()
        _write(fresh, arch, seed=seed, dtype=dtype)
        (fresh / _RECIPE).write_text(json.dumps(recipe, indent=2) + "\n")
        if out.exists() and _recipe_of(out) != recipe:
            out.rename(scratch / "stale")
        try:
            fresh.rename(out)
        except OSError:
            if _recipe_of(out) != recipe:  # else another process was quicker with the same bytes
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return out


def _recipe_of(folder: Path) -> object | None:
    try:
        return json.loads((folder / _RECIPE).read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return None


def _source_digest() -> str:
    """Changes with whatever decides the bytes, so that a checkpoint of an older version is made anew."""
    here = Path(__file__).parent
    names = ("architectures.py", "chat_samples.py", "chat_template.jinja", "checkpoints.py", "tokenizer.py")
    return hashlib.sha256(b"\0".join((here / name).read_bytes() for name in names)).hexdigest()


def _write(folder: Path, arch: str, *, seed: int, dtype: str) -> None:
    # Imported here: a checkpoint that is already there is found without them.
    from safetensors.torch import save_file

    from training.tokenizer import save_tokenizer, train_tokenizer

    tokenizer = train_tokenizer(SAMPLES, vocab_size=_VOCAB_SIZE)
    config = config_of(arch, vocab_size=_VOCAB_SIZE, token_ids=tokenizer.get_vocab(), dtype=dtype)
    image, video = preprocessors_of(arch)
    generation = {
        "do_sample": False,
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "eos_token_id": [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")],
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("preprocessor_config.json", image),
        ("video_preprocessor_config.json", video),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    save_tokenizer(tokenizer, folder, processor_class=image["processor_class"], max_length=8192)
    tensors = {name: random_tensor(name, shape, seed, dtype) for name, shape in shapes_of(config).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library writes it for its owner alone


def random_tensor(name: str, shape: tuple[int, ...], seed: int, dtype: str) -> torch.Tensor:
    """A tensor decided by its name, its shape and the seed alone.

    Uniform and not normal numbers: those come from the generator's bits by one exact division, where a logarithm or a
    sine may differ between machines in the last bit.
    """
    import numpy as np
    import torch

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    unit = (generator.random(shape, dtype=np.float32) - np.float32(0.5)) * np.float32(12**0.5)  # variance 1
    if len(shape) == 1:
        # Away from 1 and 0, so that a norm or a bias that is left out is noticed.
        centre = 0.0 if name.endswith(".bias") else 1.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        values = unit * np.float32(0.1) + np.float32(centre)
    elif name.endswith("embed_tokens.weight"):
        values = unit
    elif name.endswith("pos_embed.weight"):
        values = unit * np.float32(0.3)
    else:
        gain = next((gain for end, gain in _GAINS.items() if name.endswith(end)), 1.0)
        values = unit * np.float32(gain * int(np.prod(shape[1:])) ** -0.5)
    return torch.from_numpy(values).to(getattr(torch, dtype))


def main(arguments: list[str] | None = None) -> int:
    """The command line; prints the folder that it wrote or found."""
    parser = argparse.ArgumentParser(prog="python -m training.checkpoints", description="Make a small checkpoint.")
    parser.add_argument("--arch", required=True, choices=ARCHITECTURES)
    parser.add_argument("--out", required=True, type=Path, help="folder to write, made if missing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    chosen = parser.parse_args(arguments)
    try:
        print(make_checkpoint(chosen.arch, chosen.out, seed=chosen.seed, dtype=chosen.dtype))
    except FileExistsError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
