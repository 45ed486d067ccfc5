"""Runs all measurements that need one GPU, Ray and vLLM: `python3 benchmarks/serving/serve_session.py FOLDER`.

Starts an encoder in fresh processes, then measures the ladder through the running application and vLLM alone. Each step
has a time limit, so that all end within `--minutes`. Writes at most eight files to FOLDER, and prints the last lines of
the steps again at the end. `benchmarks/ladder/gpu_session.py` is the part without Ray.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ladder.steps import MINUTES, Step, chosen, session


def steps(folder: Path, *, commit: str | None, rungs: str | None, tiny: bool) -> list[Step]:
    """Returns the available steps in order."""
    given = [*(("--commit", commit) if commit else ()), *(("--tiny",) if tiny else ())]

    def program(name: str, *options: str) -> tuple[str, ...]:
        out = str(folder / f"{name}.json")
        return (sys.executable, f"benchmarks/bench_{name}.py", "--minutes", MINUTES, "--out", out, *options, *given)

    started = "eager" if tiny else "fusion"
    asked = ("--rungs", rungs) if rungs else ()
    # The second step reserves the time that it needs to stop its servers.
    return [
        Step("start", program("start", "--rungs", started), share=0.25, shown_lines=12),
        Step("serving", program("serving", *asked), share=1.0, shown_lines=70, begin_share=0.95),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="An encoder's starts and the ladder end to end in one go.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole run")
    parser.add_argument("--only", help="some of the steps: start,serving; default: all")
    parser.add_argument("--rungs", help="rungs of the end-to-end ladder, such as eager,fusion; default: all")
    parser.add_argument("--tiny", action="store_true", help="small checkpoints, which run without a GPU")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    asked = parser.parse_args(arguments)
    folder: Path = asked.folder.resolve()
    try:
        planned = chosen(steps(folder, commit=asked.commit, rungs=asked.rungs, tiny=asked.tiny), asked.only)
    except ValueError as error:
        parser.error(str(error))
    return session("serve_session", planned, folder, minutes=asked.minutes, commit=asked.commit, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
