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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from encoder.packing.cost_based import CostTable, ImageCost, plan
from encoder.packing.greedy import Batch
from planner.queues import played, shared
from planner.traces import Request

STEP_TOKENS = 8192
"""Token budget of one prefill step of a language model; a longer prompt runs alone."""
MOST_BUSY = 0.9
"""Maximum utilisation of encoders and language models; above it any disturbance makes queues grow."""
READERS_BUSY = 0.5
"""Target utilisation of CPU processes, which determines their number: they cost no GPU."""


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
        return plan(images, table=self.table, max_images=self.max_images, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class Speeds:
    """Measured inputs of the model."""

    language: Language
    ours: Tower
    vllms: Tower
    hop_s: float
    """Time to first token that vitray's encoders (shared or split) add to encoding and queueing."""
    entry_s: float = 0.0
    """Time to first token that the language model adds to prefill, in every layout."""
    ours_reading_s: float = 0.0
    """CPU time per visual token of vitray's ingress, before any GPU work."""
    vllms_reading_s: float = 0.0
    """CPU time per visual token of vLLM's API server."""
    reads_early: bool = False
    """Whether split layouts use early prefill (`llm.early_prefill_min_tokens`)."""


@dataclass(frozen=True)
class Target:
    """Service-level objective: `share` of the requests gets its first token within `first_token_s`."""

    first_token_s: float
    share: float = 0.95


@dataclass(frozen=True)
class Layout:
    """Number of replicas of each kind."""

    way: Placement
    encoders: int
    """0 if vLLM encodes; the number of language models if they share GPUs."""
    llms: int
    readers: int = 1
    """CPU processes that parse requests: replicas of the ingress, or vLLM's API servers."""


@dataclass(frozen=True)
class Prediction:
    """Predicted performance of a layout on a trace."""

    layout: Layout
    gpus: int
    first_token_s: float
    """Time to first token at the percentile `Target.share`; infinite for an overloaded layout."""
    encoder_busy: float
    """Utilisation of the encoders; 0 unless the layout is split."""
    llm_busy: float
    meets: bool


def cheapest(
    requests: Sequence[Request], speeds: Speeds, target: Target, *, way: Placement, max_gpus: int
) -> Prediction | None:
    """Returns the layout with the fewest GPUs that meets the target, of equals the one with the earliest first token;
    None if none within `max_gpus` does.

    Raises:
        ValueError: `way` is SHARED and a language model takes several GPUs.
    """
    if way is Placement.SHARED and speeds.language.gpus > 1:
        raise ValueError(f"a language model takes {speeds.language.gpus} GPUs; a shared one has room for 1")
    readers = _readers(requests, speeds, way)
    plenty = Layout(way, max_gpus if way is Placement.SPLIT else 0, max_gpus, max(max_gpus, readers))
    if not predict(requests, speeds, target, plenty).meets:
        return None  # more replicas would not help
    for gpus in range(1, max_gpus + 1):
        layouts = _layouts(way, gpus, speeds.language.gpus, readers)
        found = [predict(requests, speeds, target, layout) for layout in layouts]
        if good := [prediction for prediction in found if prediction.meets]:
            return min(good, key=lambda prediction: prediction.first_token_s)
    return None


def best(found: Sequence[Prediction]) -> Prediction:
    """Returns the prediction with the fewest GPUs, of equals the simplest layout: aggregated, shared, split."""
    order = list(Placement)
    return min(found, key=lambda prediction: (prediction.gpus, order.index(prediction.layout.way)))


def predict(requests: Sequence[Request], speeds: Speeds, target: Target, layout: Layout) -> Prediction:
    """Simulates the trace, unless language models exceed MOST_BUSY: such a layout misses the target."""
    language, llms = speeds.language, layout.llms
    lasts_s = requests[-1].at_s - requests[0].at_s
    writing = sum(request.output_tokens for request in requests) / (language.decode_tokens_per_s * llms * lasts_s)
    reading = sum(request.num_tokens for request in requests) / (language.prefill_tokens_per_s * llms * lasts_s)
    gpus = llms * language.gpus + (layout.encoders if layout.way is Placement.SPLIT else 0)
    lost = Prediction(layout, gpus, float("inf"), 0.0, writing + reading, False)
    if writing + reading > MOST_BUSY:
        return lost
    waits, encoders_s, llms_s = first_tokens(requests, speeds, layout, writing)
    waits.sort()
    encoder_busy = encoders_s / (layout.encoders * lasts_s) if layout.way is Placement.SPLIT else 0.0
    llm_busy = writing + llms_s * (1 - writing) / (llms * lasts_s)
    first_token_s = waits[math.ceil(target.share * len(waits) - 1e-9) - 1]
    meets = first_token_s <= target.first_token_s and max(encoder_busy, llm_busy) <= MOST_BUSY
    return Prediction(layout, gpus, first_token_s, encoder_busy, llm_busy, meets)


def first_tokens(
    requests: Sequence[Request], speeds: Speeds, layout: Layout, writing: float = 0.0
) -> tuple[list[float], float, float]:
    """Returns each request's time to first token, in their order, and the total busy time of all encoders and of all
    language models, in seconds. `writing`: share of a language model's time that decoding takes.
    """
    language = speeds.language
    tower, over = _tower(speeds, layout.way)

    def step_s(batch: Sequence[Request]) -> float:
        tokens = sum(request.num_tokens for request in batch)
        images = [image for request in batch for image in request.images if layout.way is not Placement.SPLIT]
        encoding = tower.seconds(images) / over
        return (encoding + tokens / language.prefill_tokens_per_s) / (1 - writing)

    reading_s = _reading_s(speeds, layout.way)
    work_s = [reading_s * sum(image.num_tokens for image in request.images) for request in requests]
    ready, encoders_s = shared([request.at_s for request in requests], work_s, layout.readers), 0.0
    order = sorted(range(len(requests)), key=ready.__getitem__)
    if layout.way is Placement.SPLIT:
        images = [(number, image) for number in order for image in requests[number].images]
        done, encoders_s = played(
            [image for _, image in images],
            [ready[number] for number, _ in images],
            layout.encoders,
            tower.seconds,
            lambda batch: len(batch) <= tower.max_images and _worth_a_launch(batch, speeds),
        )
        before = [0.0] * len(requests)  # prefill time of the request's earlier images, in seconds
        for (number, image), at_s in zip(images, done, strict=True):
            ready[number] = max(ready[number], at_s - before[number])
            if speeds.reads_early:
                before[number] += image.num_tokens / (language.prefill_tokens_per_s * (1 - writing))
        order.sort(key=ready.__getitem__)
    done, llms_s = played(
        [requests[number] for number in order],
        [ready[number] for number in order],
        layout.llms,
        step_s,
        lambda batch: sum(request.num_tokens for request in batch) <= STEP_TOKENS,
    )
    waits = [0.0] * len(requests)
    for number, at_s in zip(order, done, strict=True):
        request = requests[number]
        hop_s = speeds.hop_s if request.images and layout.way is not Placement.AGGREGATED else 0.0
        waits[number] = at_s - request.at_s + hop_s + speeds.entry_s
    return waits, encoders_s, llms_s


def longest_stall_s(requests: Sequence[Request], speeds: Speeds, way: Placement) -> float:
    """Returns the longest time for which encoding one request's images stalls decoding on the same GPU."""
    if way is Placement.SPLIT:
        return 0.0
    tower, over = _tower(speeds, way)
    return max((tower.longest_batch_s(request.images) / over for request in requests if request.images), default=0.0)


def _tower(speeds: Speeds, way: Placement) -> tuple[Tower, int]:
    """Returns the encoding tower and its number of GPUs; vLLM's is assumed to scale perfectly, in its favour."""
    return (speeds.vllms, speeds.language.gpus) if way is Placement.AGGREGATED else (speeds.ours, 1)


def _worth_a_launch(batch: Sequence[ImageCost], speeds: Speeds) -> bool:
    """Returns whether encoders launch this batch together: early prefill bounds it to `worthwhile_tokens`."""
    enough = speeds.ours.table.worthwhile_tokens if speeds.reads_early else None
    return enough is None or sum(image.num_tokens for image in batch) <= enough


def _reading_s(speeds: Speeds, way: Placement) -> float:
    return speeds.vllms_reading_s if way is Placement.AGGREGATED else speeds.ours_reading_s


def _readers(requests: Sequence[Request], speeds: Speeds, way: Placement) -> int:
    """Returns the number of CPU processes that the trace needs."""
    tokens = sum(image.num_tokens for request in requests for image in request.images)
    lasts_s = requests[-1].at_s - requests[0].at_s
    return max(1, math.ceil(tokens * _reading_s(speeds, way) / (READERS_BUSY * lasts_s)))


def _layouts(way: Placement, gpus: int, llm_gpus: int, readers: int) -> Iterator[Layout]:
    """Yields all layouts of exactly `gpus` GPUs, with at least one CPU process per language model."""
    if way is Placement.SPLIT:
        for llms in range(1, (gpus - 1) // llm_gpus + 1):
            yield Layout(way, gpus - llms * llm_gpus, llms, max(llms, readers))
    elif gpus % llm_gpus == 0:
        llms = gpus // llm_gpus
        yield Layout(way, llms if way is Placement.SHARED else 0, llms, max(llms, readers))
