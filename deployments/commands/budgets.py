"""`vitray budgets`: budgets fitted to a trace. It must not know how they are fitted."""

from __future__ import annotations

from pathlib import Path

import click

from deployments.commands import tower_options
from training.architectures import ARCHITECTURES

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("trace", type=FILE)
@click.option("-m", "--model", help="A checkpoint folder or a hub name; its settings say how large images become.")
@click.option("--arch", type=click.Choice(ARCHITECTURES), help="Instead: the settings as they were published.")
@click.option("--costs", type=FILE, help="Times of the tower on your GPU. Default: those shipped, of an H200.")
@click.option("--count", default=16, show_default=True, type=click.IntRange(min=1), help="Budgets at most.")
@click.option("--largest", default=8192, show_default=True, type=click.IntRange(min=16), help="In merged tokens.")
@click.option("--window", default=16, show_default=True, type=click.IntRange(min=1), help="Images that wait together.")
@click.option("--prefer-replays", default=0.04, show_default=True, type=click.FloatRange(min=0),
              help="By how much an eager run counts more than it takes, for the host's sake.")  # fmt: skip
def budgets(
    trace: Path,
    model: str | None,
    arch: str | None,
    costs: Path | None,
    count: int,
    largest: int,
    window: int,
    prefer_replays: float,
) -> None:
    """Budgets of the encoder's CUDA graphs that fit a TRACE of images, as the line for serve_config.yaml.

    \b
    vitray budgets trace.jsonl --model Qwen/Qwen3-VL-8B-Instruct
    vitray budgets trace.jsonl --arch qwen2_5_vl --count 8 --costs mine.json

    A batch is padded to the smallest budget that holds it, and padding is work for nothing. The line goes below
    `args: encoder:`; what it saves against the budgets of "auto" goes to stderr, fitted and counted on the same images.
    Where it saves nothing, the line says auto.

    A line of the trace is one request, in order of arrival; more in it does no harm:

    \b
    {"images": [{"w": 1240, "h": 1754}, {"w": 640, "h": 480}]}

    Without a trace, write one from the pictures that you have; the order matters less than the sizes. Or leave the
    budgets to the encoder: with `capture: lazy` and a `state_folder` it learns them from its traffic.

    --costs takes what `vitray bench encoder --arch qwen3_vl --out mine.json` measured on your GPU, or a table of
    batches (`work` is in millions of pairs of patches, t·(h·w)² of each image, before the merge):

    \b
    {"archs": {"qwen3_vl": [{"tokens": 49, "work": 0.04, "replay_ms": 1.5, "eager_ms": 5.3}, …]}}
    """
    from encoder.budget_trial import Bounds
    from encoder.budgets import default_budgets
    from encoder.recorded_costs import read_costs
    from encoder.traces import TraceError, windows
    from encoder.traces import read_costs as read_trace

    about = tower_options.geometry(model, arch, own_costs=costs is not None)
    path = costs or tower_options.shipped(about.arch)
    times = tower_options.read("--costs", path, read_costs, about.arch)
    bounds = Bounds(window, count, largest, prefer_replays)
    try:
        images = read_trace(trace, about.rules)
        fitted, before, after, take = bounds.better(times, windows(images, window), auto=default_budgets())
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.UsageError(f"--largest, --count: {error}") from error
    click.echo(f"{len(images)} images, {about.arch}; times measured, by {path.name}", err=True)
    for name, number, result in (("auto", len(default_budgets()), before), ("fitted", len(fitted), after)):
        click.echo(
            f"{name:6} {number:2} budgets   padded/real {result.padded_over_real:.3f}   "
            f"replayed {result.replayed_share:6.1%}   {result.total_ms:.0f} ms",
            err=True,
        )
    if not take:
        click.echo("the fitted ones take longer than those of auto by these times: stay with auto", err=True)
    click.echo(f"encoder_cudagraph_token_budgets: {list(fitted) if take else 'auto'}")
