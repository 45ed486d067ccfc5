"""A fleet of encoder replicas in a virtual clock, image by image, scaled by Serve's own autoscaling code.

Unlike the flow of `fleet.py`, each image is simulated: the application's own code routes it (`affinity`), queues it
(`fair_queue`), packs it (`packing`) and measures what a replica reports (`throughput`); only time and the device are
simulated. The cost is proportional to the images, which limits it to the few replicas of a recorded run.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ray.serve import autoscaling_policy as serves
from ray.serve._private.common import ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingConfig

from benchmarks.simulation.fleet import ENCODER, Policy, context
from deployments.common.fair_queue import WINDOW, FairQueue, virtual_arrival_s
from deployments.common.throughput import BusySpeed, InFlightTokens
from deployments.routing.affinity import ActiveCall, Affinity, Call
from deployments.scaling.encoder_scaler import ARRIVING_TOKENS_PER_S, BACKLOG_TOKENS, TOKENS_PER_IMAGE, TOKENS_PER_S
from encoder.packing.greedy import pack

DECIDE_S = 0.2
LOAD_FACTOR = 1.25


@dataclass(frozen=True)
class ImageModel:
    """Behaviour of a replica, and the time of an image outside the device."""

    tokens_per_s: float
    start_s: float
    """Seconds from the decision to start a replica until it gets images."""
    image_s: float
    """Seconds from a request's arrival to its answer without the image's time on the device; half are before it."""
    report_s: float
    batches_under_way: int
    """Batches in flight at a replica: on a GPU two, one that is computed and one that follows."""
    batch_images: int
    batch_tokens: int


@dataclass(frozen=True)
class Request:
    at_s: float
    image_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Prediction:
    delays_s: list[float]
    """Delay of each request, in the given order."""
    replicas: list[tuple[float, int, int]]
    """Time of each change, and from then on the replicas that run, and those that start or finish their last images."""

    def replica_seconds(self, until_s: float) -> float:
        """Returns replica-seconds of all replicas that hold a device, from 0 on."""
        ends = [at_s for at_s, _, _ in self.replicas[1:]] + [until_s]
        spans = zip(self.replicas, ends, strict=True)
        return sum((min(end, until_s) - at_s) * (running + others) for (at_s, running, others), end in spans)


@dataclass(frozen=True)
class _Image:
    request: int
    digest: str
    tokens: int
    tokens_before: int


@dataclass(eq=False)
class _Replica:
    name: str
    work: InFlightTokens
    speed: BusySpeed
    line: FairQueue[tuple[_Image, ActiveCall]] = field(default_factory=FairQueue)
    under_way_batches: int = 0
    free_at_s: float = 0.0
    reported: dict[str, float] = field(default_factory=dict)
    under_way: dict[_Image, Any] = field(default_factory=dict)


class ImageFleet:
    """One run. `config` has Serve's bounds, delays and look-back period."""

    def __init__(self, model: ImageModel, policy: Policy, config: AutoscalingConfig, *, replicas: int) -> None:
        self._model, self._config = model, config
        self._policy = serves._apply_autoscaling_config(policy)
        self._now = 0.0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self._router = Affinity(load_factor=LOAD_FACTOR, separate_cache_hits=True)
        self._running: list[_Replica] = []
        self._ending: list[_Replica] = []
        self._starting: list[int] = []
        self._until_s = 0.0
        self._asked_for = replicas
        self._state: dict[str, Any] = {}
        self._left: dict[int, int] = {}
        self._ended_s: dict[int, float] = {}
        self._replicas: list[tuple[float, int, int]] = []
        for _ in range(replicas):
            self._ready()

    def run(self, requests: Sequence[Request], seconds: float) -> Prediction:
        """Plays the requests; those unfinished after `seconds` are finished without scaling decisions."""
        self._until_s = seconds
        for number, request in enumerate(requests):
            self._at(request.at_s + self._model.image_s / 2, partial(self._arrive, number, requests))
        for turn in range(math.ceil(seconds / DECIDE_S)):
            self._at(turn * DECIDE_S, self._decide)
        with patch.object(serves, "time", SimpleNamespace(time=lambda: self._now)):
            while self._later:
                self._now, _, action = heapq.heappop(self._later)
                action()
        delays = [self._ended_s[number] - request.at_s for number, request in enumerate(requests)]
        return Prediction(delays, self._replicas)

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (at_s, next(self._order), action))

    def _arrive(self, number: int, requests: Sequence[Request]) -> None:
        tokens = requests[number].image_tokens
        self._left[number] = len(tokens)
        for place, count in enumerate(tokens):
            digest = hashlib.sha256(f"{number} {place}".encode()).hexdigest()
            self._route(_Image(number, digest, count, sum(tokens[:place])))

    def _route(self, image: _Image) -> None:
        call = Call(image.digest, image.tokens)
        order = self._router.candidates(call)
        begun = self._router.begin(order[0], call) if order else None
        if begun is None:
            self._at(self._now + DECIDE_S, lambda: self._route(image))
            return
        replica = next(one for one in self._running if one.name == begun.name)
        job = replica.work.job(image.tokens)
        job.__enter__()
        replica.under_way[image] = job
        replica.speed.begin()
        place = virtual_arrival_s(
            self._now,
            tokens=image.tokens,
            tokens_before=image.tokens_before,
            tokens_per_s=replica.speed.tokens_per_s,
        )
        replica.line.add(place, (image, begun))
        self._begin(replica)

    def _begin(self, replica: _Replica) -> None:
        """Starts batches while the limit in flight allows, each with the first image in the queue.

        The other images of the window return to their positions.
        """
        model = self._model
        if not replica.line or replica.under_way_batches == model.batches_under_way:
            return
        window = replica.line.take(WINDOW)
        counts = [image.tokens for _, (image, _) in window]
        batches = pack(counts, budgets=[model.batch_tokens], max_images=model.batch_images)
        chosen = next(batch.indices for batch in batches if 0 in batch.indices)
        for at, (place, entry) in enumerate(window):
            if at not in chosen:
                replica.line.add(place, entry)
        replica.under_way_batches += 1
        took_s = sum(counts[at] for at in chosen) / model.tokens_per_s
        replica.free_at_s = max(self._now, replica.free_at_s) + took_s
        batch = [window[at][1] for at in chosen]
        self._at(replica.free_at_s, lambda: self._done(replica, batch))
        self._begin(replica)

    def _done(self, replica: _Replica, batch: Sequence[tuple[_Image, ActiveCall]]) -> None:
        for image, begun in batch:
            replica.under_way.pop(image).__exit__(None, None, None)
            replica.speed.end(image.tokens)
            self._router.end(begun)
            self._left[image.request] -= 1
            if not self._left[image.request]:
                self._ended_s[image.request] = self._now + self._model.image_s / 2
        replica.under_way_batches -= 1
        self._begin(replica)
        if not replica.under_way and replica in self._ending:
            self._ending.remove(replica)
            self._note()

    def _ready(self) -> None:
        replica = _Replica(
            f"replica {next(self._names)}", InFlightTokens(lambda: self._now), BusySpeed(lambda: self._now)
        )
        self._running.append(replica)
        self._changed()
        self._report(replica)

    def _start(self) -> None:
        number = next(self._order)
        self._starting.append(number)

        def started() -> None:
            if number in self._starting:
                self._starting.remove(number)
                self._ready()

        self._at(self._now + self._model.start_s, started)

    def _report(self, replica: _Replica) -> None:
        replica.reported = {
            BACKLOG_TOKENS: float(replica.work.tokens),
            ARRIVING_TOKENS_PER_S: replica.work.arriving_tokens_per_s(),
            TOKENS_PER_S: replica.speed.tokens_per_s,
            TOKENS_PER_IMAGE: replica.work.tokens_per_job(),
        }
        if replica in self._running and self._now <= self._until_s:
            self._at(self._now + self._model.report_s, lambda: self._report(replica))

    def _raw(self) -> dict[str, dict[ReplicaID, list[TimeStampedValue]]]:
        return {
            name: {
                ReplicaID(replica.name, ENCODER): [TimeStampedValue(self._now, replica.reported[name])]
                for replica in self._running
            }
            for name in (BACKLOG_TOKENS, ARRIVING_TOKENS_PER_S, TOKENS_PER_S, TOKENS_PER_IMAGE)
        }

    def _decide(self) -> None:
        ctx = context(
            self._config,
            now_s=self._now,
            running=len(self._running),
            asked_for=self._asked_for,
            requests=lambda: float(sum(len(replica.under_way) for replica in self._running)),
            queued=lambda: 0.0,
            raw_metrics=self._raw,
            state=self._state,
        )
        wanted, self._state = self._policy(ctx)
        self._asked_for = min(max(math.ceil(wanted), self._config.min_replicas), self._config.max_replicas)
        more = self._asked_for - len(self._running) - len(self._starting)
        for _ in range(more):
            self._start()
        for _ in range(-more):  # the newest replicas stop first
            if self._starting:
                self._starting.pop()
                continue
            replica = self._running.pop()
            if replica.under_way:
                self._ending.append(replica)
        self._changed()

    def _changed(self) -> None:
        self._router.set_replicas(replica.name for replica in self._running)
        self._note()

    def _note(self) -> None:
        row = (self._now, len(self._running), len(self._starting) + len(self._ending))
        if not self._replicas or self._replicas[-1][1:] != row[1:]:
            self._replicas.append(row)
