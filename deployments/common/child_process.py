"""Child processes that a replica talks to over a pipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess


def spawn(run: Callable[..., None], *arguments: object, name: str) -> tuple[Connection, SpawnProcess]:
    """Starts `run` with its end of a pipe and `arguments` in a new process, and returns the other end. Reading raises
    EOFError once the process has ended. Raises OSError if the system has no process or file left."""
    ours, theirs = multiprocessing.Pipe()
    # Forking a process that uses CUDA or threads is not safe.
    process = multiprocessing.get_context("spawn").Process(
        target=run, args=(theirs, *arguments), name=name, daemon=True
    )
    try:
        process.start()
    finally:
        theirs.close()  # or reading would not raise EOFError when the process ends
    return ours, process
