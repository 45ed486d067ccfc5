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
    """Calls in flight by key. Used from one event loop. Each `acquire` is followed by `release`.

    call, shared = calls.acquire(digest, lambda: encoder.encode.remote(job))
    calls.release(call, share=False)
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

    def release(self, call: SharedCall[T], *, share: bool) -> bool:
        """A request no longer needs the call. Returns True for the last one, which must cancel a call in flight.

        `share`: whether later requests may share it; False if its result has been used, or if it may have failed.
        """
        call.num_users -= 1
        if (not share or call.num_users == 0) and self._calls.get(call.key) is call:
            del self._calls[call.key]
        return call.num_users == 0
