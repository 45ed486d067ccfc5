"""Coalescing of calls to encoders: concurrent requests for one image share a call, whose users are counted.

Unlike `single_flight.py` of the encoder replica, it returns the call itself; language models fetch the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class SharedCall(Generic[T]):
    """A call in flight."""

    key: str
    response: T
    num_users: int = 0
    """Number of requests that use it."""


class SharedCalls(Generic[T]):
    """Calls in flight by key. Used from one event loop. Each `acquire` is followed by `complete`, `release` or `fail`.

    call, shared = calls.acquire(digest, lambda: encoder.encode.remote(job))
    calls.complete(call)
    """

    def __init__(self) -> None:
        self._calls: dict[str, SharedCall[T]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def acquire(self, key: str, start: Callable[[], T]) -> tuple[SharedCall[T], bool]:
        """Returns the call in flight for `key` and True, or the call that `start` makes and False."""
        call = self._calls.get(key)
        shared = call is not None
        if call is None:
            call = self._calls[key] = SharedCall(key, start())
        call.num_users += 1
        return call, shared

    def complete(self, call: SharedCall[T]) -> None:
        """The result has been used. Later requests for the key make a new call."""
        call.num_users -= 1
        self._forget(call)

    def release(self, call: SharedCall[T]) -> bool:
        """A request no longer needs the call. Returns True for the last one, which must cancel the call."""
        call.num_users -= 1
        if call.num_users == 0:
            self._forget(call)
        return call.num_users == 0

    def fail(self, call: SharedCall[T]) -> bool:
        """Like `release`, for a call that may have failed: no further request shares it."""
        self._forget(call)
        return self.release(call)

    def _forget(self, call: SharedCall[T]) -> None:
        if self._calls.get(call.key) is call:
            del self._calls[call.key]
