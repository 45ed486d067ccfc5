"""`make test`: runs all tests in three processes, two at a time.

Tests that start clusters and language models take longest and often wait, for a process to start or to be replaced:
they run one after the other, and beside them the other tests, which use the cores that this leaves idle. With options,
which narrow the tests, they run in one process: `python scripts/run_tests.py tests/unit -k packing`. Python's bytecode
cache is always on, because every replica and every program of a test imports the same sources.
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
APART = (
    "tests/serve/test_generic_models.py",
    "tests/serve/test_media.py",
    "tests/cluster/test_served_haproxy.py",
)
"""Tests of these folders that start servers of their own. They run among the others, so that both processes take about
as long."""
SERVERS, CLUSTERS = (
    (folder, *(f"--ignore={file}" for file in APART if file.startswith(folder)))
    for folder in ("tests/serve", "tests/cluster")
)
"""pytest arguments that select tests that start language models, and clusters."""
OTHERS = (
    *sorted(
        f"tests/{path.name}"
        for path in (ROOT / "tests").iterdir()
        if path.name not in ("serve", "cluster", "gpu", "__pycache__") and (path.is_dir() or path.match("test_*.py"))
    ),
    *APART,
)
"""pytest arguments that select, together with those above, all tests but tests/gpu."""
STOP_GRACE_S = 10.0
BACKGROUND_NICENESS = 10
WORKER_NICENESS = 5
"""Niceness of Ray's workers, between Ray's own processes and the other tests. Ray's default, 15, starves replicas."""

REPORT_INTERVAL_MS = 60_000
"""Interval at which Ray's agent of each cluster reads the state of all processes of the host, of no use to a test."""

QUEUE_LENGTH_DEADLINE_S = 5.0
"""Time in which a replica reports its queue to Serve's router before that chooses another one."""


def run(*commands: Sequence[str], background: Sequence[str]) -> int:
    """Runs the commands one after the other to their end, beside them one in the background with a lower priority.

    Shows the output of the commands immediately, then that of the other.

    Returns the exit status of the first command that failed, else 0.
    """
    given = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    given["RAY_worker_niceness"] = str(WORKER_NICENESS)
    given["REPORTER_UPDATE_INTERVAL_MS"] = str(REPORT_INTERVAL_MS)
    given["RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = str(QUEUE_LENGTH_DEADLINE_S)
    with ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        other = subprocess.Popen(
            ["nice", "-n", str(BACKGROUND_NICENESS), *background],
            cwd=ROOT,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        stack.callback(_end, other)
        statuses = [subprocess.run(command, cwd=ROOT, env=given, check=False).returncode for command in commands]
        statuses.append(other.wait())
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
    return run([*pytest, *SERVERS], [*pytest, *CLUSTERS], background=[*pytest, *OTHERS])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
