"""Kernels without a GPU: Triton's interpreter runs them, block by block in Python, in a process of its own.

Triton decides at import whether it interprets. It must not know the kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.programs import output_of_python

_BEGIN = "from tests.unit.interpreter import begin\nbegin()\n"


def interpreted(script: str, *arguments: str) -> str:
    """What the script prints; AssertionError with its errors where it fails. `arguments` are its `sys.argv[1:]`."""
    return output_of_python(_BEGIN + script, *arguments, TRITON_INTERPRET="1", OMP_NUM_THREADS="1").strip()


def begin() -> None:
    """In the script's process, before anything else is imported."""
    from deployments import import_shim

    import_shim.activate()
    _patch_once_a_launch()


def many_rows_a_block(module: ModuleType, kernel: str, rows: int = 16) -> None:
    """Launches a kernel of `module` with `ROWS` of so many, and as many fewer blocks: what takes time here is their
    number. Blocks that stick out at the end are the kernel's to mask, of one row or of many."""
    launched = getattr(module, kernel)

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            def launch(*arguments: object, **constants: Any) -> object:
                blocks = -(-grid[0] * constants["ROWS"] // rows)
                return launched[(blocks, *grid[1:])](*arguments, **{**constants, "ROWS": rows})

            return launch

    setattr(module, kernel, Launcher())


def many_rows_a_block_of_norms() -> None:
    """And of the passes to 8 bits: a tower's most launches."""
    from encoder.kernels import norm, scaled

    many_rows_a_block(norm, "_norm_kernel")
    many_rows_a_block(scaled, "_scaled_kernel")


def _patch_once_a_launch() -> None:
    """The interpreter puts its own functions into `triton.language` for each call of a function from a kernel, though
    they are there already: a third of the time."""
    from triton import language
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    def missing(function: Callable[..., object]) -> set[str]:
        modules = (value for value in function.__globals__.values() if inspect.ismodule(value))
        return {module.__name__ for module in modules if module in (language, language.core)} - patched

    def patch_once(function: Callable[..., object]) -> Any:
        if not (found := missing(function)):
            return None  # a kernel's own, whose result is what takes them out again, is always the first
        patched.update(found)
        return patch(function)

    def launch_anew(self: Any, *arguments: object, **named: object) -> None:
        patched.clear()
        launch(self, *arguments, **named)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew
