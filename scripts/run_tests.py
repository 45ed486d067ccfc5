"""`make test`: runs all tests in four processes side by side.

Tests that start clusters and language models take longest and often wait, for a process to start or to be replaced:
they are two of the four, and the other tests use the cores that this leaves idle. With options, which narrow the
tests, they run in one process: `python scripts/run_tests.py tests/unit -k packing`. Python's bytecode cache is always
on, because every replica and every program of a test imports the same sources.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVERS = ("tests/serve",)
CLUSTERS = ("tests/cluster",)
"""Folders of tests that start language models, and clusters."""
PARTS = ("tests/unit", "tests/models", "--ignore=tests/unit/deployments")
OTHERS = (
    *("tests", *(f"--ignore={folder}" for folder in ("tests/serve", "tests/cluster", "tests/models"))),
    *(
        f"--ignore=tests/unit/{path.name}"
        for path in sorted((ROOT / "tests/unit").iterdir())
        if path.name != "deployments"
    ),
)
"""pytest arguments that select, together with those above, all tests."""
STOP_GRACE_S = 10.0
BACKGROUND_NICENESS = 10
WORKER_NICENESS = 5
"""Niceness of Ray's workers, between Ray's own processes and the other tests. Ray's default, 15, starves replicas."""

REPORT_INTERVAL_MS = 60_000
"""Interval at which Ray's agent of each cluster reads the state of all processes of the host, of no use to a test."""


def run(first: Sequence[str], *beside: Sequence[str], background: Sequence[Sequence[str]] = ()) -> int:
    """Runs commands side by side to their end, those in `background` with a lower priority.

    Shows the first one's output immediately, then that of the others.

    Returns the exit status of the first command that failed, else 0.
    """
    given = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    given["RAY_worker_niceness"] = str(WORKER_NICENESS)
    given["REPORTER_UPDATE_INTERVAL_MS"] = str(REPORT_INTERVAL_MS)
    with ExitStack() as stack:
        commands = [*beside, *(["nice", "-n", str(BACKGROUND_NICENESS), *command] for command in background)]
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        others: list[subprocess.Popen[bytes]] = []
        for command, output in zip(commands, outputs, strict=True):
            others.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=given,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
            stack.callback(_end, others[-1])
        statuses = [subprocess.run(first, cwd=ROOT, env=given, check=False).returncode]
        for process, output in zip(others, outputs, strict=True):
            statuses.append(process.wait())
            output.seek(0)
            sys.stdout.flush()
            shutil.copyfileobj(output, sys.stdout.buffer)
            sys.stdout.flush()
    return next((status for status in statuses if status != 0), 0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupts the process, as Ctrl-C does, if it still runs."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(arguments: Sequence[str]) -> int:
    pytest = [sys.executable, "-m", "pytest"]
    if arguments:
        return subprocess.run([*pytest, *arguments], cwd=ROOT, check=False).returncode
    return run([*pytest, *SERVERS], [*pytest, *CLUSTERS], background=([*pytest, *PARTS], [*pytest, *OTHERS]))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
