"""Runs all measurements that need one GPU: `python3 benchmarks/ladder/gpu_session.py FOLDER`.

Runs the GPU tests, then the ladder of both towers with transformers as a peer. Each step has a time limit, so that all
end within `--minutes`; a step that fails or is cut short does not stop the next. Writes at most eight files to FOLDER,
and prints the last lines of the steps again at the end. Needs no Ray; needs vLLM only for `--peers transformers,vllm`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ladder.rungs import HOPPER_PACKAGES
from benchmarks.ladder.steps import MINUTES, Step, chosen, session


def steps(folder: Path, *, commit: str | None, peers: str = "transformers") -> list[Step]:
    """Returns the available steps in order."""
    python = sys.executable
    tests = (python, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "--durations=10", "-p", "no:cacheprovider")

    def ladder(name: str, *options: str) -> tuple[str, ...]:
        given = ("--commit", commit) if commit else ()
        program = (python, "benchmarks/bench_encoder.py", "--minutes", MINUTES)
        return (*program, *options, "--out", str(folder / f"{name}.json"), *given)

    planned = [
        Step("tests", tests, share=0.45),
        Step("ladder", ladder("ladder", "--ladder", "--peers", peers), share=1.0, shown_lines=70),
    ]
    if any(importlib.util.find_spec(name.partition(".")[0]) for name in HOPPER_PACKAGES):
        planned[1] = replace(planned[1], share=0.65)
        options = ("--only", "eager,cudagraph,fusion", "--without-hopper")
        planned.append(Step("ladder_before_hopper", ladder("ladder_before_hopper", *options), share=1.0))
    return planned


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="GPU tests and the encoder's ladders in one go.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole run")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    parser.add_argument("--peers", default="transformers", help="peers of the ladder: some of transformers,vllm")
    parser.add_argument("--only", help="some of the steps, by name, such as ladder; default: all")
    asked = parser.parse_args(arguments)
    folder: Path = asked.folder.resolve()
    try:
        planned = chosen(steps(folder, commit=asked.commit, peers=asked.peers), asked.only)
    except ValueError as error:
        parser.error(str(error))
    return session("gpu_session", planned, folder, minutes=asked.minutes, commit=asked.commit, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
