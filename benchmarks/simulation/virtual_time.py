"""Runs coroutines in virtual time: the clock of the event loop jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _ClockSelector(selectors.SelectSelector):
    """Advances a clock in place of waiting for files."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("no timer is set: all coroutines wait for each other")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time` begins at 0 s. It does no input or output."""

    def __init__(self) -> None:
        self._clock_selector = _ClockSelector()
        super().__init__(self._clock_selector)

    def time(self) -> float:
        return self._clock_selector.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `main`, run in virtual time. Raises RuntimeError if its coroutines wait for each other."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def now_s() -> float:
    """Returns the time of the running loop, a clock for the application's classes."""
    return asyncio.get_running_loop().time()
