"""`vitray bench`: measurements by the programs in benchmarks/. It must not know what they measure, nor their options.

They are run and not imported: the application does not hang on them, and installed without its repository it has none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from deployments.commands.config_option import PROJECT_ROOT

# Options, `--help` among them, are the program's.
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}


@click.group()
def bench() -> None:
    """Measure a running server, or this machine's encoder.

    \b
    vitray bench serve http://127.0.0.1:8000          a small trace, at its own pace
    vitray bench serve URL --against OTHER --trace t.jsonl --plot out.png
    vitray bench encoder --arch qwen3_vl              each rung of the ladder, on this machine's GPU

    `vitray bench serve --help` and `vitray bench encoder --help` list the options.
    """


@bench.command(context_settings=_PASSED_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(arguments: tuple[str, ...]) -> None:
    """A trace of requests with pictures against one server, or two: benchmarks/bench_serve.py."""
    _run("bench_serve.py", arguments)


@bench.command(context_settings=_PASSED_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def encoder(arguments: tuple[str, ...]) -> None:
    """The vision tower alone, rung by rung: benchmarks/bench_encoder.py --ladder."""
    _run("bench_encoder.py", ["--ladder", *arguments])


def _run(program: str, arguments: Sequence[str]) -> None:
    """In the place of this process."""
    path = PROJECT_ROOT / "benchmarks" / program
    if not path.is_file():
        raise click.ClickException(f"{path} is not there: benchmarks come with a clone of the repository")
    os.execv(sys.executable, [sys.executable, str(path), *arguments])
