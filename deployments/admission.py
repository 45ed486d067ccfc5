"""Whether a request may start work, and when: bounds on what is under way at one ingress, and a line before them.

A request counts from its arrival until a language model has accepted it, its images from the moment that it is their
turn until then: that is when their embeddings have arrived. The line goes by age, with one exception: a request takes
its place as if it had arrived later by the time that its own visual tokens take, so that small ones overtake large
ones, and at most by MAX_YIELD_S, so that nobody is overtaken by what arrives later than that. Whoever is first in line
and does not fit holds up the others; as much room as it needs comes free at last.

Numbers and a clock alone: it must not know of HTTP, Serve or images. Used from one event loop.
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
from deployments.pace import BusySpeed

MAX_YIELD_S = 10.0


class Shed(Enum):
    """Why a request was not worked on; the metrics' tag `reason`."""

    REQUESTS = "requests_waiting"
    TOKENS = "tokens_waiting"
    DEADLINE = "deadline"
    CLIENT_GONE = "client_gone"
    QUOTA = "quota"
    REPLICA_QUEUE = "replica_queue"


class OverloadedError(Exception):
    """There is no room for the request, not even in line."""

    def __init__(self, told: str, *, retry_after_s: int) -> None:
        super().__init__(told)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class AdmissionBounds:
    """All of one ingress replica."""

    requests: int
    """That have arrived and that no language model has accepted, those without images among them."""
    tokens_in_flight: int
    """Visual tokens of those whose turn it was; no request may ask for more."""
    images_in_flight: int
    """Likewise."""
    tokens_waiting: int
    """Visual tokens in line."""
    least_retry_s: int
    most_retry_s: int

    @classmethod
    def of(cls, limits: IngressConfig) -> AdmissionBounds:
        return cls(
            requests=limits.max_requests_waiting,
            tokens_in_flight=limits.max_visual_tokens_in_flight,
            images_in_flight=limits.max_images_in_flight,
            tokens_waiting=limits.max_visual_tokens_waiting,
            least_retry_s=limits.retry_after_s,
            most_retry_s=limits.max_retry_after_s,
        )


class AdmissionEvents(Protocol):
    """Told what is worth counting."""

    def levels(self, *, requests: int, tokens_waiting: int, tokens_in_flight: int) -> None: ...

    def admitted(self, tokens: int) -> None: ...

    def shed(self, reason: Shed, tokens: int) -> None: ...


class _Stage(Enum):
    ARRIVED = 0
    IN_LINE = 1
    IN_FLIGHT = 2
    OVER = 3


class Visit:
    """One request, from its arrival to a language model's acceptance."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._turn: asyncio.Future[None] | None = None
        self.stage = _Stage.ARRIVED
        self.tokens = self.images = 0
        self.place = 0.0

    def ask(self, tokens: int, images: int) -> None:
        """Asks for room, once. Raises OverloadedError where there is none, not even in line."""
        self._admission.ask(self, tokens, images)

    async def turn(self) -> None:
        """Waits for the room that was asked for."""
        if self.stage is _Stage.IN_LINE:
            self._turn = asyncio.get_running_loop().create_future()
            await self._turn

    async def again(self) -> None:
        """Where it was accepted and the replica was lost: it counts anew, and waits for its turn at its old place."""
        if self.stage is _Stage.OVER:
            self._admission.come_back(self)
            await self.turn()

    def begin(self) -> None:
        """Its turn has come."""
        self.stage = _Stage.IN_FLIGHT
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def accepted(self) -> None:
        """A language model has it now."""
        self._admission.end(self, done=True)

    def leave(self, reason: Shed | None = None) -> None:
        """It ends before that, however; `reason` is told where it was dropped. After its end this does nothing."""
        self._admission.end(self, done=False, reason=reason)


class Admission:
    """One for each ingress replica."""

    def __init__(
        self, bounds: AdmissionBounds, events: AdmissionEvents, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bounds = bounds
        self._events = events
        self._clock = clock
        self._line: list[Visit] = []  # ascending in `place`; those with equal places as they came
        self._token_pace = BusySpeed(clock)
        self._request_pace = BusySpeed(clock)
        self.requests = self.tokens_waiting = self.tokens_in_flight = self.images_in_flight = 0

    @contextmanager
    def visit(self, late: Callable[[], bool]) -> Iterator[Visit]:
        """From the request's arrival; `late` tells whether its deadline has passed, when it is cancelled.

        Raises:
            OverloadedError: as many requests as may be are under way.
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
        """Raises OverloadedError; whoever gets a Visit ends it, by `accepted` or `leave`."""
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
        """See Visit.again. What was let in is not refused: it may pass the bounds on requests and on the line."""
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
        """The time that all that is under way takes at the speed measured of late, within the bounds."""
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
        """Lets those who are first in line begin, for as long as there is room."""
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
