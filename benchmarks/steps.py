"""Commands one after the other, each with a time limit, so that a session ends in time with what it has.

A step that fails or is cut short does not stop the next. It must not know what the steps do.
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
"""A step is not begun with less time than this left."""
_RESERVE_S = 20.0
_GRACE_S = 10.0
"""What a step that is cut short has to end what it started itself."""
MINUTES = "MINUTES"
"""In a command: what the step's own limit leaves it to begin new work in."""


@dataclass(frozen=True)
class Step:
    """A command of its own process, and the share of the time left that it may take."""

    name: str
    command: tuple[str, ...]
    share: float
    shown_lines: int = 60
    begin_share: float = 0.8
    """Of its limit, what it is told as MINUTES."""


@dataclass(frozen=True)
class Done:
    """How a step went. `status`: the exit status, None where it was not begun."""

    name: str
    status: int | None
    seconds: float
    limit_s: float
    timed_out: bool


def run(step: Step, folder: Path, limit_s: float) -> Done:
    """Runs a step with its output in FOLDER/NAME.log; ends its whole process group when the time is over."""
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
            # What a step started goes with it, ended or not.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    shorten(log)
    return Done(step.name, process.returncode, time.monotonic() - began, limit_s, timed_out)


def shorten(log: Path) -> None:
    """Keeps the beginning and the end of a log that has grown too long."""
    content = log.read_bytes()
    if len(content) > MOST_LOG_BYTES:
        half = MOST_LOG_BYTES // 2
        log.write_bytes(content[:half] + b"\n[...]\n" + content[-half:])


def run_all(planned: Sequence[Step], folder: Path, seconds: float) -> list[Done]:
    """The steps in order, none beyond `seconds` from now."""
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
    """The last lines, without a result of one line, which has a file of its own."""
    if not log.exists():
        return ""
    text = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith('{"benchmark"')]
    return "\n".join(line[:300] for line in text[-lines:])


def chosen(planned: Sequence[Step], only: str | None) -> list[Step]:
    """The steps that `only` names, separated by commas, or all; the last may take all the time that is left.

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
    """Runs the steps within `minutes`; logs and `session.json` come to lie in `folder`, their ends on stdout.

    Returns the exit status: 0 where every step ended with 0.
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
