"""Kernels without a GPU: Triton's interpreter runs them, block by block in Python, in processes of their own.

Triton decides at import whether it interprets. Importing takes longer than most scripts, so one process imports, and
each script runs in a fork of it.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import IO, Any

from configs.resolve import PROJECT_ROOT

Interpreted = Callable[..., str]
"""Runs a script. Takes its source and its `sys.argv[1:]`, returns what it prints; AssertionError with its errors where
it fails."""


@contextmanager
def interpreter() -> Iterator[Interpreted]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.unit.encoder.interpreter"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=PROJECT_ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        scripts, answers = process.stdin, process.stdout

        def run(script: str, *arguments: str) -> str:
            print(json.dumps([script, arguments]), file=scripts, flush=True)
            status, output, errors = json.loads(answers.readline())
            assert status == 0, f"status {status}:\n{output}\n{errors}"
            return str(output).strip()

        yield run
        scripts.close()  # which ends it


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from deployments.vllm import import_shim

    import_shim.activate()
    _patch_once_a_launch()
    import tests.parity.reference_towers  # noqa: F401

    for line in sys.stdin:
        script, arguments = json.loads(line)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if child == 0:
                _run(script, arguments, output, errors)
            _, status = os.waitpid(child, 0)
            output.seek(0)
            errors.seek(0)
            told = [os.waitstatus_to_exitcode(status), output.read(), errors.read()]
        print(json.dumps(told), file=answers, flush=True)


def _run(script: str, arguments: list[str], output: IO[str], errors: IO[str]) -> None:
    """In a fork, which it ends."""
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    status = 1
    try:
        sys.argv[1:] = arguments
        exec(script, {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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


if __name__ == "__main__":
    _serve()
