"""Turns the import hook of `sitecustomize.py` on: here, and in every process started from here.

It must not import torch, vLLM or Ray.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

FOLDER = Path(__file__).parent


def activate() -> None:
    """Idempotent. Call it before vLLM or transformers are imported; a healthy installation is not affected."""
    importlib.import_module("deployments.import_shim.sitecustomize").install()
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(FOLDER) not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *inherited])
