"""Servers as child processes that leave nothing behind: not on failure, not on Ctrl-C, not when pytest itself dies."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

LOG_TAIL_LINES = 60
STOP_GRACE_S = 25.0
LAUNCH = Path(__file__).parent / "launch.py"


def family(pid: int) -> list[psutil.Process]:
    """The descendants of a process, parents first; none when it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def title(process: psutil.Process) -> str:
    """What `ps` shows: Ray and vLLM put the role of a process there. Empty once it is gone."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()
    return ""


class Server:
    """A child process in a session of its own, its output in a file.

    `command` starts with the path of a program.
    """

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str], folder: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(LAUNCH), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def stop(self) -> None:
        """Asks as Ctrl-C does, and after a grace time kills whatever is left of the family."""
        started_by_it = family(self.pid)
        if self.running:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_GRACE_S)
        started_by_it += family(self.pid)
        if self.running:
            self._process.kill()
            self._process.wait()
        for process in started_by_it:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started_by_it, timeout=STOP_GRACE_S)
