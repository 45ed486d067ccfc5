"""`vitray plan`: whether to split, how, and the configuration for it. The arithmetic is deployments/split_plan.py."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from deployments.commands import tower_options
from training.architectures import ARCHITECTURES

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
ABOVE_0 = click.FloatRange(min=0, min_open=True)
_PREFILL = "vllm bench throughput --model MODEL --input-len 4096 --output-len 1"
_DECODE = "vllm bench throughput --model MODEL --input-len 16 --output-len 512"


@click.command()
@click.option("--trace", required=True, type=FILE, help="Requests as they come, JSON lines.")
@click.option("-m", "--model", required=True, help="A checkpoint folder or a hub name.")
@click.option("--arch", type=click.Choice(ARCHITECTURES), help="Do not read the model's settings; as published.")
@click.option("--slo", required=True, type=ABOVE_0, help="Seconds within which the first token has to be there …")
@click.option("--slo-share", default=0.95, show_default=True, type=click.FloatRange(0, 1, min_open=True),
              help="… for this share of the requests.")  # fmt: skip
@click.option("--slo-stall", type=ABOVE_0, help="Seconds for which pictures may stop answers that are being written.")
@click.option("--prefill-tokens-per-s", type=ABOVE_0, help="Of one replica of the language model; to be measured.")
@click.option("--decode-tokens-per-s", type=ABOVE_0, help="Of one, all its answers together; to be measured.")
@click.option("--llm-gpus", default=1, show_default=True, type=click.IntRange(min=1), help="GPUs of one replica.")
@click.option("--speed", default=1.0, show_default=True, type=ABOVE_0, help="Of the trace: 2 plays it twice as fast.")
@click.option("--max-gpus", default=64, show_default=True, type=click.IntRange(min=1), help="More are not considered.")
@click.option("--costs", type=FILE, help="Times of our encoder on your GPU. Default: those shipped, of an H200.")
@click.option("--vllm-costs", type=FILE, help="Times of vLLM's own tower on it. Needed with --costs.")
@click.option("--read-early/--read-at-once", default=True, help="Prompts as their images come (default), with encoders "
              "on the same hosts or NIXL; or once all have.")  # fmt: skip
@click.option("--hop-ms", type=click.FloatRange(min=0), help="What encoders apart add to a request beside encoding.")
@click.option("--reading-ms", type=click.FloatRange(min=0), help="Of an ingress's CPU for 1000 visual tokens.")
@click.option("--vllm-reading-ms", type=click.FloatRange(min=0), help="The same of an API server of vLLM's.")
def plan(
    trace: Path,
    model: str,
    arch: str | None,
    slo: float,
    slo_share: float,
    slo_stall: float | None,
    prefill_tokens_per_s: float | None,
    decode_tokens_per_s: float | None,
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
    """Say whether encoders of their own pay for a trace, how many for how many language models, and what it costs.

    \b
    vitray plan --trace t.jsonl --model Qwen/Qwen3-VL-8B-Instruct --slo 2 \\
        --prefill-tokens-per-s 30000 --decode-tokens-per-s 4000 > my_config.yaml
    vitray check-config my_config.yaml

    Compared are the fewest GPUs that keep the promise of --slo: vLLM alone with its own tower (aggregated), an
    encoder on each language model's GPU by fractions (shared), and encoders on GPUs of their own (split). At equal
    GPUs the simpler one is chosen, so for few small images the answer is not to split. Encoders of their own earn
    their GPUs above all where pictures must not stop answers that are being written: --slo-stall. The report goes to
    stderr; to stdout goes a configuration, or vLLM's own command where splitting does not pay: vLLM's own tower has
    no configuration here.

    A line of the trace; the same `id` is the same picture:

    \b
    {"t": 0.25, "images": [{"id": 0, "w": 640, "h": 480}], "prompt_tokens": 40, "output_tokens": 100}

    Nobody but you can know your language model's speeds. For one replica on the GPU that you mean to use:

    \b
    vllm bench throughput --model MODEL --input-len 4096 --output-len 1     → prefill
    vllm bench throughput --model MODEL --input-len 16 --output-len 512     → decode, output tokens

    The towers' speeds are shipped for one H200 (Qwen3-VL-8B's tower and Qwen2.5-VL-7B's). For another GPU, measure both
    there and give the file twice: `vitray bench encoder --arch qwen3_vl --peers vllm --out mine.json`, then --costs
    mine.json --vllm-costs mine.json. Of another tower, as a table; its form is in `vitray budgets --help`.

    The model: the trace is played in a virtual clock through queues, first come first served, with batches. Before
    them CPUs read requests and their pictures, all that they have at once; there are as many of these processes as it
    takes, and they are in what is printed. It knows waiting and computing. It does not know memory (whether weights and
    KV cache fit), the rate of tokens after the first one, misrouting between replicas, or starts of replicas. vLLM's
    tower is a line through five shapes, for the shipped Qwen3-VL up to 17 % off. What comes before and after the towers
    is shipped from one run, of noise as PNG, which is slow to read: a request's time to the first token less the stages
    that Server-Timing names is yours (--reading-ms). docs/measurements.md compares predictions with what was measured.
    """
    for name, value in (("--slo", slo), ("--speed", speed)):
        if not math.isfinite(value):
            raise click.UsageError(f"{name} is {value}; it must be a number")
    missing = [
        f"{name} is not given, and is nothing to guess: measure it by `{how}`"
        for name, value, how in (
            ("--prefill-tokens-per-s", prefill_tokens_per_s, _PREFILL),
            ("--decode-tokens-per-s", decode_tokens_per_s, _DECODE),
        )
        if value is None
    ]
    if costs is not None and vllm_costs is None:
        missing.append(
            "--vllm-costs is not given: --costs is of your GPU, and the shipped times of vLLM are of an H200"
        )
    if missing or prefill_tokens_per_s is None or decode_tokens_per_s is None:
        raise click.UsageError("\n".join(missing))

    from deployments import plan_config, plan_overheads, plan_report
    from deployments.split_plan import (
        Language,
        Prediction,
        Speeds,
        Target,
        Tower,
        Way,
        best,
        cheapest,
        longest_stall_s,
    )
    from encoder.budget_trial import Bounds
    from encoder.budgets import default_budgets
    from encoder.recorded_costs import read_costs, read_vllm_costs
    from encoder.traces import TraceError, read_requests, windows

    about = tower_options.geometry(model, arch, own_costs=costs is not None)
    ours_from = costs or tower_options.shipped(about.arch)
    vllm_from = vllm_costs or tower_options.RESULTS / "costs_vllm_h200.json"
    try:
        requests = [replace(request, at_s=request.at_s / speed) for request in read_requests(trace, about.rules)]
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    times = tower_options.read("--costs", ours_from, read_costs, about.arch)
    work_ms = times.table(()).work_ms
    vllms = tower_options.read("--vllm-costs", vllm_from, partial(read_vllm_costs, work_ms=work_ms), about.arch)
    try:
        around = plan_overheads.measured(tower_options.RESULTS)
    except ValueError as error:
        raise click.ClickException(str(error)) from error

    found = windows([image for request in requests for image in request.images], 16)
    fitted, _, _, take = Bounds(window=16, count=16, largest=8192, prefer=0.04).better(
        times, found, auto=default_budgets()
    )
    budgets = fitted if take else None
    speeds = Speeds(
        Language(prefill_tokens_per_s, decode_tokens_per_s, llm_gpus),
        ours=Tower(times.table(budgets or default_budgets())),
        vllms=Tower(vllms.table(()), max_images=1024),
        hop_s=around.hop_s if hop_ms is None else hop_ms / 1e3,
        entry_s=around.entry_s,
        ours_reading_s=around.ours_reading_s if reading_ms is None else reading_ms / 1e6,
        vllms_reading_s=around.vllms_reading_s if vllm_reading_ms is None else vllm_reading_ms / 1e6,
        reads_early=read_early,
    )
    target = Target(slo, slo_share)
    met: dict[Way, Prediction | str] = {}
    for way in Way:
        stall_s = longest_stall_s(requests, speeds, way)
        if way is Way.SHARED and llm_gpus > 1:
            met[way] = f"a language model takes {llm_gpus} GPUs"
        elif slo_stall is not None and stall_s > slo_stall:
            met[way] = f"pictures stop answers for {stall_s:.2f} s, over --slo-stall"
        else:
            found_way = cheapest(requests, speeds, target, way=way, max_gpus=max_gpus)
            met[way] = found_way or "not within --max-gpus"
    sources = {
        "measured": [
            f"our encoder: {ours_from.name}",
            f"vLLM's tower: {vllm_from.name}",
            f"hop, reading, first step: {plan_overheads.RECORD}, 4 pictures of 448×448, as far as not given",
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
    chosen = best(good)
    click.echo(plan_report.verdict(chosen, met), err=True)
    if chosen.layout.way is Way.AGGREGATED:
        click.echo(plan_config.vllm_command(model, chosen.layout, llm_gpus=llm_gpus))
    else:
        click.echo(plan_config.config(model, chosen.layout, llm_gpus=llm_gpus, budgets=budgets), nl=False)
