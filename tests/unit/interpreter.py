"""Kernels without a GPU: Triton's interpreter runs them, block by block in Python, in a process of its own.

Triton decides at import whether it interprets. It must not know the kernels.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_BEGIN = "from tests.unit.interpreter import begin\nbegin()\n"


def interpreted(script: str, *arguments: str) -> str:
    """What the script prints; AssertionError with its errors where it fails. `arguments` are its `sys.argv[1:]`."""
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + script, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-500:]}{done.stderr[-3000:]}"
    return done.stdout.strip()


def begin() -> None:
    """In the script's process, before anything else is imported."""
    from deployments import import_shim

    import_shim.activate()
    _patch_once_a_launch()


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
