"""`vitray plan`: recommends a layout of GPUs and prints its configuration. The arithmetic is in planner/model.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from deployments.cli.config_option import PROJECT_ROOT
from encoder.checkpoint.vision_config import ARCHITECTURES

if TYPE_CHECKING:
    from encoder.checkpoint.image_rules import ImageRules
    from encoder.checkpoint.video_rules import VideoRules

R = TypeVar("R")
RESULTS = PROJECT_ROOT / "benchmarks" / "results"
# Layers and width of the towers whose measured times are included.
_MEASURED = {"qwen3_vl": (27, 1152, "Qwen3-VL-8B"), "qwen2_5_vl": (32, 1280, "Qwen2.5-VL-7B")}
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
ABOVE_0 = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--trace", required=True, type=FILE, help="Trace of requests, as JSON lines.")
@click.option("-m", "--model", required=True, help="Checkpoint folder or hub name.")
@click.option(
    "--arch",
    type=click.Choice(tuple(ARCHITECTURES)),
    help="Use the published settings of this architecture instead of the model's.",
)
@click.option("--slo", required=True, type=ABOVE_0, help="Limit of the time to first token, in seconds.")
@click.option("--slo-share", default=0.95, show_default=True, type=click.FloatRange(0, 1, min_open=True),
              help="Share of the requests that must meet --slo.")  # fmt: skip
@click.option(
    "--slo-stall",
    type=ABOVE_0,
    help="Limit in seconds for which pictures may interrupt answers that are being generated.",
)
@click.option(
    "--prefill-tokens-per-s", required=True, type=ABOVE_0, help="Prefill speed of one language model replica."
)
@click.option(
    "--decode-tokens-per-s",
    required=True,
    type=ABOVE_0,
    help="Decode speed of one language model replica, over all of its answers.",
)
@click.option(
    "--llm-gpus", default=1, show_default=True, type=click.IntRange(min=1), help="GPUs of one language model replica."
)
@click.option(
    "--speed", default=1.0, show_default=True, type=ABOVE_0, help="Speed of the trace: 2 replays it twice as fast."
)
@click.option(
    "--max-gpus",
    default=64,
    show_default=True,
    type=click.IntRange(min=1),
    help="Largest number of GPUs that is considered.",
)
@click.option(
    "--costs", type=FILE, help="Measured times of our encoder on your GPU. Default: the included ones, of an H200."
)
@click.option("--vllm-costs", type=FILE, help="Measured times of vLLM's own tower on that GPU. Required with --costs.")
@click.option(
    "--read-early/--read-at-once",
    default=True,
    help="Whether early prefill is enabled (default): prompts are prefilled while images are encoded. It needs "
    "encoders on the same hosts, or NIXL.",
)
@click.option(
    "--hop-ms",
    type=click.FloatRange(min=0),
    help="Time that separate encoders add to a request besides encoding, in ms.",
)
@click.option(
    "--reading-ms", type=click.FloatRange(min=0), help="CPU time of an ingress to read 1000 visual tokens, in ms."
)
@click.option(
    "--vllm-reading-ms",
    type=click.FloatRange(min=0),
    help="CPU time of a vLLM API server to read 1000 visual tokens, in ms.",
)
def plan(
    trace: Path,
    model: str,
    arch: str | None,
    slo: float,
    slo_share: float,
    slo_stall: float | None,
    prefill_tokens_per_s: float,
    decode_tokens_per_s: float,
    llm_gpus: int,
    speed: float,
    max_gpus: int,
    costs: Path | None,
    vllm_costs: Path | None,
    read_early: bool,
    hop_ms: float | None,
    reading_ms: float | None,
    vllm_reading_ms: float | None,
) -> None:
    """Estimate whether separate encoders pay off for a trace, how many for how many language models, and their cost.

    \b
    vitray plan --trace t.jsonl --model Qwen/Qwen3-VL-8B-Instruct --slo 2 \\
        --prefill-tokens-per-s 30000 --decode-tokens-per-s 4000 > my_config.yaml
    vitray check-config my_config.yaml

    The command compares the fewest GPUs that meet --slo for three layouts: no encoders, vLLM's own tower (aggregated);
    an encoder on a fraction of each language model's GPU (shared); encoders on their own GPUs (split). For equal
    numbers of GPUs the simpler layout is chosen, so a trace of few small images does not lead to a split. Separate
    encoders are most useful if pictures must not interrupt answers that are being generated: --slo-stall. The report is
    written to stderr, the configuration to stdout; it has no encoders if splitting does not pay off.

    A line of the trace; equal `id`s are the same picture. "videos" may be left out; each is sampled by the model's
    rules, and its chunks count as pictures:

    \b
    {"t": 0.25, "images": [{"id": 0, "w": 640, "h": 480}], "prompt_tokens": 40, "output_tokens": 100,
     "videos": [{"id": 0, "w": 1280, "h": 720, "frames": 300, "seconds": 10}]}

    You have to measure your language model's speeds. For one replica on the GPU that you intend to use:

    \b
    vllm bench throughput --model MODEL --input-len 4096 --output-len 1     → prefill
    vllm bench throughput --model MODEL --input-len 16 --output-len 512     → decode, output tokens

    The speeds of two towers on one H200 are included (Qwen3-VL-8B's and Qwen2.5-VL-7B's). For another GPU, measure ours
    and vLLM's there: `vitray bench encoder --arch qwen3_vl --peers vllm --out mine.json`, and give the file twice:
    --costs mine.json --vllm-costs mine.json. The speed of another tower is given as a table of batches (`work` is in
    millions of pairs of patches, t·(h·w)² of each image, before the merge):

    \b
    {"archs": {"qwen3_vl": [{"tokens": 49, "work": 0.04, "replay_ms": 1.5, "eager_ms": 5.3}, …]}}

    The model plays the trace in a virtual clock through first-come-first-served queues with batches. Before the towers,
    CPU processes read requests with their pictures, each process all of its requests concurrently; the model uses as
    many of these processes as are needed, and the output lists them. It models queueing and computing. It does not
    model memory (whether weights and KV cache fit), the rate of tokens after the first one, misrouting between
    replicas, or starts of replicas. vLLM's tower is a line through five shapes, up to 17 % off for the included
    Qwen3-VL. The times before and after the towers come from one run with PNG files of noise, which are slow to read;
    yours (--reading-ms) is a request's time to the first token minus the stages that Server-Timing lists.
    docs/measurements.md compares predictions with measurements.
    """
    for name, value in (("--slo", slo), ("--speed", speed)):
        if not math.isfinite(value):
            raise click.UsageError(f"{name} is {value}; it must be a number")
    if costs is not None and vllm_costs is None:
        raise click.UsageError(
            "--vllm-costs is not given: --costs is of your GPU, and the shipped times of vLLM are of an H200"
        )

    from encoder.graphs.budgets import default_budgets
    from planner import configuration, overheads
    from planner import output as plan_report
    from planner.model import (
        Language,
        Placement,
        Prediction,
        Speeds,
        Target,
        Tower,
        choose_layout,
        find_cheapest_layout,
        longest_stall_s,
    )
    from planner.recorded_costs import read_costs, read_vllm_costs
    from planner.traces import RULES, TraceError, read_requests

    arch, rules, video_rules = (
        (arch, RULES[arch], None) if arch is not None else _tower(model, own_costs=costs is not None)
    )
    ours_from = costs or RESULTS / f"encoder_h200_{arch}.json"
    vllm_from = vllm_costs or RESULTS / "costs_vllm_h200.json"
    try:
        requests = [replace(one, at_s=one.at_s / speed) for one in read_requests(trace, rules, video_rules)]
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    times = _read("--costs", ours_from, read_costs, arch)
    work_ms = times.table(()).work_ms
    vllms = _read("--vllm-costs", vllm_from, partial(read_vllm_costs, work_ms=work_ms), arch)
    try:
        around = overheads.read_overheads(RESULTS)
    except ValueError as error:
        raise click.ClickException(str(error)) from error

    speeds = Speeds(
        Language(prefill_tokens_per_s, decode_tokens_per_s, llm_gpus),
        vitray_tower=Tower(times.table(default_budgets())),
        vllm_tower=Tower(vllms.table(()), max_images=1024),
        transfer_overhead_s=around.transfer_overhead_s if hop_ms is None else hop_ms / 1e3,
        llm_overhead_s=around.llm_overhead_s,
        image_load_s_per_token=around.image_load_s_per_token if reading_ms is None else reading_ms / 1e6,
        vllm_image_load_s_per_token=around.vllm_image_load_s_per_token
        if vllm_reading_ms is None
        else vllm_reading_ms / 1e6,
        early_prefill=read_early,
    )
    target = Target(slo, slo_share)
    met: dict[Placement, Prediction | str] = {}
    for way in Placement:
        stall_s = longest_stall_s(requests, speeds, way)
        if way is Placement.SHARED and llm_gpus > 1:
            met[way] = f"a language model takes {llm_gpus} GPUs"
        elif slo_stall is not None and stall_s > slo_stall:
            met[way] = f"pictures stop answers for {stall_s:.2f} s, over --slo-stall"
        else:
            found_way = find_cheapest_layout(requests, speeds, target, placement=way, max_gpus=max_gpus)
            met[way] = found_way or "not within --max-gpus"
    sources = {
        "measured": [
            f"our encoder: {ours_from.name}",
            f"vLLM's tower: {vllm_from.name}",
            f"hop, reading, first step: {overheads.RESULT_FILE}, 4 pictures of 448×448, as far as not given",
        ],
        "given": [
            f"prefill {prefill_tokens_per_s:g}, decode {decode_tokens_per_s:g} tokens/s a replica of {llm_gpus} GPU(s)",
            *(
                f"{name} {value:g} ms"
                for name, value in (("hop", hop_ms), ("reading", reading_ms), ("vLLM's reading", vllm_reading_ms))
                if value is not None
            ),
        ],
    }
    click.echo(plan_report.text(trace.name, requests, speeds, target, met, sources), err=True)
    good = [prediction for prediction in met.values() if not isinstance(prediction, str)]
    if not good:
        raise click.ClickException(
            f"no way keeps {slo:g} s for {slo_share:.0%} with --max-gpus {max_gpus}: more of them, a later --slo, "
            "or faster language models"
        )
    chosen = choose_layout(good)
    click.echo(plan_report.verdict(chosen, met), err=True)
    click.echo(configuration.serve_config(model, chosen.layout, llm_gpus=llm_gpus), nl=False)


def _tower(model: str, *, own_costs: bool) -> tuple[str, ImageRules, VideoRules]:
    """Returns the checkpoint's architecture and rules. Raises ClickException, also without times of its tower."""
    from encoder.checkpoint.files import resolve_checkpoint
    from encoder.checkpoint.image_rules import ImageRules
    from encoder.checkpoint.video_rules import VideoRules
    from encoder.checkpoint.vision_config import VisionConfig

    try:
        folder = resolve_checkpoint(model, weights=False)
        tower, rules = VisionConfig.from_checkpoint(folder), ImageRules.from_checkpoint(folder)
        video_rules = VideoRules.from_checkpoint(folder, tower.architecture, rules)
    except (ValueError, OSError) as error:
        raise click.ClickException(
            f"{error}; --arch {'|'.join(ARCHITECTURES)} goes by the published settings"
        ) from error
    layers, width, name = _MEASURED[tower.architecture]
    if not own_costs and (tower.depth, tower.hidden_size) != (layers, width):
        raise click.ClickException(
            f"{model} has a tower of {tower.depth} layers of {tower.hidden_size}; the shipped times are of {name}'s, "
            f"{layers} of {width}: give --costs with times of this one (--help says in which form)"
        )
    return tower.architecture, rules, video_rules


def _read(option: str, path: Path, reader: Callable[[Path, str], R], arch: str) -> R:
    """Returns what `reader` reads from the file. Raises ClickException that names the option for another file."""
    try:
        return reader(path, arch)
    except FileNotFoundError as error:
        raise click.ClickException(
            f"{path} is not there: measured times come with a clone of the repository, or by {option}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise click.ClickException(f"{option}: {path.name} holds no measured times as expected: {reason}") from error
