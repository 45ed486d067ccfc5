"""A fleet of encoder replicas in a virtual clock, scaled by Serve's own autoscaling code.

Replicas start with a delay, have the same speed, and may fail. Work waits in one first-come-first-served queue, as with
perfect routing; it is processed as a flow in time steps instead of images, so that ten thousand replicas cost as much
as one. The policy sees metrics as old as Serve's reports.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from ray.serve import autoscaling_policy as serves
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from deployments.common.throughput import ARRIVALS_OVER_S
from deployments.scaling.encoder_scaler import (
    ARRIVING_TOKENS_PER_S,
    BACKLOG_TOKENS,
    RECEIVED_TOKENS,
    TOKENS_PER_IMAGE,
    TOKENS_PER_S,
)

Policy = Callable[[AutoscalingContext], tuple[int | float, dict[str, Any]]]
Numbers = npt.NDArray[np.float64]

ENCODER = DeploymentID("Encoder", "vitray")
RECORDS_A_LOOK_BACK = 5
"""Samples per look-back period; Serve takes one every fifth of it."""


@dataclass(frozen=True)
class Load:
    """Arrivals in each step of `step_s` seconds: tokens, images and requests with images, `[steps]` each."""

    step_s: float
    tokens: Numbers
    images: Numbers
    requests: Numbers


@dataclass(frozen=True)
class FleetModel:
    """Behaviour of replicas."""

    tokens_per_s: float
    start_s: float = 30.0
    """Seconds from the decision to start a replica to its first image."""
    image_s: float = 0.05
    """Seconds of an image besides its time on the GPU: decoding, batching, transport."""
    mean_life_s: float = math.inf
    """Mean seconds between failures of a replica, which Serve replaces by another."""
    report_s: float = 10.0
    """Seconds between reports of a replica or a handle; Serve's default is 10 s."""
    decide_s: float = 1.0
    max_ongoing: int = 512
    """Limit on the images that a replica accepts; more wait at the handles."""


@dataclass(frozen=True)
class Outcome:
    """Results of a run after its warm-up."""

    missed: float
    """Share of requests whose slowest image took longer than the target."""
    gpu_hours: float
    """GPU-hours of all replicas, each from its start to its end."""
    late_s: Sequence[float]
    """Duration of each period in which requests missed the target, until capacity had caught up."""
    most_replicas: int
    decide_ms: float
    """Median duration of a decision in real time."""


class Fleet:
    """One run. `config` has Serve's bounds, delays and look-back period."""

    def __init__(
        self, model: FleetModel, policy: Policy, config: AutoscalingConfig, *, replicas: int, seed: int = 0
    ) -> None:
        self._model, self._config = model, config
        self._policy = serves._apply_autoscaling_config(policy)
        self._now = 0.0
        self._chance = np.random.default_rng(seed)
        self._running = self._asked_for = replicas
        self._starting: deque[float] = deque()
        """Times at which starting replicas will be ready, ascending."""
        self._state: dict[str, Any] = {}
        self._samples: deque[TimeStampedValue] = deque()
        self._queued_samples: deque[TimeStampedValue] = deque()
        self._reported: tuple[list[TimeStampedValue], list[TimeStampedValue]] = ([], [])
        self._next_record = self._next_report = 0.0
        self._phases = max(1, round(model.report_s / model.decide_s))
        # Replicas report in turn; those that report at the same time share a report.
        names = (BACKLOG_TOKENS, ARRIVING_TOKENS_PER_S, TOKENS_PER_S, TOKENS_PER_IMAGE, RECEIVED_TOKENS)
        self._reports: dict[str, list[list[TimeStampedValue]]] = {
            name: [[] for _ in range(self._phases)] for name in names
        }
        self._raw: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
        self._raw_for = -1
        self._given = 0.0
        """Cumulative tokens of each replica; new replicas inherit the value, because only differences count."""
        self._given_samples: deque[TimeStampedValue] = deque()
        self._wasted = 0.0
        self._arriving = self._arriving_images = 0.0
        self._decide_ms: list[float] = []

    def run(self, load: Load, *, target_s: float, warm_up_s: float = 0.0) -> Outcome:
        """Plays the load to its end; `target_s` is the maximum delay of a request that meets the target."""
        model, step = self._model, load.step_s
        every = max(1, round(model.decide_s / step))
        arrived, arrived_images = _sums(load.tokens), _sums(load.images)
        arriving, arriving_images = _fading(load.tokens, step), _fading(load.images, step)
        done, encoded_up_to = 0.0, 0
        passing = min(1.0, model.image_s / step)
        done_by, alive = [], []
        # Serve's own delays use the time of day.
        with patch.object(serves, "time", SimpleNamespace(time=lambda: self._now)):
            for now in range(len(load.tokens)):
                self._now = now * step
                while self._starting and self._starting[0] <= self._now:
                    self._starting.popleft()
                    self._running += 1
                room = self._running * model.tokens_per_s * step
                self._given += float(load.tokens[now]) / max(1, self._running)
                if self._wasted:
                    wasted = min(room, self._wasted)
                    self._wasted, room = self._wasted - wasted, room - wasted
                done = min(arrived[now + 1], done + room)
                done_by.append(done)
                alive.append(self._running + len(self._starting))
                if now % every == 0:
                    while encoded_up_to < now and arrived[encoded_up_to + 1] <= done:
                        encoded_up_to += 1
                    encoded = _between(done, arrived, arrived_images, encoded_up_to)
                    images = arrived_images[now + 1]
                    gone = min(encoded, images - passing * (images - arrived_images[now]))
                    self._fail()
                    self._arriving, self._arriving_images = arriving[now], arriving_images[now]
                    self._decide(arrived[now + 1] - done, images - gone, images - encoded)
        first = round(warm_up_s / step)
        # Requests of a step are late if the work that had arrived by its end was not done in time.
        rounding = 1e-9 * arrived[-1]
        finished = np.searchsorted(done_by, np.array(arrived[1:]) - rounding)
        delay_s = (finished - np.arange(len(finished))) * step + model.image_s
        late = (delay_s > target_s) & (load.requests > 0)
        counted = load.requests[first:]
        total = float(counted.sum())
        return Outcome(
            missed=float(counted[late[first:]].sum()) / total if total else 0.0,
            gpu_hours=sum(alive[first:]) * step / 3600,
            late_s=_lengths(late[first:], load.requests[first:] > 0, step),
            most_replicas=max(alive[first:], default=0),
            decide_ms=float(np.median(self._decide_ms)) if self._decide_ms else 0.0,
        )

    def _fail(self) -> None:
        """Makes some replicas fail; others repeat their work in flight."""
        model = self._model
        if not math.isfinite(model.mean_life_s):
            return
        failed = min(self._running, int(self._chance.poisson(self._running * model.decide_s / model.mean_life_s)))
        self._running -= failed
        self._wasted += failed * model.tokens_per_s * model.image_s
        self._starting.extend([self._now + model.start_s] * failed)

    def _decide(self, backlog_tokens: float, images: float, unencoded: float) -> None:
        at_handles = max(0.0, unencoded - self._running * self._model.max_ongoing)
        held = backlog_tokens * (1 - at_handles / unencoded) if unencoded > 0 else 0.0
        self._report(held, images, at_handles)
        ctx = context(
            self._config,
            now_s=self._now,
            running=self._running,
            asked_for=self._asked_for,
            requests=lambda: self._mean(self._reported[0]),
            queued=lambda: self._mean(self._reported[1]),
            raw_metrics=self._raw_metrics,
            state=self._state,
        )
        began = time.perf_counter()
        wanted, self._state = self._policy(ctx)
        self._decide_ms.append((time.perf_counter() - began) * 1e3)
        self._scale(min(max(math.ceil(wanted), self._config.min_replicas), self._config.max_replicas))

    def _scale(self, wanted: int) -> None:
        self._asked_for = wanted
        more = wanted - self._running - len(self._starting)
        self._starting.extend([self._now + self._model.start_s] * max(0, more))
        for _ in range(min(max(0, -more), len(self._starting))):
            self._starting.pop()
        self._running = min(self._running, wanted)

    def _report(self, held_tokens: float, images: float, at_handles: float) -> None:
        """Makes the samples and reports of replicas and handles that are due."""
        now, look_back = self._now, self._config.look_back_period_s
        if now >= self._next_record:
            self._next_record += look_back / RECORDS_A_LOOK_BACK
            recorded = (
                (self._samples, images),
                (self._queued_samples, at_handles),
                (self._given_samples, self._given),
            )
            for samples, value in recorded:
                samples.append(TimeStampedValue(now, value))
            while self._given_samples[0].timestamp < now - look_back:
                self._given_samples.popleft()
        if now >= self._next_report:
            self._next_report = now + self._model.report_s
            for samples in (self._samples, self._queued_samples):
                while samples[0].timestamp < now - look_back:
                    samples.popleft()
            self._reported = (list(self._samples), list(self._queued_samples))
        share = 1 / self._running if self._running else 0.0
        values = {
            BACKLOG_TOKENS: held_tokens * share,
            ARRIVING_TOKENS_PER_S: self._arriving / ARRIVALS_OVER_S * share,
            TOKENS_PER_S: self._model.tokens_per_s,
            TOKENS_PER_IMAGE: self._arriving / self._arriving_images if self._arriving_images else 0.0,
        }
        phase = round(now / self._model.decide_s) % self._phases
        for name, value in values.items():
            self._reports[name][phase][:] = [TimeStampedValue(now, value)]
        self._reports[RECEIVED_TOKENS][phase][:] = self._given_samples

    def _raw_metrics(self) -> dict[str, dict[ReplicaID, list[TimeStampedValue]]]:
        if self._raw_for != self._running:
            self._raw_for = self._running
            ids = [ReplicaID(str(number), ENCODER) for number in range(self._running)]
            self._raw = {
                name: {replica: reports[number % self._phases] for number, replica in enumerate(ids)}
                for name, reports in self._reports.items()
            }
        return self._raw

    def _mean(self, samples: Sequence[TimeStampedValue]) -> float:
        """Returns Serve's time-weighted mean; the last sample is valid until now."""
        if not samples:
            return 0.0
        ends = [sample.timestamp for sample in samples[1:]] + [max(self._now, samples[-1].timestamp + 1e-3)]
        spans = [end - sample.timestamp for sample, end in zip(samples, ends, strict=True)]
        return sum(sample.value * span for sample, span in zip(samples, spans, strict=True)) / sum(spans)


def context(
    config: AutoscalingConfig,
    *,
    now_s: float,
    running: int,
    asked_for: int,
    requests: Callable[[], float],
    queued: Callable[[], float],
    raw_metrics: Callable[[], dict[str, dict[ReplicaID, list[TimeStampedValue]]]],
    state: dict[str, Any],
) -> AutoscalingContext:
    """Returns the context that Serve passes to a policy. `queued`: requests that wait at the handles."""
    return AutoscalingContext(
        deployment_id=ENCODER,
        deployment_name=ENCODER.name,
        app_name=ENCODER.app_name,
        current_num_replicas=running,
        target_num_replicas=asked_for,
        running_replicas=[],
        total_num_requests=requests,
        total_queued_requests=queued,
        aggregated_metrics=None,
        raw_metrics=raw_metrics,
        capacity_adjusted_min_replicas=config.min_replicas,
        capacity_adjusted_max_replicas=config.max_replicas,
        policy_state=dict(state),
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now_s,
        config=config,
    )


def _sums(values: Numbers) -> list[float]:
    """Returns the sums of the first 0, 1, … values."""
    return [0.0, *np.cumsum(values).tolist()]


def _fading(values: Numbers, step_s: float) -> list[float]:
    """Returns exponentially decaying sums, as `deployments.common.throughput` computes them."""
    kept, total, found = math.exp(-step_s / ARRIVALS_OVER_S), 0.0, []
    for value in values.tolist():
        total = total * kept + value
        found.append(total)
    return found


def _between(done: float, tokens: Sequence[float], images: Sequence[float], at: int) -> float:
    """Interpolates the images among the first `done` tokens, which are between `tokens[at]` and `tokens[at + 1]`."""
    gap = tokens[at + 1] - tokens[at]
    return images[at] + (images[at + 1] - images[at]) * (min(1.0, (done - tokens[at]) / gap) if gap > 0 else 1.0)


def _lengths(late: npt.NDArray[np.bool_], counted: npt.NDArray[np.bool_], step_s: float) -> list[float]:
    """Returns the seconds of each stretch of late steps; steps without requests do not end a stretch."""
    lengths: list[float] = []
    began: int | None = None
    for number in np.flatnonzero(counted):
        if late[number] and began is None:
            began = int(number)
        elif not late[number] and began is not None:
            lengths.append((int(number) - began) * step_s)
            began = None
    if began is not None:
        lengths.append((len(late) - began) * step_s)
    return lengths
