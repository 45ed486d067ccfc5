"""Skipped embeddings: vLLM's prefix cache is expected to cover their part of the prompt.

Before it schedules a request, vLLM's scheduler asks its `ECConnector` whether all embeddings that the remaining tokens
need are available. The connector reports missing ones, and the request is aborted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from deployments.llm.streams import cancel_and_wait, next_or_none

T = TypeVar("T")


class Missing:
    """Embeddings of one request that the engine has reported as missing. Used on one event loop.

    A report has no meaning for an embedding that is being received; it may come before it is known that the embedding
    is skipped, and is made only once.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reported: set[str] = set()
        self._skipped: set[str] = set()
        self.needed: asyncio.Future[str] = self._loop.create_future()
        """Future digest of a skipped embedding that the engine needs."""

    def skip(self, digests: Iterable[str]) -> None:
        """Must be called when all embeddings but these are received."""
        self._skipped.update(digests)
        self._update()

    def report(self, digest: str) -> None:
        """Thread-safe."""
        self._loop.call_soon_threadsafe(self._report, digest)

    def _report(self, digest: str) -> None:
        self._reported.add(digest)
        self._update()

    def _update(self) -> None:
        if (needed := self._reported & self._skipped) and not self.needed.done():
            self.needed.set_result(min(needed))


class MissingWatch:
    """Embeddings of one engine's requests that may be skipped. Watched on event loops; missing ones are reported on the
    link's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[str, list[Missing]] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def report(self, digests: Iterable[str]) -> None:
        """Reports digests to the requests that watch them. No effect if there are none."""
        with self._lock:
            watching = [(missing, digest) for digest in digests for missing in self._watched.get(digest, ())]
        for missing, digest in watching:
            missing.report(digest)

    @contextmanager
    def watch(self, digests: Iterable[str]) -> Iterator[Missing]:
        """Watches embeddings. Must be entered before the request is submitted to the engine."""
        missing = Missing()
        distinct = set(digests)
        with self._lock:
            for digest in distinct:
                self._watched.setdefault(digest, []).append(missing)
        try:
            yield missing
        finally:
            with self._lock:
                for digest in distinct:
                    self._watched[digest].remove(missing)
                    if not self._watched[digest]:
                        del self._watched[digest]
            missing.needed.cancel()


class EmbeddingNeededError(Exception):
    """The engine needs an embedding that was skipped."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"the engine needs the embedding of {digest}")
        self.digest = digest


async def stream_unless_missing(
    pieces: AsyncGenerator[T, None], needed: asyncio.Future[str], scheduled: asyncio.Event, first: T
) -> AsyncGenerator[T, None]:
    """Yields `first` once the request is scheduled or has an answer, then the pieces. `needed`: `Missing.needed`.

    Raises:
        EmbeddingNeededError: the engine needs one of the skipped embeddings; `pieces` is cancelled.
    """
    first_token = asyncio.ensure_future(scheduled.wait())
    next_piece = asyncio.ensure_future(next_or_none(pieces))
    started = False
    try:
        while True:
            awaited: set[asyncio.Future[Any]] = {next_piece, needed} if started else {next_piece, needed, first_token}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if needed.done() and not next_piece.done():
                raise EmbeddingNeededError(needed.result())
            if not started:
                started = True
                yield first
            elif (piece := next_piece.result()) is not None:
                yield piece
                next_piece = asyncio.ensure_future(next_or_none(pieces))
            else:
                return
    finally:
        first_token.cancel()
        await cancel_and_wait(next_piece)
