"""Text output of `vitray plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.configuration import ENCODER_SHARE
from planner.model import MAX_UTILISATION, PEAK_S, STEP_TOKENS, Placement, Prediction, Speeds, Target, longest_stall_s
from planner.traces import Request

_PARTS = {
    Placement.AGGREGATED: "vLLM with its own tower",
    Placement.SHARED: "encoder and language model on each GPU",
    Placement.SPLIT: "encoders on GPUs of their own",
}


def text(
    name: str,
    requests: Sequence[Request],
    speeds: Speeds,
    target: Target,
    met: Mapping[Placement, Prediction | str],
    costs: str,
) -> str:
    """Returns the report without the verdict.

    `met`: the cheapest layout of each way, or why there is none. `costs`: name of the file of the towers' times.
    """
    duration_s = requests[-1].at_s - requests[0].at_s
    images = sum(len(request.images) for request in requests)
    lines = [
        f"{name}: {len(requests)} requests in {duration_s:.0f} s, {images} pictures and chunks of videos to encode; "
        f"wanted: first token within {target.ttft_s:g} s for {target.share:.0%}",
        "",
        f"{'way':11} GPUs  encoders  LLMs  first token  encoders busy  LLMs busy",
    ]
    for way, found in met.items():
        if isinstance(found, str):
            lines.append(f"{way.value:11} none: {found}  ({_PARTS[way]})")
            continue
        lines.append(
            f"{way.value:11} {found.gpus:4}  {found.layout.encoders or '–':>8}  {found.layout.llms:4}  "
            f"{found.ttft_s:9.2f} s  {_share(found.encoder_utilisation):>13}  {found.llm_utilisation:9.0%}  "
            f"({_PARTS[way]})"
        )
    ours, vllms = (
        sum(tower.seconds(request.images) for request in requests) for tower in (speeds.vitray_tower, speeds.vllm_tower)
    )
    stall_s = longest_stall_s(requests, speeds, Placement.AGGREGATED)
    lines += [
        "",
        f"encoding, each request alone: {ours:.1f} GPU-seconds by our encoder, {vllms:.1f} by vLLM's tower; a batch "
        f"there stops the answers of the same replica for up to {stall_s * 1e3:.0f} ms",
        f"measured: {costs}",
        f"assumed: hop of {speeds.transfer_overhead_s * 1e3:.0f} ms for every request with pictures, and "
        f"{speeds.llm_overhead_s * 1e3:.0f} ms of the language model's own for every one; 1000 visual tokens take a "
        f"CPU {speeds.image_load_s_per_token * 1e6:.0f} ms to read, one of vLLM's "
        f"{speeds.vllm_image_load_s_per_token * 1e6:.0f}; no more than "
        f"{MAX_UTILISATION:.0%} busy in the busiest {PEAK_S:.0f} s; up to {STEP_TOKENS} prompt tokens a step; "
        "a picture seen before costs no encoding in any way, and every prompt is read whole (no prefix cache), "
        f"{'as its images come' if speeds.early_prefill else 'once all of its images have come'} from encoders of "
        "their own; attention costs vLLM's tower what it costs ours; "
        "its tower spreads freely over a replica's GPUs; of a shared GPU the encoder has "
        f"{ENCODER_SHARE:g} of the memory, and the two never compute at once",
        "not looked at: memory, the rate of tokens after the first; see --help",
    ]
    return "\n".join(lines)


def verdict(chosen: Prediction, met: Mapping[Placement, Prediction | str]) -> str:
    """Returns the recommendation, one or two sentences."""
    alone = met[Placement.AGGREGATED]
    split = [found for way, found in met.items() if way is not Placement.AGGREGATED and not isinstance(found, str)]
    if chosen.layout.placement is Placement.AGGREGATED:
        against = min((found.gpus for found in split), default=None)
        why = (
            "nothing else keeps the promise"
            if against is None
            else f"with encoders of ours it would be {_gpus(against)}"
        )
        return f"\nDo not split: vLLM's own tower does it with {_gpus(chosen.gpus)}; {why}. The configuration:"
    if isinstance(alone, str):
        saved = f"vLLM alone does not do it: {alone}"
    else:
        saved = f"vLLM alone takes {_gpus(alone.gpus)}, {alone.gpus - chosen.gpus} more"
    how = (
        f"an encoder beside each of {chosen.layout.llms} language model(s), on the same GPU"
        if chosen.layout.placement is Placement.SHARED
        else f"{chosen.layout.encoders} encoder(s) to {chosen.layout.llms} language model(s)"
    )
    return f"\nSplit: {how}, {_gpus(chosen.gpus)} in all; {saved}. The configuration:"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _share(busy: float) -> str:
    return f"{busy:.0%}" if busy else "–"
