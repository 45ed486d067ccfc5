"""Skipped embeddings: vLLM's prefix cache is expected to cover their part of the prompt.

Before it schedules a request, vLLM's scheduler asks its `ECConnector` whether all embeddings that the remaining tokens
need are available. The connector reports missing ones. They are then read where they are stored; if one is stored
nowhere, the request is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from deployments.llm.streams import cancel_and_wait, next_or_none
from deployments.vllm.compat import FirstTokenClock

T = TypeVar("T")


class Missing:
    """Embeddings of one request that the engine has reported as missing. Used on one event loop.

    A report has no meaning for an embedding that is being received; it may come before it is known that the embedding
    is skipped, and is made only once.
    """

    def __init__(self, clock: FirstTokenClock) -> None:
        """`clock`: has the token in the engine's identifiers of the request."""
        self.clock = clock
        self.digests: set[str] = set()
        self.changed = asyncio.Event()
        """To be set when `digests` has grown or an embedding was skipped."""


class MissingWatch:
    """Requests of one engine whose missing embeddings are reported. Watched on one event loop; reports come on the
    link's threads."""

    def __init__(self) -> None:
        self._watched: list[Missing] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def report(self, request: str, digests: Sequence[str]) -> None:
        """Reports digests that a request, by the engine's internal identifier, misses. Thread-safe. No effect if the
        request has ended."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._report, request, digests)

    def _report(self, request: str, digests: Sequence[str]) -> None:
        for missing in self._watched:
            if missing.clock.token in request:
                missing.digests.update(digests)
                missing.changed.set()

    @contextmanager
    def watch(self, clock: FirstTokenClock) -> Iterator[Missing]:
        """Watches a request. Must be entered before the request is submitted to the engine."""
        self._loop = asyncio.get_running_loop()
        missing = Missing(clock)
        self._watched.append(missing)
        try:
            yield missing
        finally:
            self._watched.remove(missing)


async def unless_lost(result: Coroutine[Any, Any, T], lost: asyncio.Future[NoReturn]) -> T:
    """Returns the result, or raises the error of `lost`, a future that fails if the engine needs an embedding that is
    stored nowhere; `result` is then cancelled."""
    task = asyncio.ensure_future(result)
    awaited: set[asyncio.Future[Any]] = {task, lost}
    try:
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else lost.result()
    finally:
        await cancel_and_wait(task)
        del task, awaited, lost  # or an error of one, whose traceback has this frame, would refer to itself


async def stream_unless_lost(
    pieces: AsyncGenerator[T, None], lost: asyncio.Future[NoReturn], scheduled: asyncio.Event, first: T
) -> AsyncGenerator[T, None]:
    """Yields `first` and the pieces once the request is scheduled or its answer is complete: vLLM may begin an event
    stream before it schedules the request. Raises the error of `lost` as `unless_lost` does, and cancels `pieces`."""
    first_token = asyncio.ensure_future(scheduled.wait())
    next_piece = asyncio.ensure_future(next_or_none(pieces))
    held: list[T] = [first]
    ended = False
    try:
        while not ended:
            awaited: list[asyncio.Future[Any]] = [next_piece, lost, *([] if first_token.done() else [first_token])]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not next_piece.done():
                if lost.done():
                    lost.result()
            elif (piece := next_piece.result()) is None:
                ended = True
            else:
                held.append(piece)
                next_piece = asyncio.ensure_future(next_or_none(pieces))
            while held and (ended or scheduled.is_set()):
                yield held.pop(0)
    finally:
        first_token.cancel()
        await cancel_and_wait(next_piece)
