"""The calls of one router that wait for a place because all replicas that could take them are full.

Left alone, Serve tries each of them again after 25 ms, then after twice as long each time, up to half a second. Places
would stay free meanwhile, and calls that have just come, which try most often, would take them before older ones.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Waiting:
    arrived_s: float
    identity: str
    """Identity of the replicas that can take the call; empty for all."""
    woken: asyncio.Future[str | None]
    """Its result is the identity of the replica that has a place, None if any may have one."""


class WaitQueue:
    """Calls in order of arrival. Used on the router's event loop.

    The oldest call for each identity tries again by itself, since places also become free when calls of other routers
    end, and the oldest one that can use it whenever `place_free` reports a place.
    """

    def __init__(self) -> None:
        self._calls: list[_Waiting] = []
        self._missed = 0
        """Places that became free while no call waited for them."""

    def __len__(self) -> int:
        return len(self._calls)

    def missed(self) -> int:
        """To be passed to `wait` after a try that begins now."""
        return self._missed

    def has_older(self, arrived_s: float, identity: str) -> bool:
        """Whether a call that arrived earlier waits for the same replicas."""
        first = self._first(lambda one: one.identity == identity)
        return first is not None and first.arrived_s < arrived_s

    async def wait(self, arrived_s: float, identity: str, missed: int, timeout_s: float) -> None:
        """Returns when the call should try again: a place is reported, or it is the oldest and `timeout_s` has passed.

        Args:
            missed: `missed()` at the beginning of the last try.
        """
        if missed != self._missed:
            return
        call = _Waiting(arrived_s, identity, asyncio.get_running_loop().create_future())
        bisect.insort(self._calls, call, key=lambda one: one.arrived_s)
        try:
            while not call.woken.done():
                await asyncio.wait([call.woken], timeout=timeout_s)
                if self._first(lambda one: one.identity == identity) is call:
                    break
        except asyncio.CancelledError:
            self._calls.remove(call)
            if call.woken.done():
                self._wake_first(call.woken.result())
            raise
        self._calls.remove(call)

    def place_free(self, identity: str) -> None:
        """Reports that a replica of this identity may have a place."""
        if not self._wake_first(identity):
            self._missed += 1

    def assigned(self, identity: str) -> None:
        """Reports that a call was sent to a replica of this identity, which may have more than one place."""
        self._wake_first(identity)

    def replicas_changed(self) -> None:
        for one in self._calls:
            if not one.woken.done():
                one.woken.set_result(None)

    def _wake_first(self, identity: str | None) -> bool:
        """Wakes the oldest call that a replica of this identity can take. Returns whether there was one."""
        call = self._first(lambda one: not one.woken.done() and (not one.identity or identity in (None, one.identity)))
        if call is not None:
            call.woken.set_result(identity)
        return call is not None

    def _first(self, matches: Callable[[_Waiting], bool]) -> _Waiting | None:
        return next((one for one in self._calls if matches(one)), None)
