"""`vitray plan`: recommends a layout of GPUs and prints its configuration. The arithmetic is in planner/model.py."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deployments.cli.config_option import PROJECT_ROOT

if TYPE_CHECKING:
    from encoder.checkpoint.image_rules import ImageRules
    from encoder.checkpoint.video_rules import VideoRules
    from planner.model import Tower

RESULTS = PROJECT_ROOT / "benchmarks" / "results"
# Layers and width of the towers that `vitray bench encoder` measures, by its names.
_MEASURED = {"qwen3_vl": (27, 1152), "qwen3_vl_2b": (24, 1024), "qwen2_5_vl": (32, 1280)}
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class FiniteRange(click.FloatRange):
    """A range without NaN and infinity, which click admits."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


ABOVE_0 = FiniteRange(min=0, min_open=True)
AT_LEAST_0 = FiniteRange(min=0)


@click.command()
@click.option("--trace", required=True, type=FILE, help="Trace of requests, as JSON lines.")
@click.option("-m", "--model", required=True, help="Checkpoint folder or hub name.")
@click.option(
    "--arch",
    type=click.Choice(tuple(_MEASURED)),
    help="Use the published settings of this tower instead of the model's.",
)
@click.option("--slo", required=True, type=ABOVE_0, help="Limit of the time to first token, in seconds.")
@click.option("--slo-share", default=0.95, show_default=True, type=FiniteRange(0, 1, min_open=True),
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
    "--costs",
    type=FILE,
    help="Measured times of our encoder and vLLM's on your GPU. Default: the included ones, of an H200.",
)
@click.option(
    "--read-early/--read-at-once",
    default=True,
    help="Whether early prefill is enabled (default): prompts are prefilled while images are encoded. It needs "
    "encoders on the same hosts, or NIXL.",
)
@click.option("--hop-ms", type=AT_LEAST_0, help="Time that separate encoders add to a request besides encoding, in ms.")
@click.option("--reading-ms", type=AT_LEAST_0, help="CPU time of an ingress to read 1000 visual tokens, in ms.")
@click.option(
    "--vllm-reading-ms", type=AT_LEAST_0, help="CPU time of a vLLM API server to read 1000 visual tokens, in ms."
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

    The speeds of three towers on one H200 are included: those of Qwen3-VL-8B (qwen3_vl), Qwen3-VL-2B
    (qwen3_vl_2b) and Qwen2.5-VL-7B (qwen2_5_vl). They hold for every model whose tower has the same layers and width,
    such as Qwen3.5-9B (qwen3_vl). For another GPU, measure ours and vLLM's there:

    \b
    vitray bench encoder --arch qwen3_vl --peers vllm --out mine.json       → --costs mine.json

    The model plays the trace in a virtual clock through first-come-first-served queues with batches. Before the towers,
    CPU processes read requests with their pictures, each process all of its requests concurrently; the model uses as
    many of these processes as are needed, and the output lists them. Utilisation is that of the trace's busiest
    300 s, or of the whole trace if it is shorter. It models queueing and computing. It does not model memory (whether
    weights and KV cache fit), the rate of tokens after the first one, misrouting between replicas, or starts of
    replicas. vLLM's tower is a line through eleven shapes, up to 13 % off for the included times. The times before and
    after the towers come from one run with PNG files of noise, which are slow to read; yours (--reading-ms) is a
    request's time to the first token minus the stages that Server-Timing lists. docs/measurements.md compares
    predictions with measurements.
    """
    from planner import configuration, overheads
    from planner import output as plan_report
    from planner.model import (
        Language,
        Placement,
        Prediction,
        Speeds,
        Target,
        choose_layout,
        find_cheapest_layout,
        longest_stall_s,
    )
    from planner.traces import RULES, TraceError, read_requests

    tower, rules, video_rules = (arch, RULES[arch], None) if arch is not None else _tower(model)
    costs = costs or RESULTS / overheads.COSTS_FILE
    try:
        requests = [replace(one, at_s=one.at_s / speed) for one in read_requests(trace, rules, video_rules)]
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    vitray_tower, vllm_tower = _read_towers(costs, tower)
    try:
        around = overheads.read_overheads(RESULTS)
    except ValueError as error:
        raise click.ClickException(str(error)) from error

    speeds = Speeds(
        Language(prefill_tokens_per_s, decode_tokens_per_s, llm_gpus),
        vitray_tower=vitray_tower,
        vllm_tower=vllm_tower,
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
            met[way] = f"pictures stop answers for {stall_s * 1e3:.1f} ms, over --slo-stall"
        else:
            found_way = find_cheapest_layout(requests, speeds, target, placement=way, max_gpus=max_gpus)
            met[way] = found_way or "not within --max-gpus"
    click.echo(plan_report.text(trace.name, requests, speeds, target, met, costs.name), err=True)
    good = [prediction for prediction in met.values() if not isinstance(prediction, str)]
    if not good:
        raise click.ClickException(
            f"no way keeps {slo:g} s for {slo_share:.0%} with --max-gpus {max_gpus}: more of them, a later --slo, "
            "or faster language models"
        )
    chosen = choose_layout(good)
    click.echo(plan_report.verdict(chosen, met), err=True)
    click.echo(configuration.serve_config(model, chosen.layout, llm_gpus=llm_gpus), nl=False)


def _tower(model: str) -> tuple[str, ImageRules, VideoRules]:
    """Returns the name of the checkpoint's tower, and its rules. Raises ClickException, also for a tower that nobody
    measured."""
    from encoder.checkpoint.files import resolve_checkpoint
    from encoder.checkpoint.image_rules import ImageRules
    from encoder.checkpoint.video_rules import VideoRules
    from encoder.checkpoint.vision_config import VisionConfig

    by_name = f"--arch {'|'.join(_MEASURED)} goes by the published settings of a tower"
    try:
        folder = resolve_checkpoint(model, weights=False)
        config, rules = VisionConfig.from_checkpoint(folder), ImageRules.from_checkpoint(folder)
        video_rules = VideoRules.from_checkpoint(folder, config.architecture, rules)
    except (ValueError, OSError) as error:
        raise click.ClickException(f"{error}; {by_name}") from error
    size = config.depth, config.hidden_size
    for name, measured in _MEASURED.items():
        if size == measured:
            return name, rules, video_rules
    known = ", ".join(f"{name} ({depth} of {width})" for name, (depth, width) in _MEASURED.items())
    raise click.ClickException(
        f"{model} has a tower of {size[0]} layers of {size[1]}; there are measured times of {known}; {by_name}"
    )


def _read_towers(costs: Path, tower: str) -> tuple[Tower, Tower]:
    """Returns vitray's and vLLM's tower. Raises ClickException for a file that is missing or another one."""
    from planner.overheads import read_towers

    try:
        return read_towers(costs, tower)
    except FileNotFoundError as error:
        raise click.ClickException(
            f"{costs} is not there: measured times come with a clone of the repository, or by --costs"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise click.ClickException(f"--costs: {costs.name} holds no measured times as expected: {reason}") from error
