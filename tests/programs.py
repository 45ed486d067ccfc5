"""Programs that a test runs to their end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.resolve import PROJECT_ROOT

_LINES_TOLD = 60


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
