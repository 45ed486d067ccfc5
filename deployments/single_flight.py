"""One piece of work for all who want its result at the same time; it is cancelled when the last of them has gone.

It must not know what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class SingleFlight(Generic[T]):
    """Used from one event loop."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: str) -> bool:
        """Whether whoever asks for `key` now joins others."""
        return key in self._flights

    async def run(self, key: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work` for `key`, shared with everybody who asks for `key` before it is there.

        Raises:
            whatever `work` raises, to each of the callers.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work()))
            flight.task.add_done_callback(lambda task: self._landed(key, flight, task))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0 and not flight.task.done():
                self._forget(key, flight)  # a later caller starts afresh rather than join what is being cancelled
                flight.task.cancel()

    def _landed(self, key: str, flight: _Flight[T], task: asyncio.Task[T]) -> None:
        self._forget(key, flight)
        if not task.cancelled():
            task.exception()  # taken: an error of work that nobody waits for any more is not to be reported as lost

    def _forget(self, key: str, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
