"""`make test`: all tests, those that start no Ray cluster in two processes side by side, then the others alone.

The two keep a core each busy. What starts clusters and language models gets the machine to itself afterwards. Options
narrow the tests, which then run in one process: `python scripts/run_tests.py tests/unit -k packing`. Python keeps what
it compiles, whatever the environment says: every replica and every program of a test imports the same sources. It must
not know what is tested.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEPLOYMENTS = "tests/unit/deployments"
ON_CLUSTERS = ("test_chaos.py", "test_encode_fleet.py", "test_hedging.py", "test_served_*.py", "test_two_nodes.py")
"""Of `DEPLOYMENTS`, what starts a cluster."""
PARTS = ("tests/unit", f"--ignore={DEPLOYMENTS}")
OTHERS = (
    *("tests", "--ignore=tests/serve", "--ignore-glob=tests/unit/test_*.py"),
    *(f"--ignore-glob={DEPLOYMENTS}/{name}" for name in ON_CLUSTERS),
)
"""Paths of pytest; with `clusters()` all tests."""
STOP_GRACE_S = 10.0


def clusters() -> list[str]:
    """Paths of pytest: what starts a cluster or a language model."""
    files = sorted(path for name in ON_CLUSTERS for path in (ROOT / DEPLOYMENTS).glob(name))
    return [*(path.relative_to(ROOT).as_posix() for path in files), "tests/serve"]


def run(first: Sequence[str], second: Sequence[str], then: Sequence[str]) -> int:
    """Two commands side by side, what the second prints after the first, and a third after both; all run in any case.

    The exit status of the first of them that failed, else 0.
    """
    given = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as printed:
        beside = subprocess.Popen(
            second, cwd=ROOT, env=given, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT
        )
        try:
            statuses = [subprocess.run(first, cwd=ROOT, env=given, check=False).returncode, beside.wait()]
        finally:
            _end(beside)
        printed.seek(0)
        sys.stdout.flush()
        while piece := printed.read(65_536):
            sys.stdout.buffer.write(piece)
        sys.stdout.flush()
    statuses.append(subprocess.run(then, cwd=ROOT, env=given, check=False).returncode)
    return next((status for status in statuses if status != 0), 0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, where it still runs."""
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
    return run([*pytest, *PARTS], [*pytest, *OTHERS], [*pytest, *clusters()])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
