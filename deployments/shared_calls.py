"""Calls under way, each shared by all who want its result: their number goes up and down, the call is made once.

It must not know what is called. Unlike `single_flight.py` it hands out the call itself and never its result, which is
for others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class SharedCall(Generic[T]):
    key: str
    response: T
    wanted_by: int = 0
    spare: T | None = None
    """A second call for the same, while it is not decided which of the two counts (`hedging.py`)."""
    race: asyncio.Future[None] | None = None
    """Ends when that is decided; there from then on."""


class SharedCalls(Generic[T]):
    """Used from one event loop. Each `take` is followed by one of the other three."""

    def __init__(self) -> None:
        self._calls: dict[str, SharedCall[T]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def take(self, key: str, start: Callable[[], T]) -> tuple[SharedCall[T], bool]:
        """The call for `key` that is under way, and True; or the one that `start` begins, and False."""
        call = self._calls.get(key)
        shared = call is not None
        if call is None:
            call = self._calls[key] = SharedCall(key, start())
        call.wanted_by += 1
        return call, shared

    def used(self, call: SharedCall[T]) -> None:
        """The result has been used; who comes now asks for it anew."""
        call.wanted_by -= 1
        self._forget(call)

    def left(self, call: SharedCall[T]) -> bool:
        """One who wanted it does no more. True for the last one: the call is to be cancelled."""
        call.wanted_by -= 1
        if call.wanted_by == 0:
            self._forget(call)
        return call.wanted_by == 0

    def failed(self, call: SharedCall[T]) -> bool:
        """It may have failed, and nobody is to join it any more. True for the last who wanted it, as in `left`."""
        self._forget(call)
        return self.left(call)

    def _forget(self, call: SharedCall[T]) -> None:
        if self._calls.get(call.key) is call:
            del self._calls[call.key]
