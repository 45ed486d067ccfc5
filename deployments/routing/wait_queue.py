"""The calls of one router that wait for a place because all replicas that could take them are full.

Left alone, Serve tries each of them again after 25 ms, then after twice as long each time, up to half a second. Places
would stay free meanwhile, and calls that have just come, which try most often, would take them before older ones.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Collection
from dataclasses import dataclass


@dataclass
class _Waiting:
    arrived_s: float
    woken: asyncio.Future[str | None]
    """Its result is the replica that has a place, None if any may have one."""


class WaitQueue:
    """Waiting calls in order of arrival. Used on the router's event loop.

    Serve runs at most two routing tasks for each replica; further calls wait in Serve's own queue. `place_free` wakes
    the oldest call, or the next one if that call cannot use the replica. Every call also tries again after its timeout,
    because the ends of other routers' calls are not reported.
    """

    def __init__(self) -> None:
        self._calls: list[_Waiting] = []
        self.num_missed = 0
        """Places that became free while no call waited for them."""

    def is_oldest(self, arrived_s: float) -> bool:
        """Whether no call that waits arrived before this time."""
        return not self._calls or arrived_s <= self._calls[0].arrived_s

    async def wait(self, arrived_s: float, timeout_s: float) -> str | None:
        """Returns when a call should try again, with the replica that was reported to have a place, if one was."""
        call = _Waiting(arrived_s, asyncio.get_running_loop().create_future())
        bisect.insort(self._calls, call, key=lambda one: one.arrived_s)
        try:
            await asyncio.wait([call.woken], timeout=timeout_s)
        except asyncio.CancelledError:
            if call.woken.done():
                self.place_free(call.woken.result())
            raise
        finally:
            self._calls.remove(call)
        return call.woken.result() if call.woken.done() else None

    def place_free(self, replica: str | None, *, after_s: float = 0.0) -> None:
        """Reports that a replica may have a place, None for any. `after_s`: arrival of a call that could not use it."""
        for call in self._calls:
            if not call.woken.done() and call.arrived_s > after_s:
                call.woken.set_result(replica)
                return
        if replica is not None:
            self.num_missed += 1

    def replicas_changed(self) -> None:
        for call in self._calls:
            if not call.woken.done():
                call.woken.set_result(None)


@dataclass
class Try:
    """A call's last try to find a replica with a place."""

    arrived_s: float
    num_missed: int
    """`WaitQueue.num_missed` at its beginning."""
    place: str | None = None
    """The replica that was reported to have a place."""
    tried: Collection[str] = ()
    """Replicas that it was to be sent to."""
