"""Times a new user's first minutes: a fresh clone in a fresh environment, `make demo`, the first correct answer.

    python scripts/first_hour.py [--from .] [--keep]

Prints the seconds of each step; the last line on stdout is JSON. Exits with 1 if the answer is wrong or later than
`--minutes`. The clone inherits only the settings for pip and the network from this environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = re.compile(
    r"PATH|LANG|LC_\w+|PIP_\w+|\w+_proxy|NO_PROXY|HTTPS?_PROXY|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|TERM|PYTHON"
)
MARKS = (
    ("installation", re.compile(r"^vitray: ready after")),
    ("Ray", re.compile(r"\d s   Ray is up")),
    ("all replicas", re.compile(r"\d s   language model \(vLLM\) is up")),
    ("first answer", re.compile(r"^model  (?P<answer>.+?)   \(streamed\)")),
)
"""The lines of `make demo` that end its steps, in order."""
RIGHT = "A large red circle and a large blue square on a white background."


@dataclass(frozen=True)
class Step:
    """A step and its seconds since the end of the previous step."""

    name: str
    seconds: float


def environment(given: Mapping[str, str], home: Path) -> dict[str, str]:
    """Returns the environment of a new user's shell: only the variables in KEPT, without caches, with its own home."""
    return {name: value for name, value in given.items() if KEPT.fullmatch(name)} | {"HOME": str(home)}


def steps(lines: Iterator[str], clock: Iterator[float]) -> tuple[list[Step], str | None]:
    """Returns the completed steps, and the answer. `clock` yields the start time, then a time per line."""
    found: list[Step] = []
    answer = None
    last = next(clock)
    for line in lines:
        now = next(clock)
        if len(found) < len(MARKS) and (match := MARKS[len(found)][1].search(line)):
            found.append(Step(MARKS[len(found)][0], now - last))
            last = now
            answer = match.groupdict().get("answer", answer)
    return found, answer


def _clock() -> Iterator[float]:
    while True:
        yield time.monotonic()


def _printed(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        yield line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Clone, install, start, ask: with the seconds of each.")
    parser.add_argument(
        "--from", dest="source", default=str(ROOT), help="repository that git clones: a folder or a URL"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit until the first correct answer")
    parser.add_argument("--keep", action="store_true", help="keep the clone")
    asked = parser.parse_args(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="vitray-first-", dir="/tmp"))
    load = os.getloadavg()[0]
    try:
        (scratch / "home").mkdir()
        clean = environment(os.environ, scratch / "home")
        began = time.monotonic()
        subprocess.run(["git", "clone", "--quiet", asked.source, str(scratch / "vitray")], env=clean, check=True)
        cloned = Step("clone", time.monotonic() - began)
        process = subprocess.Popen(
            ["make", "demo"], cwd=scratch / "vitray", env=clean, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        found, answer = steps(_printed(process), _clock())
        status = process.wait()
        commit = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=scratch / "vitray",
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    finally:
        if asked.keep:
            print(f"the clone is in {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    every = [cloned, *found]
    seconds = sum(step.seconds for step in every)
    good = status == 0 and answer == RIGHT and seconds <= 60 * asked.minutes
    print()
    for step in every:
        print(f"{step.seconds:7.1f} s  {step.name}")
    print(f"{seconds:7.1f} s  from clone to first answer: {answer}")
    result = {
        "steps": {step.name: round(step.seconds, 1) for step in every},
        "seconds": round(seconds, 1),
        "answer": answer,
        "right": answer == RIGHT,
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "python": sys.version.split()[0],
        "commit": commit,
    }
    print(json.dumps(result))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
