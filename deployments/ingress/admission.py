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
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from configs.schema import IngressConfig
from deployments.common.api_error import OverloadedError, Shed
from deployments.common.throughput import BusySpeed

MAX_YIELD_S = 10.0
"""Maximum delay of a request's virtual arrival time."""


@dataclass(frozen=True)
class AdmissionBounds:
    """Bounds of one ingress replica."""

    requests: int
    """Requests that no language model has accepted yet, including those without images."""
    tokens_in_flight: int
    """Visual tokens of admitted requests; one request must not have more."""
    images_in_flight: int
    """Images of admitted requests; one request must not have more."""
    tokens_waiting: int
    """Visual tokens in the admission queue."""
    least_retry_s: int
    """Minimum of `Retry-After`."""
    most_retry_s: int
    """Maximum of `Retry-After`."""

    @classmethod
    def of(cls, limits: IngressConfig) -> AdmissionBounds:
        return cls(
            requests=limits.max_requests_waiting,
            tokens_in_flight=limits.max_visual_tokens_in_flight,
            images_in_flight=limits.max_images_in_flight,
            tokens_waiting=limits.max_visual_tokens_queued,
            least_retry_s=limits.retry_after_s,
            most_retry_s=limits.max_retry_after_s,
        )


class AdmissionEvents(Protocol):
    """Metrics that Admission updates."""

    def levels(self, *, requests: int, tokens_waiting: int, tokens_in_flight: int) -> None: ...

    def admitted(self, tokens: int) -> None: ...

    def shed(self, reason: Shed, tokens: int) -> None: ...


class _Stage(Enum):
    ARRIVED = 0
    IN_LINE = 1
    IN_FLIGHT = 2
    OVER = 3


class Visit:
    """One request from its arrival until a language model accepts it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._turn: asyncio.Future[None] | None = None
        self.stage = _Stage.ARRIVED
        self.tokens = self.images = 0
        self.place = 0.0

    def ask(self, tokens: int, images: int) -> None:
        """Asks once for admission of `tokens` visual tokens. Raises OverloadedError if the queue is full."""
        self._admission.ask(self, tokens, images)

    async def turn(self) -> None:
        """Waits until the request is admitted."""
        if self.stage is _Stage.IN_LINE:
            self._turn = asyncio.get_running_loop().create_future()
            await self._turn

    async def again(self) -> None:
        """Queues an accepted request again, at its old position, after a replica was lost, and waits for admission.

        Does nothing for a request that was not accepted yet.
        """
        if self.stage is _Stage.OVER:
            self._admission.come_back(self)
            await self.turn()

    def begin(self) -> None:
        """Marks the request as admitted; called by Admission."""
        self.stage = _Stage.IN_FLIGHT
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def accepted(self) -> None:
        """Ends the visit: a language model has accepted the request."""
        self._admission.end(self, done=True)

    def leave(self, reason: Shed | None = None) -> None:
        """Ends the visit without acceptance, counted under `reason` if the request was shed. No-op after the end."""
        self._admission.end(self, done=False, reason=reason)


class Admission:
    """Admission queue and counts of an ingress replica. It is used from one event loop.

    with admission.visit(late) as visit:
        visit.ask(num_tokens, num_images)
        await visit.turn()
        ...
        visit.accepted()
    """

    def __init__(
        self, bounds: AdmissionBounds, events: AdmissionEvents, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bounds = bounds
        self._events = events
        self._clock = clock
        self._line: list[Visit] = []  # ascending in `place`, then by arrival
        self._token_pace = BusySpeed(clock)
        self._request_pace = BusySpeed(clock)
        self.requests = self.tokens_waiting = self.tokens_in_flight = self.images_in_flight = 0

    @contextmanager
    def visit(self, late: Callable[[], bool]) -> Iterator[Visit]:
        """Counts a request from its arrival. `late` returns whether its deadline has passed, if it is cancelled.

        Raises:
            OverloadedError: the limit of requests is reached.
        """
        visit = self.arrive()
        try:
            yield visit
        except asyncio.CancelledError:
            visit.leave(Shed.DEADLINE if late() else Shed.CLIENT_GONE)
            raise
        finally:
            visit.leave()

    def arrive(self) -> Visit:
        """Returns a Visit, which the caller ends by `accepted` or `leave`. Raises OverloadedError as `visit` does."""
        if self.requests >= self._bounds.requests:
            self._events.shed(Shed.REQUESTS, 0)
            told = f"{self.requests} requests wait for a language model, the limit; try again"
            raise OverloadedError(told, retry_after_s=self.retry_after_s())
        self.requests += 1
        self._request_pace.begin()
        self._tell()
        return Visit(self)

    def ask(self, visit: Visit, tokens: int, images: int) -> None:
        """See Visit.ask."""
        assert tokens <= self._bounds.tokens_in_flight
        assert images <= self._bounds.images_in_flight
        visit.tokens, visit.images = tokens, images
        speed = self._token_pace.recent_tokens_per_s
        visit.place = self._clock() + (min(tokens / speed, MAX_YIELD_S) if speed > 0 else 0.0)
        self._stand_in_line(visit)
        if visit.stage is _Stage.IN_LINE and self.tokens_waiting > self._bounds.tokens_waiting:
            waiting = self.tokens_waiting - tokens
            visit.leave(Shed.TOKENS)
            told = f"{waiting} visual tokens wait, {tokens} more would pass {self._bounds.tokens_waiting}; try again"
            raise OverloadedError(told, retry_after_s=self.retry_after_s())

    def come_back(self, visit: Visit) -> None:
        """See Visit.again. A request that was admitted before is not refused, even beyond the bounds."""
        self.requests += 1
        self._request_pace.begin()
        self._stand_in_line(visit)

    def end(self, visit: Visit, *, done: bool, reason: Shed | None = None) -> None:
        """See Visit.accepted and Visit.leave."""
        stage, visit.stage = visit.stage, _Stage.OVER
        if stage is _Stage.OVER:
            return
        if stage is _Stage.IN_LINE:
            self._line.remove(visit)
            self.tokens_waiting -= visit.tokens
        if stage is _Stage.IN_FLIGHT:
            self.tokens_in_flight -= visit.tokens
            self.images_in_flight -= visit.images
            self._token_pace.end(visit.tokens if done else 0)
        self.requests -= 1
        self._request_pace.end(1 if done else 0)
        if reason is not None:
            self._events.shed(reason, visit.tokens)
        self._advance()
        self._tell()

    def retry_after_s(self) -> int:
        """Returns the time that the backlog takes at the recently measured speed, in seconds within the bounds."""
        pressed = (
            (self.tokens_in_flight + self.tokens_waiting, self._token_pace.recent_tokens_per_s),
            (self.requests, self._request_pace.recent_tokens_per_s),
        )
        wait_s = max((backlog / speed for backlog, speed in pressed if speed > 0), default=0.0)
        return max(self._bounds.least_retry_s, math.ceil(min(wait_s, self._bounds.most_retry_s)))

    def _stand_in_line(self, visit: Visit) -> None:
        visit.stage = _Stage.IN_LINE
        bisect.insort(self._line, visit, key=lambda other: other.place)
        self.tokens_waiting += visit.tokens
        self._advance()

    def _advance(self) -> None:
        """Admits requests from the head of the queue while they fit."""
        while self._line and self._has_room_for(self._line[0]):
            visit = self._line.pop(0)
            self.tokens_waiting -= visit.tokens
            self.tokens_in_flight += visit.tokens
            self.images_in_flight += visit.images
            self._token_pace.begin()
            self._events.admitted(visit.tokens)
            visit.begin()
        self._tell()

    def _has_room_for(self, visit: Visit) -> bool:
        return (
            self.tokens_in_flight + visit.tokens <= self._bounds.tokens_in_flight
            and self.images_in_flight + visit.images <= self._bounds.images_in_flight
        )

    def _tell(self) -> None:
        self._events.levels(
            requests=self.requests, tokens_waiting=self.tokens_waiting, tokens_in_flight=self.tokens_in_flight
        )
