"""Request coalescing: concurrent callers with one key share one task, which is cancelled when the last caller is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    num_waiting: int = 0


class SingleFlight(Generic[T]):
    """Shares one task among the concurrent callers of a key. For one event loop."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: str) -> bool:
        """Whether a task for `key` is in flight."""
        return key in self._flights

    async def run(self, key: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns the result of `start`, or of the task in flight for `key` if there is one.

        Raises:
            the exception of `start`, in every caller.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(start()))
            flight.task.add_done_callback(partial(self._finish, key, flight))
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0 and not flight.task.done():
                self._forget(key, flight)  # a later caller must not join a task that is being cancelled
                flight.task.cancel()
            del flight  # or the task's error, whose traceback has this frame, would refer to itself

    def _finish(self, key: str, flight: _Flight[T], task: asyncio.Task[T]) -> None:
        self._forget(key, flight)
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio logs the exception of a task whose callers have left

    def _forget(self, key: str, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
