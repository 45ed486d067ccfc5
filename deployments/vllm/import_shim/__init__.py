"""Activates the import hook of `sitecustomize.py` in this process and in every process started from it.

This module must not import torch, vLLM or Ray.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

FOLDER = Path(__file__).parent


def activate() -> None:
    """Must be called before vLLM or transformers are imported. Idempotent; does not affect a working installation."""
    importlib.import_module("deployments.vllm.import_shim.sitecustomize").install()
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(FOLDER) not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *inherited])
