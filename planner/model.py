"""Queueing model of `vitray plan`: whether disaggregated encoders pay, and how many are needed.

The trace is simulated once in virtual time through one or two first-come-first-served queues with batches (G/G/k): idle
servers share the waiting requests, each up to a bound, for service times from measured speeds. Before the queues, CPU
processes parse requests and decode images, under processor sharing. Images of one request may go to several encoders.
Decoding takes a constant share of every language model.

Aggregated serving and shared GPUs have one queue for both tower and prefill; split serving has two in series. With
early prefill, a prompt enters the second queue at the earliest time from which its prefill never waits for an image.
Pure Python over numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from encoder.packing.cost_based import CostTable, ImageCost, plan_batches
from encoder.packing.greedy import Batch
from planner.queues import simulate_batch_queue, simulate_processor_sharing
from planner.traces import Request

STEP_TOKENS = 8192
"""Token budget of one prefill step of a language model; a longer prompt runs alone."""
MAX_UTILISATION = 0.9
"""Maximum utilisation of encoders and language models; above it any disturbance makes queues grow."""
TARGET_CPU_UTILISATION = 0.5
"""Target utilisation of CPU processes, which determines their number: they cost no GPU."""
PEAK_S = 300.0
"""Length of the window whose load determines utilisation: the busiest one of the trace."""


class Placement(Enum):
    """Where images are encoded."""

    AGGREGATED = "aggregated"
    """vLLM's own tower encodes."""
    SHARED = "shared"
    """An encoder shares the GPU of each language model, by fractions."""
    SPLIT = "split"
    """Encoders have separate GPUs."""


@dataclass(frozen=True)
class Language:
    """Speeds of one replica of the language model."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Total over all concurrent answers."""
    gpus: int = 1


@dataclass(frozen=True)
class Tower:
    """Measured times of a vision tower, and the limits of its batches."""

    table: CostTable
    max_images: int = 16
    max_tokens: int = 8192

    def seconds(self, images: Sequence[ImageCost]) -> float:
        """Returns the time of encoding all images, in batches one after the other."""
        return self.table.total_ms(images, self._batches(images)) / 1e3

    def longest_batch_s(self, images: Sequence[ImageCost]) -> float:
        """Returns the time of the longest of the images' batches."""
        return max(
            self.table.batch_ms([images[index] for index in batch.indices], batch.budget) / 1e3
            for batch in self._batches(images)
        )

    def _batches(self, images: Sequence[ImageCost]) -> list[Batch]:
        return plan_batches(images, table=self.table, max_images=self.max_images, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class Speeds:
    """Measured inputs of the model."""

    language: Language
    vitray_tower: Tower
    vllm_tower: Tower
    transfer_overhead_s: float
    """Time to first token that vitray's encoders (shared or split) add to encoding and queueing."""
    llm_overhead_s: float = 0.0
    """Time to first token that the language model adds to prefill, in every layout."""
    image_load_s_per_token: float = 0.0
    """CPU time per visual token of vitray's ingress, before any GPU work."""
    vllm_image_load_s_per_token: float = 0.0
    """CPU time per visual token of vLLM's API server."""
    early_prefill: bool = False
    """Whether split layouts use early prefill (`llm.early_prefill_min_tokens`)."""


@dataclass(frozen=True)
class Target:
    """Service-level objective: `share` of the requests gets its first token within `ttft_s`."""

    ttft_s: float
    share: float = 0.95


@dataclass(frozen=True)
class Layout:
    """Number of replicas of each kind."""

    placement: Placement
    encoders: int
    """0 if vLLM encodes; the number of language models if they share GPUs."""
    llms: int
    cpu_processes: int = 1
    """CPU processes that parse requests: replicas of the ingress, or vLLM's API servers."""


@dataclass(frozen=True)
class Prediction:
    """Predicted performance of a layout on a trace."""

    layout: Layout
    gpus: int
    ttft_s: float
    """Time to first token at the percentile `Target.share`; infinite for an overloaded layout."""
    encoder_utilisation: float
    """Utilisation of the encoders; 0 unless the layout is split."""
    llm_utilisation: float
    meets_target: bool


def find_cheapest_layout(
    requests: Sequence[Request], speeds: Speeds, target: Target, *, placement: Placement, max_gpus: int
) -> Prediction | None:
    """Returns the layout with the fewest GPUs that meets the target, of equals the one with the earliest first token;
    None if none within `max_gpus` does. With SHARED, a language model takes 1 GPU.
    """
    cpu_processes = _num_cpu_processes(requests, speeds, placement)
    largest = Layout(placement, max_gpus if placement is Placement.SPLIT else 0, max_gpus, max(max_gpus, cpu_processes))
    if not predict(requests, speeds, target, largest).meets_target:
        return None  # more replicas would not help
    for gpus in range(1, max_gpus + 1):
        layouts = _layouts(placement, gpus, speeds.language.gpus, cpu_processes)
        found = [predict(requests, speeds, target, layout) for layout in layouts]
        if feasible := [prediction for prediction in found if prediction.meets_target]:
            return min(feasible, key=lambda prediction: prediction.ttft_s)
    return None


def choose_layout(found: Sequence[Prediction]) -> Prediction:
    """Returns the prediction with the fewest GPUs, of equals the simplest layout: aggregated, shared, split."""
    order = list(Placement)
    return min(found, key=lambda prediction: (prediction.gpus, order.index(prediction.layout.placement)))


def predict(requests: Sequence[Request], speeds: Speeds, target: Target, layout: Layout) -> Prediction:
    """Simulates the trace, unless language models exceed MAX_UTILISATION: such a layout misses the target."""
    language, llms = speeds.language, layout.llms
    duration_s = _duration_at_peak_s(
        requests,
        [
            request.output_tokens / language.decode_tokens_per_s + request.num_tokens / language.prefill_tokens_per_s
            for request in requests
        ],
    )
    decode_share = sum(request.output_tokens for request in requests) / (
        language.decode_tokens_per_s * llms * duration_s
    )
    prefill_share = sum(request.num_tokens for request in requests) / (
        language.prefill_tokens_per_s * llms * duration_s
    )
    gpus = llms * language.gpus + (layout.encoders if layout.placement is Placement.SPLIT else 0)
    overloaded = Prediction(layout, gpus, float("inf"), 0.0, decode_share + prefill_share, False)
    if decode_share + prefill_share > MAX_UTILISATION:
        return overloaded
    ttfts, encoders_s, llms_s = simulate_ttft(requests, speeds, layout, decode_share)
    ttfts.sort()
    encoder_utilisation = 0.0
    if layout.placement is Placement.SPLIT:
        encoder_utilisation = encoders_s / (layout.encoders * _duration_at_peak_s(requests, _image_tokens(requests)))
    llm_utilisation = decode_share + llms_s * (1 - decode_share) / (llms * duration_s)
    ttft_s = ttfts[math.ceil(target.share * len(ttfts) - 1e-9) - 1]
    meets_target = ttft_s <= target.ttft_s and max(encoder_utilisation, llm_utilisation) <= MAX_UTILISATION
    return Prediction(layout, gpus, ttft_s, encoder_utilisation, llm_utilisation, meets_target)


def simulate_ttft(
    requests: Sequence[Request], speeds: Speeds, layout: Layout, decode_share: float = 0.0
) -> tuple[list[float], float, float]:
    """Returns each request's time to first token, in their order, and the total busy time of all encoders and of all
    language models, in seconds. `decode_share`: share of a language model's time that decoding takes.
    """
    language = speeds.language
    tower, num_gpus = _tower(speeds, layout.placement)

    def step_s(batch: Sequence[Request]) -> float:
        tokens = sum(request.num_tokens for request in batch)
        images = [image for request in batch for image in request.images if layout.placement is not Placement.SPLIT]
        encoding = tower.seconds(images) / num_gpus
        return (encoding + tokens / language.prefill_tokens_per_s) / (1 - decode_share)

    load_s = _image_load_s_per_token(speeds, layout.placement)
    work_s = [load_s * sum(image.num_tokens for image in request.images) for request in requests]
    ready = simulate_processor_sharing([request.at_s for request in requests], work_s, layout.cpu_processes)
    encoders_s = 0.0
    order = sorted(range(len(requests)), key=ready.__getitem__)
    if layout.placement is Placement.SPLIT:
        images = [(number, image) for number in order for image in requests[number].images]
        done, encoders_s = simulate_batch_queue(
            [image for _, image in images],
            [ready[number] for number, _ in images],
            layout.encoders,
            tower.seconds,
            lambda batch: len(batch) <= tower.max_images and _launch_together(batch, speeds),
        )
        before = [0.0] * len(requests)  # prefill time of the request's earlier images, in seconds
        for (number, image), at_s in zip(images, done, strict=True):
            ready[number] = max(ready[number], at_s - before[number])
            if speeds.early_prefill:
                before[number] += image.num_tokens / (language.prefill_tokens_per_s * (1 - decode_share))
        order.sort(key=ready.__getitem__)
    done, llms_s = simulate_batch_queue(
        [requests[number] for number in order],
        [ready[number] for number in order],
        layout.llms,
        step_s,
        lambda batch: sum(request.num_tokens for request in batch) <= STEP_TOKENS,
    )
    ttfts = [0.0] * len(requests)
    for number, at_s in zip(order, done, strict=True):
        request = requests[number]
        transferred = request.images and layout.placement is not Placement.AGGREGATED
        overhead_s = speeds.llm_overhead_s + (speeds.transfer_overhead_s if transferred else 0.0)
        ttfts[number] = at_s - request.at_s + overhead_s
    return ttfts, encoders_s, llms_s


def longest_stall_s(requests: Sequence[Request], speeds: Speeds, placement: Placement) -> float:
    """Returns the longest time for which encoding one request's images stalls decoding on the same GPU."""
    if placement is Placement.SPLIT:
        return 0.0
    tower, num_gpus = _tower(speeds, placement)
    return max(
        (tower.longest_batch_s(request.images) / num_gpus for request in requests if request.images), default=0.0
    )


def _tower(speeds: Speeds, placement: Placement) -> tuple[Tower, int]:
    """Returns the encoding tower and its number of GPUs; vLLM's is assumed to scale perfectly, in its favour."""
    return (speeds.vllm_tower, speeds.language.gpus) if placement is Placement.AGGREGATED else (speeds.vitray_tower, 1)


def _launch_together(batch: Sequence[ImageCost], speeds: Speeds) -> bool:
    """Returns whether encoders launch this batch together: early prefill bounds it to `worthwhile_tokens`."""
    enough = speeds.vitray_tower.table.worthwhile_tokens if speeds.early_prefill else None
    return enough is None or sum(image.num_tokens for image in batch) <= enough


def _image_load_s_per_token(speeds: Speeds, placement: Placement) -> float:
    return speeds.vllm_image_load_s_per_token if placement is Placement.AGGREGATED else speeds.image_load_s_per_token


def _num_cpu_processes(requests: Sequence[Request], speeds: Speeds, placement: Placement) -> int:
    """Returns the number of CPU processes that the trace needs."""
    tokens = _image_tokens(requests)
    load_s = sum(tokens) * _image_load_s_per_token(speeds, placement)
    return max(1, math.ceil(load_s / (TARGET_CPU_UTILISATION * _duration_at_peak_s(requests, tokens))))


def _image_tokens(requests: Sequence[Request]) -> list[int]:
    return [sum(image.num_tokens for image in request.images) for request in requests]


def _duration_at_peak_s(requests: Sequence[Request], work: Sequence[float]) -> float:
    """Returns the time that the trace would take at the load of its busiest PEAK_S, or of its length if it is shorter.

    N requests have N intervals, the last of which is the mean. Requests that arrive at one time count as PEAK_S.
    `work`: of each request, in any unit.
    """
    times_s = [request.at_s - requests[0].at_s for request in requests]
    window_s = min(PEAK_S, times_s[-1] * len(times_s) / (len(times_s) - 1)) if times_s[-1] > 0 else PEAK_S
    totals = list(accumulate(work, initial=0.0))
    ends = [bisect_left(times_s, at_s + window_s) for at_s in times_s]
    peak = max(totals[end] - totals[begin] for begin, end in enumerate(ends))
    return window_s * totals[-1] / peak if peak else window_s


def _layouts(placement: Placement, gpus: int, llm_gpus: int, cpu_processes: int) -> Iterator[Layout]:
    """Yields all layouts of exactly `gpus` GPUs, with at least one CPU process per language model."""
    if placement is Placement.SPLIT:
        for llms in range(1, (gpus - 1) // llm_gpus + 1):
            yield Layout(placement, gpus - llms * llm_gpus, llms, max(llms, cpu_processes))
    elif gpus % llm_gpus == 0:
        llms = gpus // llm_gpus
        yield Layout(placement, llms if placement is Placement.SHARED else 0, llms, max(llms, cpu_processes))
