"""Resolves a model name to the folder or the hub name that a replica loads.

A relative folder is looked up in the working directory first, then in this project's folder.
"""

from __future__ import annotations

from pathlib import Path

from configs.resolve import PROJECT_ROOT


def local_model(model: str) -> str:
    """Returns the folder that `model` names, else `model` itself, a hub name."""
    for base in (Path.cwd(), PROJECT_ROOT):
        if (base / model / "config.json").is_file():
            return str(base / model)
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise FileNotFoundError(
            f"model {model!r}: no such checkpoint folder (a folder with a config.json), and not a hub name (owner/name)"
        )
    return model
