"""Everything that needs one GPU, in one go: `python3 benchmarks/gpu_session.py FOLDER`.

The GPU tests, then the ladder of both towers beside transformers, each with a time limit, so that the whole ends within
`--minutes`; a step that fails or is cut short does not stop the next. At most eight files come to lie in FOLDER, and
what the steps print in the end is printed again last. Needs no Ray and no vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.record import ROOT, gpu, provenance, save, write
from benchmarks.rungs import HOPPER_PACKAGES

MOST_LOG_BYTES = 1_000_000
_LEAST_S = 20.0
"""A step is not begun with less time than this left."""
_RESERVE_S = 15.0
MINUTES = "MINUTES"
"""In a command: what the step's own limit leaves it to begin new work in."""
_BEGIN_SHARE = 0.8


@dataclass(frozen=True)
class Step:
    """A command of its own process, and the share of the time left that it may take."""

    name: str
    command: tuple[str, ...]
    share: float
    shown_lines: int = 60


@dataclass(frozen=True)
class Done:
    """How a step went. `status`: the exit status, None where it was not begun."""

    name: str
    status: int | None
    seconds: float
    limit_s: float
    timed_out: bool


def steps(folder: Path, *, commit: str | None) -> list[Step]:
    """What is run, in order."""
    python = sys.executable
    tests = (python, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "--durations=10", "-p", "no:cacheprovider")

    def ladder(name: str, *options: str) -> tuple[str, ...]:
        given = ("--commit", commit) if commit else ()
        program = (python, "benchmarks/bench_encoder.py", "--minutes", MINUTES)
        return (*program, *options, "--out", str(folder / f"{name}.json"), *given)

    planned = [
        Step("tests", tests, share=0.45),
        Step("ladder", ladder("ladder", "--ladder", "--peers", "transformers"), share=1.0, shown_lines=70),
    ]
    if any(importlib.util.find_spec(name.partition(".")[0]) for name in HOPPER_PACKAGES):
        planned[1] = replace(planned[1], share=0.65)
        options = ("--only", "eager,cudagraph,fusion", "--without-hopper")
        planned.append(Step("ladder_before_hopper", ladder("ladder_before_hopper", *options), share=1.0))
    return planned


def run(step: Step, folder: Path, limit_s: float) -> Done:
    """Runs a step with its output in FOLDER/NAME.log; ends its whole process group when the time is over."""
    began = time.monotonic()
    log = folder / f"{step.name}.log"
    timed_out = False
    with log.open("wb") as out:
        minutes = f"{_BEGIN_SHARE * limit_s / 60:.2f}"
        command = [minutes if part == MINUTES else part for part in step.command]
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="GPU tests and the encoder's ladders in one go.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--commit", help="of the sources, where git is not there to say it")
    asked = parser.parse_args(arguments)
    folder: Path = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    planned = steps(folder, commit=asked.commit)
    found = run_all(planned, folder, 60 * asked.minutes - _RESERVE_S)
    report = {
        "benchmark": "gpu_session",
        "gpu": gpu(),
        "steps": [asdict(done) for done in found],
        **provenance(asked.commit, arguments),
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


if __name__ == "__main__":
    sys.exit(main())
