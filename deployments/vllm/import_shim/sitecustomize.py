"""Lets vLLM and transformers import torch's media packages if their compiled parts do not fit the installed torch.

A CPU-only torch next to CUDA builds of torchvision, torchaudio and torchcodec fails at import ("operator
torchvision::nms does not exist", "Could not load this library: …"), and the Qwen modules of vLLM and transformers
import them without ever calling those operators. With this folder on PYTHONPATH, Python runs `sitecustomize` in every
process, including those that vLLM spawns. Working packages are not affected.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # torch drops the schemas with the last reference to their library


def _define_torchvision_schemas() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for schema in _TORCHVISION_SCHEMAS:
        library.define(schema)
    _libraries.append(library)


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Runs the package's own loader and works around the one failure that is known for that package."""
    try:
        execute(module)
    except RuntimeError as error:
        if module.__name__ != "torchvision" or "torchvision::" not in str(error):
            raise
        _define_torchvision_schemas()
        for name in [name for name in sys.modules if name.startswith("torchvision.")]:
            del sys.modules[name]  # half-initialised by the failed attempt
        execute(module)
    except OSError as error:
        if module.__name__ == "torchvision" or "Could not load this library" not in str(error):
            raise
        if module.__name__ == "torchcodec":  # optional for its importers, which catch ImportError
            raise ImportError(str(error)) from error
        # transformers imports torchaudio unguarded. What needs no compiled operators, such as resampling, works.
        if (utils := sys.modules.get("torchaudio._extension.utils")) is not None:
            setattr(utils, "_load_lib", lambda _: False)  # noqa: B010
            execute(module)


class _Finder(MetaPathFinder):
    """Finds the three packages as usual and wraps how they are run; ignores every other import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in ("torchvision", "torchaudio", "torchcodec"):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Installs the import hook. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def run_next_sitecustomize() -> None:
    """Runs the `sitecustomize` that this one shadows on `sys.path`, if there is one."""
    here = Path(__file__).resolve().parent
    rest = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


install()
if __name__ == "sitecustomize":  # Python imported it at start-up, in place of the next one on the path
    run_next_sitecustomize()
