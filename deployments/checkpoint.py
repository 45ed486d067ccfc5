"""From the name of a model to what a replica loads. It must not know of Ray.

A relative folder is looked up in the working directory first, then beside this project; the small checkpoints that the
project makes itself are made where they are missing, the same on every node, since they follow from a seed.
"""

from __future__ import annotations

from pathlib import Path

from configs.resolve import PROJECT_ROOT

# Folder -> architecture of the checkpoints that `training.checkpoints` makes in a second.
MADE_ON_DEMAND = {"checkpoints/tiny-qwen3-vl": "qwen3_vl", "checkpoints/tiny-qwen2-5-vl": "qwen2_5_vl"}


def local_model(model: str) -> str:
    """A folder where `model` names one, else `model` itself: a hub name."""
    for base in (Path.cwd(), PROJECT_ROOT):
        if (base / model / "config.json").is_file():
            return str(base / model)
    if model in MADE_ON_DEMAND:
        from training.checkpoints import make_checkpoint

        return str(make_checkpoint(MADE_ON_DEMAND[model], PROJECT_ROOT / model))
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise FileNotFoundError(
            f"model {model!r}: no such checkpoint folder (a folder with a config.json), and not a hub name (owner/name)"
        )
    return model
