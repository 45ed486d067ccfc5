"""Lets vLLM and transformers import torch's media packages where their compiled halves do not fit the torch installed.

A CPU-only torch next to CUDA builds of torchvision, torchaudio and torchcodec fails at import ("operator
torchvision::nms does not exist", "Could not load this library: …"), and the Qwen modules of vLLM and transformers
import them without ever calling those operators. Put this folder on PYTHONPATH: Python runs `sitecustomize` in every
process, the ones that vLLM spawns included. Packages that work are left alone. This file must not know anything of the
rest of the project, and imports nothing heavy itself.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # torch drops the schemas when the last reference to their library goes


def _define_torchvision_schemas() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for schema in _TORCHVISION_SCHEMAS:
        library.define(schema)
    _libraries.append(library)


class _TolerantLoader(Loader):
    """Runs the package's own loader and mends the one failure that is known for that package."""

    def __init__(self, wrapped: Loader) -> None:
        self._wrapped = wrapped

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._wrapped.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._wrapped.exec_module(module)
        except RuntimeError as error:
            if module.__name__ != "torchvision" or "torchvision::" not in str(error):
                raise
            _define_torchvision_schemas()
            for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                del sys.modules[name]  # half-initialised by the failed attempt
            self._wrapped.exec_module(module)
        except OSError as error:
            if module.__name__ == "torchvision" or "Could not load this library" not in str(error):
                raise
            if module.__name__ == "torchcodec":  # optional for those who import it, and they say so by ImportError
                raise ImportError(str(error)) from error
            # torchaudio stays without its operators: transformers imports it unguarded, and audio is not served.


class _Finder(MetaPathFinder):
    """Finds the three packages as usual and wraps their loaders; every other import passes by."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in ("torchvision", "torchaudio", "torchcodec"):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _TolerantLoader(spec.loader)
        return spec


def install() -> None:
    """Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


install()
