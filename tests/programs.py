"""Programs that a test runs to their end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from configs.resolve import PROJECT_ROOT

T = TypeVar("T")
_LINES_TOLD = 60
RAY_STARTS = 3
RAY_TIMED_OUT = "The current node timed out during startup"
"""Ray's error where its processes have not started in 30 s, which it has no setting for: a busy machine needs more."""


def start_ray(start: Callable[[], T]) -> T:
    """The result of `start`, which starts a node of Ray, up to RAY_STARTS times while Ray's own time is too short."""
    for _ in range(RAY_STARTS - 1):
        try:
            return start()
        except Exception as error:
            if RAY_TIMED_OUT not in str(error):
                raise
    return start()


def output_of(command: Sequence[str | Path], *, folder: Path = PROJECT_ROOT, **environment: str) -> str:
    """What a program prints. `environment` comes on top of this process's.

    AssertionError with the end of what it printed, its errors last, where it ends with another status than 0.
    """
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command[0]}, status {done.returncode}:\n{_end(done.stdout)}\n{_end(done.stderr)}"
    return done.stdout


def output_of_python(program: str, *arguments: str, folder: Path = PROJECT_ROOT, **environment: str) -> str:
    """The same of Python source; `arguments` are its `sys.argv[1:]`."""
    return output_of([sys.executable, "-c", program, *arguments], folder=folder, **environment)


def _end(text: str) -> str:
    return "\n".join(text.splitlines()[-_LINES_TOLD:])


def free_port() -> int:
    """A TCP port that nobody listens on. Serve would share one with another Serve without a word (SO_REUSEPORT)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
