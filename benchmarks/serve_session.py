"""Everything that needs one GPU, Ray and vLLM, in one go: `python3 benchmarks/serve_session.py FOLDER`.

The starts of an encoder in fresh processes, then the ladder through the running application beside vLLM alone, each
with a time limit, so that the whole ends within `--minutes`. At most eight files come to lie in FOLDER, and what the
steps print in the end is printed again last. `benchmarks/gpu_session.py` is the part without Ray.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.steps import MINUTES, Step, chosen, session


def steps(folder: Path, *, commit: str | None, rungs: str | None, tiny: bool) -> list[Step]:
    """What can be run, in order."""
    given = [*(("--commit", commit) if commit else ()), *(("--tiny",) if tiny else ())]

    def program(name: str, *options: str) -> tuple[str, ...]:
        out = str(folder / f"{name}.json")
        return (sys.executable, f"benchmarks/bench_{name}.py", "--minutes", MINUTES, "--out", out, *options, *given)

    started = "eager" if tiny else "fusion"
    asked = ("--rungs", rungs) if rungs else ()
    # The second keeps what it needs to end its servers itself.
    return [
        Step("start", program("start", "--rungs", started), share=0.25, shown_lines=12),
        Step("serving", program("serving", *asked), share=1.0, shown_lines=70, begin_share=0.95),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="An encoder's starts and the ladder end to end in one go.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--only", help="some of the steps: start,serving; default: all")
    parser.add_argument("--rungs", help="of the end-to-end ladder, such as eager,fusion; default: all")
    parser.add_argument("--tiny", action="store_true", help="small checkpoints without a GPU, to try the program")
    parser.add_argument("--commit", help="of the sources, where git is not there to say it")
    asked = parser.parse_args(arguments)
    folder: Path = asked.folder.resolve()
    try:
        planned = chosen(steps(folder, commit=asked.commit, rungs=asked.rungs, tiny=asked.tiny), asked.only)
    except ValueError as error:
        parser.error(str(error))
    return session("serve_session", planned, folder, minutes=asked.minutes, commit=asked.commit, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
