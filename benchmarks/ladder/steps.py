"""Runs commands one after the other with a time limit each, so that a session ends in time with partial results.

A step that fails or is cut short does not stop the next.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.record import ROOT, gpu, provenance, save, write

MOST_LOG_BYTES = 1_000_000
_LEAST_S = 20.0
"""Seconds that must be left to begin a step."""
_RESERVE_S = 20.0
_GRACE_S = 10.0
"""Seconds that a step has to end its own child processes when it is cut short."""
MINUTES = "MINUTES"
"""Placeholder in a command: minutes within which the step may begin new work, from its own limit."""


@dataclass(frozen=True)
class Step:
    """A command run as a process, and the share of the remaining time that it may take."""

    name: str
    command: tuple[str, ...]
    share: float
    shown_lines: int = 60
    begin_share: float = 0.8
    """Share of the step's limit that is passed as MINUTES."""


@dataclass(frozen=True)
class Done:
    """Result of a step. `status`: the exit status, None if it was not begun."""

    name: str
    status: int | None
    seconds: float
    limit_s: float
    timed_out: bool


def run(step: Step, folder: Path, limit_s: float) -> Done:
    """Runs a step with its output in FOLDER/NAME.log; kills its process group at the time limit."""
    began = time.monotonic()
    log = folder / f"{step.name}.log"
    timed_out = False
    with log.open("wb") as out:
        minutes = f"{step.begin_share * limit_s / 60:.2f}"
        command = [minutes if part == MINUTES else part for part in step.command]
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(_GRACE_S)
        finally:
            # Child processes of a step are killed, whether or not it has exited.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    shorten(log)
    return Done(step.name, process.returncode, time.monotonic() - began, limit_s, timed_out)


def shorten(log: Path) -> None:
    """Reduces a log over the limit to its beginning and end."""
    content = log.read_bytes()
    if len(content) > MOST_LOG_BYTES:
        half = MOST_LOG_BYTES // 2
        log.write_bytes(content[:half] + b"\n[...]\n" + content[-half:])


def run_all(planned: Sequence[Step], folder: Path, seconds: float) -> list[Done]:
    """Runs the steps in order, none beyond `seconds` from now."""
    end = time.monotonic() + seconds
    found: list[Done] = []
    for step in planned:
        limit_s = (end - time.monotonic()) * step.share
        if limit_s < min(_LEAST_S, seconds / 10):
            found.append(Done(step.name, None, 0.0, limit_s, timed_out=False))
            continue
        print(f"{step.name}: at most {limit_s:.0f} s: {' '.join(step.command)}", flush=True)
        found.append(run(step, folder, limit_s))
    return found


def tail(log: Path, lines: int) -> str:
    """Returns the last lines, without one-line results, which have their own file."""
    if not log.exists():
        return ""
    text = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith('{"benchmark"')]
    return "\n".join(line[:300] for line in text[-lines:])


def chosen(planned: Sequence[Step], only: str | None) -> list[Step]:
    """Returns the steps that `only` names, separated by commas, or all; the last may take all the remaining time.

    Raises:
        ValueError: there is no such step.
    """
    named = only.split(",") if only else [step.name for step in planned]
    if unknown := sorted(set(named) - {step.name for step in planned}):
        raise ValueError(
            f"--only names {', '.join(unknown)}; the steps here: {', '.join(step.name for step in planned)}"
        )
    found = [step for step in planned if step.name in named]
    return [*found[:-1], replace(found[-1], share=1.0)]


def session(
    name: str,
    planned: Sequence[Step],
    folder: Path,
    *,
    minutes: float,
    commit: str | None,
    arguments: Sequence[str] | None,
) -> int:
    """Runs the steps within `minutes`; writes logs and `session.json` to `folder` and prints their ends.

    Returns the exit status: 0 if every step ended with 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = run_all(planned, folder, 60 * minutes - _RESERVE_S)
    report = {
        "benchmark": name,
        "gpu": gpu(),
        "steps": [asdict(done) for done in found],
        **provenance(commit, arguments),
    }
    save(report, folder / "session.json")
    for step, done in zip(planned, found, strict=True):
        print(
            f"\n===== {step.name}: status {done.status}, {done.seconds:.0f} s"
            + (", cut short" if done.timed_out else "")
        )
        print(tail(folder / f"{step.name}.log", step.shown_lines))
    write(report, None)
    return 0 if all(done.status == 0 for done in found) else 1
