"""Whether encoders of their own pay, and how many: the arithmetic of `vitray plan`.

The trace is played once in a virtual clock through one or two queues, first come first served (G/G/k with batches):
those that are free share what waits, each up to a bound, and are busy for as long as measured speeds say. Before that,
processes on CPUs read requests and their pictures, all that they have at once. Images of one request may go to several
encoders. Answers that are being written take a constant share of every language model.
Aggregated serving and a GPU shared by fractions are one queue for both the tower and the prefill; split serving is two
in a row. A prompt that is read as its images come enters the second as late as it can without having to wait for one of
them. Pure Python over numbers: it must not know of files, Ray or configurations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from deployments.virtual_queues import played, shared
from encoder.packing import Batch
from encoder.planning import CostTable, ImageCost, plan
from encoder.traces import Request

STEP_TOKENS = 8192
"""Of prompts that one step of a language model takes at once; a longer prompt goes alone."""
MOST_BUSY = 0.9
"""A share of its time that nothing may be busier than; past it queues grow with any disturbance."""
READERS_BUSY = 0.5
"""The same for processes on CPUs, of which there are as many as that needs: they cost no GPU."""


class Way(Enum):
    """Where images are encoded."""

    AGGREGATED = "aggregated"
    """By vLLM's own tower."""
    SHARED = "shared"
    """By an encoder on each language model's GPU, by fractions."""
    SPLIT = "split"
    """By encoders on GPUs of their own."""


@dataclass(frozen=True)
class Language:
    """One replica of the language model."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Of all answers that it writes side by side."""
    gpus: int = 1


@dataclass(frozen=True)
class Tower:
    """A vision tower's measured times, and what one batch of it may hold."""

    table: CostTable
    max_images: int = 16
    max_tokens: int = 8192

    def seconds(self, images: Sequence[ImageCost]) -> float:
        """For all of them."""
        return self.table.total_ms(images, self._batches(images)) / 1e3

    def longest_batch_s(self, images: Sequence[ImageCost]) -> float:
        """For the longest of the batches that they make."""
        return max(
            self.table.batch_ms([images[index] for index in batch.indices], batch.budget) / 1e3
            for batch in self._batches(images)
        )

    def _batches(self, images: Sequence[ImageCost]) -> list[Batch]:
        return plan(images, table=self.table, max_images=self.max_images, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class Speeds:
    """All that was measured."""

    language: Language
    ours: Tower
    vllms: Tower
    hop_s: float
    """What the way through encoders of their own adds to the first token's time beside encoding."""
    entry_s: float = 0.0
    """What the language model adds to it beside prefill, in every way."""
    ours_reading_s: float = 0.0
    """For which a visual token keeps a process busy before any GPU sees it: an ingress of ours …"""
    vllms_reading_s: float = 0.0
    """… and an API server of vLLM's."""
    reads_early: bool = False
    """Whether a prompt is read while its images come from encoders of their own (`llm.begin_from_tokens`)."""


@dataclass(frozen=True)
class Target:
    """A share of the requests has its first token within so many seconds."""

    first_token_s: float
    share: float = 0.95


@dataclass(frozen=True)
class Layout:
    """How many replicas of what."""

    way: Way
    encoders: int
    """0 where vLLM encodes; on the language models' own GPUs where they are shared."""
    llms: int
    readers: int = 1
    """Processes on CPUs that read requests: replicas of the ingress, or API servers of vLLM's."""


@dataclass(frozen=True)
class Prediction:
    """What a layout would do with the trace."""

    layout: Layout
    gpus: int
    first_token_s: float
    """Within which the target's share has it."""
    encoder_busy: float
    """Share of its time; 0 where there are no encoders of their own."""
    llm_busy: float
    meets: bool


def cheapest(
    requests: Sequence[Request], speeds: Speeds, target: Target, *, way: Way, max_gpus: int
) -> Prediction | None:
    """The fewest GPUs that meet the target, among equals the earliest first token; None where `max_gpus` do not.

    Raises:
        ValueError: GPUs are shared and a language model takes several; or there is no request.
    """
    if way is Way.SHARED and speeds.language.gpus > 1:
        raise ValueError(f"a language model takes {speeds.language.gpus} GPUs; a shared one has room for 1")
    readers = _readers(requests, speeds, way)
    plenty = Layout(way, max_gpus if way is Way.SPLIT else 0, max_gpus, max(max_gpus, readers))
    if not predict(requests, speeds, target, plenty).meets:
        return None  # it is not for lack of replicas
    for gpus in range(1, max_gpus + 1):
        layouts = _layouts(way, gpus, speeds.language.gpus, readers)
        found = [predict(requests, speeds, target, layout) for layout in layouts]
        if good := [prediction for prediction in found if prediction.meets]:
            return min(good, key=lambda prediction: prediction.first_token_s)
    return None


def best(found: Sequence[Prediction]) -> Prediction:
    """The fewest GPUs; among equals what has the fewest parts: vLLM alone, a shared GPU, encoders of their own."""
    order = list(Way)
    return min(found, key=lambda prediction: (prediction.gpus, order.index(prediction.layout.way)))


def predict(requests: Sequence[Request], speeds: Speeds, target: Target, layout: Layout) -> Prediction:
    """Plays the trace. Where something would be busier than MOST_BUSY, it is not played and meets nothing."""
    language, llms = speeds.language, layout.llms
    lasts_s = requests[-1].at_s - requests[0].at_s
    writing = sum(request.output_tokens for request in requests) / (language.decode_tokens_per_s * llms * lasts_s)
    reading = sum(request.num_tokens for request in requests) / (language.prefill_tokens_per_s * llms * lasts_s)
    gpus = llms * language.gpus + (layout.encoders if layout.way is Way.SPLIT else 0)
    lost = Prediction(layout, gpus, float("inf"), 0.0, writing + reading, False)
    if writing + reading > MOST_BUSY:
        return lost
    waits, encoders_s, llms_s = first_tokens(requests, speeds, layout, writing)
    waits.sort()
    encoder_busy = encoders_s / (layout.encoders * lasts_s) if layout.way is Way.SPLIT else 0.0
    llm_busy = writing + llms_s * (1 - writing) / (llms * lasts_s)
    first_token_s = waits[math.ceil(target.share * len(waits) - 1e-9) - 1]
    meets = first_token_s <= target.first_token_s and max(encoder_busy, llm_busy) <= MOST_BUSY
    return Prediction(layout, gpus, first_token_s, encoder_busy, llm_busy, meets)


def first_tokens(
    requests: Sequence[Request], speeds: Speeds, layout: Layout, writing: float = 0.0
) -> tuple[list[float], float, float]:
    """Seconds to each request's first token, in their order, and for which all encoders and all language models were
    busy. `writing`: the share of a language model's time that answers being written take.
    """
    language = speeds.language
    tower, over = _tower(speeds, layout.way)

    def step_s(batch: Sequence[Request]) -> float:
        tokens = sum(request.num_tokens for request in batch)
        images = [image for request in batch for image in request.images if layout.way is not Way.SPLIT]
        encoding = tower.seconds(images) / over
        return (encoding + tokens / language.prefill_tokens_per_s) / (1 - writing)

    reading_s = _reading_s(speeds, layout.way)
    work_s = [reading_s * sum(image.num_tokens for image in request.images) for request in requests]
    ready, encoders_s = shared([request.at_s for request in requests], work_s, layout.readers), 0.0
    order = sorted(range(len(requests)), key=ready.__getitem__)
    if layout.way is Way.SPLIT:
        images = [(number, image) for number in order for image in requests[number].images]
        done, encoders_s = played(
            [image for _, image in images],
            [ready[number] for number, _ in images],
            layout.encoders,
            tower.seconds,
            lambda batch: len(batch) <= tower.max_images and _worth_a_launch(batch, speeds),
        )
        before = [0.0] * len(requests)  # seconds for which what comes before an image is read
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
        hop_s = speeds.hop_s if request.images and layout.way is not Way.AGGREGATED else 0.0
        waits[number] = at_s - request.at_s + hop_s + speeds.entry_s
    return waits, encoders_s, llms_s


def longest_stall_s(requests: Sequence[Request], speeds: Speeds, way: Way) -> float:
    """How long a batch of one request's images at most keeps a GPU that also writes answers from doing so."""
    if way is Way.SPLIT:
        return 0.0
    tower, over = _tower(speeds, way)
    return max((tower.longest_batch_s(request.images) / over for request in requests if request.images), default=0.0)


def _tower(speeds: Speeds, way: Way) -> tuple[Tower, int]:
    """What encodes, and over how many GPUs. vLLM's spreads over a replica's, freely, which is in its favour."""
    return (speeds.vllms, speeds.language.gpus) if way is Way.AGGREGATED else (speeds.ours, 1)


def _worth_a_launch(batch: Sequence[ImageCost], speeds: Speeds) -> bool:
    """Where prompts are read early, encoders launch no more together than gains by it."""
    enough = speeds.ours.table.worthwhile_tokens if speeds.reads_early else None
    return enough is None or sum(image.num_tokens for image in batch) <= enough


def _reading_s(speeds: Speeds, way: Way) -> float:
    return speeds.vllms_reading_s if way is Way.AGGREGATED else speeds.ours_reading_s


def _readers(requests: Sequence[Request], speeds: Speeds, way: Way) -> int:
    """As many processes on CPUs as the trace needs."""
    tokens = sum(image.num_tokens for request in requests for image in request.images)
    lasts_s = requests[-1].at_s - requests[0].at_s
    return max(1, math.ceil(tokens * _reading_s(speeds, way) / (READERS_BUSY * lasts_s)))


def _layouts(way: Way, gpus: int, llm_gpus: int, readers: int) -> Iterator[Layout]:
    """All of exactly so many GPUs; with a process that reads requests for each language model at least."""
    if way is Way.SPLIT:
        for llms in range(1, (gpus - 1) // llm_gpus + 1):
            yield Layout(way, gpus - llms * llm_gpus, llms, max(llms, readers))
    elif gpus % llm_gpus == 0:
        llms = gpus // llm_gpus
        yield Layout(way, llms if way is Way.SHARED else 0, llms, max(llms, readers))
