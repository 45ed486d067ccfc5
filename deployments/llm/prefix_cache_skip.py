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

Missing = asyncio.Future[str]
"""Future digest of a skipped embedding that the engine needs."""
T = TypeVar("T")


class MissingWatch:
    """Skipped embeddings of one engine. Watched on event loops; missing ones are reported on the link's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[str, list[Missing]] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def report(self, digest: str) -> None:
        """Completes the futures that watch `digest`. No effect if there are none: the embedding is being received."""
        with self._lock:
            watching = list(self._watched.get(digest, ()))
        for future in watching:
            future.get_loop().call_soon_threadsafe(_complete, future, digest)

    @contextmanager
    def watch(self, digests: Iterable[str]) -> Iterator[Missing]:
        """Yields a future. Must be entered before the request is submitted to the engine."""
        future: Missing = asyncio.get_running_loop().create_future()
        distinct = set(digests)
        with self._lock:
            for digest in distinct:
                self._watched.setdefault(digest, []).append(future)
        try:
            yield future
        finally:
            with self._lock:
                for digest in distinct:
                    self._watched[digest].remove(future)
                    if not self._watched[digest]:
                        del self._watched[digest]
            future.cancel()


class EmbeddingNeededError(Exception):
    """The engine needs an embedding that was skipped."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"the engine needs the embedding of {digest}")
        self.digest = digest


async def stream_unless_missing(
    pieces: AsyncGenerator[T, None], missing: Missing, scheduled: asyncio.Event, first: T
) -> AsyncGenerator[T, None]:
    """Yields `first` once the request is scheduled or has an answer, then the pieces.

    Raises:
        EmbeddingNeededError: the engine needs one of the skipped embeddings; `pieces` is cancelled.
    """
    first_token = asyncio.ensure_future(scheduled.wait())
    next_piece = asyncio.ensure_future(next_or_none(pieces))
    started = False
    try:
        while True:
            awaited: set[asyncio.Future[Any]] = {next_piece, missing} if started else {next_piece, missing, first_token}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if missing.done() and not next_piece.done():
                raise EmbeddingNeededError(missing.result())
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


def _complete(future: Missing, digest: str) -> None:
    if not future.done():
        future.set_result(digest)
