"""What `make test` runs: every test once, and what fails shows in the exit status."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from scripts import run_tests

ROOT = run_tests.ROOT


def runs(share: Sequence[str], file: Path) -> bool:
    """As pytest reads such arguments."""
    ignored = [ROOT / part.removeprefix("--ignore=") for part in share if part.startswith("--ignore=")]
    globs = [str(ROOT / part.removeprefix("--ignore-glob=")) for part in share if part.startswith("--ignore-glob=")]
    taken = [ROOT / part for part in share if not part.startswith("--")]
    return (
        any(map(file.is_relative_to, taken))
        and not any(map(file.is_relative_to, ignored))
        and not any(fnmatch(str(file), glob) for glob in globs)
    )


def test_every_file_of_tests_is_in_one_share() -> None:
    files = sorted(file for file in (ROOT / "tests").rglob("test_*.py") if file.parent.name != "gpu")
    shares = (run_tests.OTHERS, run_tests.SERVERS, run_tests.CLUSTERS)
    assert len(files) > 100
    assert {str(file): sum(runs(share, file) for share in shares) for file in files} == {str(file): 1 for file in files}


def test_one_share_has_all_that_asks_for_a_cluster() -> None:
    """The cluster is started once. Those who ask for its fixtures name their types."""
    asks = re.compile(r"^from tests\.cluster\.served import .*\b(Cluster|ServedApp)\b", re.MULTILINE)
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if asks.search(file.read_text())]
    assert len(files) > 5
    assert [file.name for file in files if not runs(run_tests.CLUSTERS, file)] == []


def test_what_runs_may_keep_what_it_compiles(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    program = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode, flush=True)"]
    assert run_tests.run(program, program, background=program) == 0
    assert capfd.readouterr().out.split() == ["False"] * 3


def test_clusters_go_before_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, "-c", "import os; print(os.nice(0), os.environ['RAY_worker_niceness'], flush=True)"]
    assert run_tests.run(program, background=program) == 0
    own, worker, other, _ = map(int, capfd.readouterr().out.split())
    assert own < own + worker < other


def saying(text: str, status: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; print({text!r}, flush=True); sys.exit({status})"]


@pytest.mark.parametrize("statuses", [(0, 0, 0), (3, 0, 0), (0, 4, 0), (0, 0, 5), (3, 4, 5)])
def test_all_run_in_any_case_and_one_that_fails_is_told(
    statuses: tuple[int, int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    commands = [saying(name, status) for name, status in zip(("first", "second", "third"), statuses, strict=True)]
    assert run_tests.run(*commands[:2], background=commands[2]) == max(
        statuses, key=lambda status: (status > 0, -status)
    )
    assert capfd.readouterr().out.split() == ["first", "second", "third"]


def test_who_stops_it_stops_what_runs_beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches all; where it reached the first alone, the second would go on."""
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    program = (
        # Of what a shell runs in the background the signal is ignored.
        "import pathlib, signal, sys, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try: pathlib.Path(sys.argv[1]).touch(); time.sleep(600)\n"
        "except KeyboardInterrupt: pathlib.Path(sys.argv[2]).touch()\n"
    )

    def interrupted(*_: object, **__: object) -> None:
        while not begun.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    monkeypatch.setattr(run_tests, "STOP_GRACE_S", 120.0)
    with pytest.raises(KeyboardInterrupt):
        run_tests.run([], background=[sys.executable, "-c", program, str(begun), str(ended)])
    assert ended.exists()


def test_arguments_narrow_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def noted(command: list[str], **_: object) -> object:
        asked.append(command[1:])
        return type("Done", (), {"returncode": 7})

    monkeypatch.setattr(subprocess, "run", noted)
    assert run_tests.main(["tests/unit", "-k", "packing"]) == 7
    assert asked == [["-m", "pytest", "tests/unit", "-k", "packing"]]
