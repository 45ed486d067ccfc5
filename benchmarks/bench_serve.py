"""Sends a trace to one or two running servers: `python benchmarks/bench_serve.py http://127.0.0.1:8000 --trace
t.jsonl`.

An open loop: requests are sent at the trace's times, regardless of earlier answers, and latencies count from those
times. Uses only OpenAI's routes `/v1/models` and `/v1/chat/completions`. Two servers get the same requests, one after
the other, or alternately with `--pieces`. A run whose client could not keep up reports that and exits with 1. The last
line on stdout is JSON.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.record import provenance, write
from benchmarks.trace import figures as trace_figures
from benchmarks.trace import plot as trace_plot
from benchmarks.trace.client import Run
from benchmarks.trace.client_pool import READY_S, ClientPool
from benchmarks.trace.figures import Slo
from benchmarks.trace.images import cache_folder, make_images
from benchmarks.trace.requests import generate_trace, lines, read_trace
from benchmarks.trace.run import BenchError, Plan, Server, measure
from planner.traces import TraceError


def report(
    plan: Plan, servers: Sequence[Server], runs: Mapping[str, Run], slo: Slo, max_lag_ms: float
) -> dict[str, Any]:
    """Returns the JSON report without its provenance."""
    found = {
        server.label: {"url": server.url, **trace_figures.figures(runs[server.label], slo, max_lag_ms=max_lag_ms)}
        for server in servers
    }
    trace = plan.trace
    made: dict[str, Any] = {
        "benchmark": "serve",
        "trace": {
            "name": trace.name,
            "digest": trace.digest,
            "requests": len(trace.requests),
            "images": sum(len(one.images) for one in trace.requests),
            "distinct_images": len(trace.images),
            "seconds": trace.requests[-1].at_s - trace.requests[0].at_s,
        },
        "speed": None if plan.speed == float("inf") else plan.speed,
        "order": plan.order_text(servers),
        "valid": all(one["client"]["valid"] for one in found.values()),
        "servers": found,
    }
    if len(servers) == 2:
        made["compared"] = trace_figures.compared(*found.values())
    return made


def _speed(_: click.Context, __: click.Parameter, value: str) -> float:
    try:
        speed = float(value)
    except ValueError:
        speed = 0.0
    if not speed > 0:
        raise click.BadParameter(f"{value} is no positive number; inf sends everything at once")
    return speed


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("url")
@click.option("--against", metavar="URL", help="A second server, which is sent the same requests.")
@click.option(
    "--label", "labels", multiple=True, help="Name of the server in the output; give it twice for two servers."
)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines: t, images (id, w, h), prompt_tokens, output_tokens. Default: a small generated trace.",
)
@click.option("--requests", type=click.IntRange(min=1), help="Send only this many requests, the first of the trace.")
@click.option(
    "--speed", default="1", show_default=True, callback=_speed, help="Speed relative to the trace; inf: all at once."
)
@click.option(
    "--pieces",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="With --against: pieces of the trace in which the servers take turns. 1: one server after the other.",
)
@click.option("--ttft-ms", default=1000.0, show_default=True, help="Goodput: maximum time to first token, and …")
@click.option("--tpot-ms", default=50.0, show_default=True, help="… maximum mean time per further token.")
@click.option(
    "--max-prompt-tokens", type=click.IntRange(min=1), help="Shorten the text of longer questions (for small models)."
)
@click.option("--max-output-tokens", type=click.IntRange(min=1), help="Shorten longer answers.")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Request answers of the trace's length by vLLM's `ignore_eos`; other servers need --no-ignore-eos.",
)
@click.option("--detail", type=click.Choice(["auto", "low", "high"]), help="OpenAI's `detail` of every picture.")
@click.option("-m", "--model", help="Default: the first model that each server lists.")
@click.option("-k", "--key", envvar="VITRAY_API_KEY", show_envvar=True, help="API key of the server at URL.")
@click.option("--against-key", help="API key of the server of --against.")
@click.option("--timeout-s", default=600.0, show_default=True, help="Time limit of a request.")
@click.option(
    "--warm-ups",
    default=1,
    show_default=True,
    type=click.IntRange(min=0),
    help="Requests to each server before the measurement.",
)
@click.option(
    "--max-lag-ms",
    default=20.0,
    show_default=True,
    help="A run is not valid if the client sent more than 1 % of the requests later than this.",
)
@click.option(
    "--client-processes",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Processes that send the requests. One may be too slow from about 7,000 streamed tokens a second.",
)
@click.option(
    "--images",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of generated pictures. Default: the user's cache.",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw a PNG (pip install '.[bench]').")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Also write the JSON to this file.")
@click.option(
    "--write-trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the trace that is sent to this file.",
)
@click.option("--commit", help="Commit of the sources, if they are not a git checkout.")
def main(
    url: str, against: str | None, labels: tuple[str, ...], trace_file: Path | None, requests: int | None,
    speed: float, pieces: int, ttft_ms: float, tpot_ms: float, max_prompt_tokens: int | None,
    max_output_tokens: int | None, ignore_eos: bool, detail: str | None, model: str | None, key: str | None,
    against_key: str | None, timeout_s: float, warm_ups: int, max_lag_ms: float, client_processes: int,
    folder: Path | None, plot: Path | None, out: Path | None, write_trace: Path | None, commit: str | None,
) -> None:  # fmt: skip
    """Send a trace of chat requests with pictures to the server at URL at the trace's times, and measure the responses.

    \b
    vitray bench serve http://127.0.0.1:8000
    vitray bench serve http://127.0.0.1:8000 --trace chat.jsonl --speed 2 --plot chat.png
    vitray bench serve http://127.0.0.1:8000 --against http://127.0.0.1:8100 --label vitray --label vllm \\
        --trace documents.jsonl --pieces 4

    Reports TTFT (from when a request was due), TPOT, ITL, goodput (TTFT and TPOT within bounds), throughput, and errors
    by status. Works with any server of OpenAI's chat route. Requests are not retried: a refused request counts as
    failed. Exits with 1 if the client itself could not keep up, or if nothing was answered.
    """
    addresses = [url, *([against] if against else [])]
    if len(labels) not in (0, len(addresses)):
        raise click.UsageError(f"--label is given {len(labels)} times for {len(addresses)} servers")
    if len(set(labels)) != len(labels):
        raise click.UsageError(f"--label: both servers are called {labels[0]}")
    if plot is not None and not trace_plot.is_possible():
        raise click.UsageError("--plot needs matplotlib: pip install '.[bench]'")
    bases = [address.rstrip("/").removesuffix("/v1") for address in addresses]
    names = labels or (bases if len(set(bases)) == len(bases) else ("first", "second"))
    keys = (key, against_key)[: len(bases)]
    servers = [Server(name, base, one) for name, base, one in zip(names, bases, keys, strict=True)]
    try:
        for file in (out, plot):
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
        whole = read_trace(trace_file) if trace_file else generate_trace()
        trace = whole.cut(requests).capped(max_prompt_tokens, max_output_tokens)
        if pieces > len(trace.requests):
            raise click.UsageError(f"--pieces is {pieces}, and the trace has {len(trace.requests)} requests")
        if write_trace is not None:
            write_trace.write_text("".join(f"{line}\n" for line in lines(trace.requests)))
        files = make_images(trace, folder or cache_folder(), _progress)
        plan = Plan(trace, speed, pieces, timeout_s, model, ignore_eos, detail, warm_ups)
        with ClientPool(client_processes) if client_processes > 1 else nullcontext() as pool:
            runs = asyncio.run(measure(plan, servers, files, lambda told: click.echo(told, err=True), pool))
    except (TraceError, BenchError) as error:
        raise click.ClickException(str(error)) from error
    except BrokenBarrierError as error:
        raise click.ClickException(f"a client process was not ready within {READY_S:g} s; use fewer") from error
    except BrokenExecutor as error:
        raise click.ClickException(f"a client process ended: {error}") from error
    except OSError as error:
        raise _failed(error) from error
    slo = Slo(ttft_ms, tpot_ms)
    found = report(plan, servers, runs, slo, max_lag_ms) | {
        "capped": {"prompt_tokens": max_prompt_tokens, "output_tokens": max_output_tokens}
    }
    for server in servers:
        click.echo(f"\n{server.label}: {trace.name}, {len(trace.requests)} requests, {speed:g} times as fast")
        click.echo(trace_figures.text(found["servers"][server.label]))
    if "compared" in found:
        click.echo(
            f"\n{found['order']}\n{trace_figures.compared_text(found['compared'], [one.label for one in servers])}"
        )
    if not found["valid"]:
        click.echo("NOT VALID: the client was late; give it more CPU or --client-processes, or lower --speed", err=True)
    try:
        write(found | provenance(commit, _without_key(sys.argv[1:])), out)
        if plot is not None:
            trace_plot.draw(runs, slo, f"{trace.name}, {speed:g} times as fast", plot)
    except OSError as error:
        raise _failed(error) from error
    answered = all(one["successful"] for one in found["servers"].values())
    sys.exit(0 if found["valid"] and answered else 1)


def _failed(error: OSError) -> click.ClickException:
    return click.ClickException(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _without_key(arguments: Sequence[str]) -> list[str]:
    """Replaces API keys in the arguments, because results are published."""
    options = ("-k", "--key", "--against-key")
    kept: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        joined = argument not in options and argument.startswith(("-k", "--key=", "--against-key="))
        kept.append("KEY" if before in options or joined else argument)
    return kept


def _progress(done: int, total: int) -> None:
    if done == total or done % 200 == 0:
        click.echo(f"{done} of {total} pictures generated", err=True)


if __name__ == "__main__":
    main()
