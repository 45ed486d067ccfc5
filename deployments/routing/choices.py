"""Replicas chosen for requests that have not called them yet, which count as load of these replicas.

Without that, all requests that choose before the first call would choose the same replica.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from deployments.routing.affinity import ActiveCall, Affinity, Call

CHOICE_TIMEOUT_S = 5.0
"""A choice that is not called by then no longer counts as load."""


class Choices:
    """The choices of one router, at most one of each request.

    choices.begin(request_id, affinity.candidates(call)[0], call)
    ...
    choices.end(request_id)  # as the call begins
    """

    def __init__(self, affinity: Affinity, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._affinity, self._clock = affinity, clock
        self._active: dict[str, tuple[ActiveCall, float]] = {}  # by request, with the time at which it ends

    def begin(self, request: str, name: str, call: Call) -> None:
        """Adds the call to the replica's load, in place of the request's earlier choice."""
        self.end(request)
        # Without its key: `Affinity` remembers the replica that a key was sent to, and a choice sends nothing.
        if active := self._affinity.begin(name, dataclasses.replace(call, key=None), bounded=False):
            self._active[request] = active, self._clock() + CHOICE_TIMEOUT_S

    def end(self, request: str) -> bool:
        """Removes the request's choice from the replica's load. Returns whether there was one."""
        if ended := self._active.pop(request, None):
            self._affinity.end(ended[0])
        return ended is not None

    def expire(self, replaced: str | None = None) -> int:
        """Ends the choices that have timed out, and that of the request `replaced`. Returns their number. Must be
        called before the loads are used."""
        now, active = self._clock(), list(self._active.items())
        return sum(self.end(request) for request, (_, ends_at) in active if ends_at <= now or request == replaced)
