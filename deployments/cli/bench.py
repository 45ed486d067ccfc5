"""`vitray bench`: runs the programs in benchmarks/.

They run as programs and are not imported: the application does not depend on them, and an installation without the
repository does not contain them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from deployments.cli.config_option import PROJECT_ROOT

# Options, including `--help`, are those of the program.
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}


@click.group()
def bench() -> None:
    """Measure a running server, or this machine's encoder.

    \b
    vitray bench serve http://127.0.0.1:8000          a small trace at its own speed
    vitray bench serve URL --against OTHER --trace t.jsonl --plot out.png
    vitray bench encoder --arch qwen3_vl              each rung of the ladder on this machine's GPU
    vitray bench encoder --accuracy MODEL             the error of each rung on a checkpoint's weights
    vitray bench packing trace.jsonl                  padding of the token budgets on a trace of images

    Each of them has its own options: `vitray bench serve --help`.
    """


@bench.command(context_settings=_PASSED_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(arguments: tuple[str, ...]) -> None:
    """Run a trace of requests with pictures against one or two servers: benchmarks/bench_serve.py."""
    _run("bench_serve.py", arguments)


@bench.command(context_settings=_PASSED_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def encoder(arguments: tuple[str, ...]) -> None:
    """Measure the vision tower alone, rung by rung: benchmarks/bench_encoder.py --ladder."""
    _run("bench_encoder.py", ["--ladder", *arguments])


@bench.command(context_settings=_PASSED_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def packing(arguments: tuple[str, ...]) -> None:
    """Print the padding of the active token budgets on a trace, as JSON: benchmarks/bench_packing.py."""
    _run("bench_packing.py", arguments)


def _run(program: str, arguments: Sequence[str]) -> None:
    """Replaces this process by the program."""
    path = PROJECT_ROOT / "benchmarks" / program
    if not path.is_file():
        raise click.ClickException(f"{path} does not exist: clone the repository to run benchmarks")
    os.execv(sys.executable, [sys.executable, str(path), *arguments])
