"""Admission of requests: bounds on the requests and visual tokens in flight at an ingress replica, and a queue.

A request counts from its arrival until a language model accepts it, which is when its embeddings have arrived; its
images count from admission until then. The queue is served in order of virtual arrival time: arrival plus the estimated
service time of the request's visual tokens, at most MAX_YIELD_S. So small requests overtake large ones, and no request
is overtaken by one that arrives more than MAX_YIELD_S later. A request at the head of the queue that does not fit
blocks the others until enough tokens in flight have ended, so it does not starve.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from configs.schema import IngressConfig
from deployments.common.api_error import ApiError, OverloadedError, Shed
from deployments.common.throughput import BusySpeed
from deployments.telemetry.metrics import AdmissionMetrics

MAX_YIELD_S = 10.0
"""Maximum delay of a request's virtual arrival time."""


class _Stage(Enum):
    ARRIVED = 0
    QUEUED = 1
    IN_FLIGHT = 2
    ENDED = 3


class Visit:
    """One request from its arrival until a language model accepts it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._admitted: asyncio.Future[None] | None = None
        self.stage = _Stage.ARRIVED
        self.tokens = self.images = 0
        self.counted_tokens = 0
        """Tokens that are in the metric: a request may be admitted more than once."""
        self.virtual_arrival_s = 0.0

    def request(self, tokens: int, images: int, param: str = "messages") -> None:
        """Asks for admission of `tokens` visual tokens, besides those admitted before, which are then queued again.

        Raises ApiError 400 with `param` above the limit of one request, OverloadedError if the queue is full.
        """
        self._admission.request(self, tokens, images, param)

    async def wait_until_admitted(self) -> None:
        """Waits until the request is admitted."""
        if self.stage is _Stage.QUEUED:
            self._admitted = asyncio.get_running_loop().create_future()
            await self._admitted

    async def requeue(self) -> None:
        """Queues an accepted request again, at its old position, after a replica was lost, and waits for admission.

        Does nothing for a request that was not accepted yet.
        """
        if self.stage is _Stage.ENDED:
            self._admission.requeue(self)
            await self.wait_until_admitted()

    def admit(self) -> None:
        """Marks the request as admitted; called by Admission."""
        self.stage = _Stage.IN_FLIGHT
        if self._admitted is not None and not self._admitted.done():
            self._admitted.set_result(None)

    def accept(self) -> None:
        """Ends the visit: a language model has accepted the request."""
        self._admission.end(self, done=True)

    def leave(self, reason: Shed | None = None) -> None:
        """Ends the visit without acceptance, counted under `reason` if the request was shed. No-op after the end."""
        self._admission.end(self, done=False, reason=reason)


class Admission:
    """Admission queue and counts of an ingress replica. It is used from one event loop.

    with admission.visit(late) as visit:
        visit.request(num_tokens, num_images)
        await visit.wait_until_admitted()
        ...
        visit.accept()
    """

    def __init__(
        self, limits: IngressConfig, metrics: AdmissionMetrics, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._queue: list[Visit] = []  # ascending in virtual arrival time, then by arrival
        self._token_speed = BusySpeed(clock)
        self._request_speed = BusySpeed(clock)
        self.requests = self.tokens_queued = self.tokens_in_flight = self.images_in_flight = 0

    @contextmanager
    def visit(self, is_late: Callable[[], bool]) -> Iterator[Visit]:
        """Counts a request from its arrival. `is_late` returns whether its deadline has passed, if it is cancelled.

        Raises:
            OverloadedError: the limit of requests is reached.
        """
        visit = self.arrive()
        try:
            yield visit
        except asyncio.CancelledError:
            visit.leave(Shed.DEADLINE if is_late() else Shed.CLIENT_GONE)
            raise
        finally:
            visit.leave()

    def arrive(self) -> Visit:
        """Returns a Visit, which the caller ends by `accept` or `leave`. Raises OverloadedError as `visit` does."""
        if self.requests >= self._limits.max_requests_waiting:
            self._metrics.shed(Shed.REQUESTS, 0)
            message = f"{self.requests} requests wait for a language model, the limit; try again"
            raise OverloadedError(message, retry_after_s=self.retry_after_s())
        self._count_request()
        self._report()
        return Visit(self)

    def request(self, visit: Visit, tokens: int, images: int, param: str) -> None:
        """See Visit.request."""
        tokens, images = visit.tokens + tokens, visit.images + images
        for total, limit, unit in (
            (tokens, self._limits.max_visual_tokens_in_flight, "visual tokens"),
            (images, self._limits.max_images_in_flight, "images"),
        ):
            if total > limit:
                raise ApiError(400, f"{total} {unit} must be encoded, the limit is {limit}", param=param)
        if visit.stage is _Stage.IN_FLIGHT:
            self.end(visit, done=False)
            self._count_request()
        visit.tokens, visit.images = tokens, images
        speed = self._token_speed.recent_tokens_per_s
        visit.virtual_arrival_s = self._clock() + (min(tokens / speed, MAX_YIELD_S) if speed > 0 else 0.0)
        self._enqueue(visit)
        if visit.stage is _Stage.QUEUED and self.tokens_queued > self._limits.max_visual_tokens_queued:
            waiting = self.tokens_queued - tokens
            visit.leave(Shed.TOKENS)
            limit = self._limits.max_visual_tokens_queued
            message = f"{waiting} visual tokens wait, {tokens} more would pass {limit}; try again"
            raise OverloadedError(message, retry_after_s=self.retry_after_s())

    def requeue(self, visit: Visit) -> None:
        """See Visit.requeue. A request that was admitted before is not refused, even beyond the bounds."""
        self._count_request()
        self._enqueue(visit)

    def _count_request(self) -> None:
        self.requests += 1
        self._request_speed.begin()

    def end(self, visit: Visit, *, done: bool, reason: Shed | None = None) -> None:
        """See Visit.accept and Visit.leave."""
        stage, visit.stage = visit.stage, _Stage.ENDED
        if stage is _Stage.ENDED:
            return
        if stage is _Stage.QUEUED:
            self._queue.remove(visit)
            self.tokens_queued -= visit.tokens
        if stage is _Stage.IN_FLIGHT:
            self.tokens_in_flight -= visit.tokens
            self.images_in_flight -= visit.images
            self._token_speed.end(visit.tokens if done else 0)
        self.requests -= 1
        self._request_speed.end(1 if done else 0)
        if reason is not None:
            self._metrics.shed(reason, visit.tokens)
        self._admit_next()

    def retry_after_s(self) -> int:
        """Returns the time that the backlog takes at the recently measured speed, in seconds within the bounds."""
        pressed = (
            (self.tokens_in_flight + self.tokens_queued, self._token_speed.recent_tokens_per_s),
            (self.requests, self._request_speed.recent_tokens_per_s),
        )
        wait_s = max((backlog / speed for backlog, speed in pressed if speed > 0), default=0.0)
        return max(self._limits.retry_after_s, math.ceil(min(wait_s, self._limits.max_retry_after_s)))

    def _enqueue(self, visit: Visit) -> None:
        visit.stage = _Stage.QUEUED
        bisect.insort(self._queue, visit, key=lambda other: other.virtual_arrival_s)
        self.tokens_queued += visit.tokens
        self._admit_next()

    def _admit_next(self) -> None:
        """Admits requests from the head of the queue while they fit."""
        while self._queue and self._fits(self._queue[0]):
            visit = self._queue.pop(0)
            self.tokens_queued -= visit.tokens
            self.tokens_in_flight += visit.tokens
            self.images_in_flight += visit.images
            self._token_speed.begin()
            self._metrics.admitted(visit.tokens - visit.counted_tokens)
            visit.counted_tokens = visit.tokens
            visit.admit()
        self._report()

    def _fits(self, visit: Visit) -> bool:
        return (
            self.tokens_in_flight + visit.tokens <= self._limits.max_visual_tokens_in_flight
            and self.images_in_flight + visit.images <= self._limits.max_images_in_flight
        )

    def _report(self) -> None:
        self._metrics.levels(
            requests=self.requests, tokens_waiting=self.tokens_queued, tokens_in_flight=self.tokens_in_flight
        )
