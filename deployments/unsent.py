"""Embeddings that a request goes to the engine without, since vLLM may have what comes of them in its prefix cache.

vLLM's scheduler tells: before it takes a request up, it asks its `ECConnector` whether all is there that the tokens
still to be computed need. What it misses it waits for, and the request is given up. This module must not know of vLLM,
nor where embeddings lie.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from deployments.pieces import following, given_up

Missing = asyncio.Future[str]
"""Done, with a digest, once the engine waits for one of the embeddings."""
T = TypeVar("T")


class Unsent:
    """What is watched for one engine. Watched on event loops, told on the link's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[str, list[Missing]] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def missing(self, digest: str) -> None:
        """The engine waits for it. Nothing where nobody watches: then it is on its way."""
        with self._lock:
            watching = list(self._watched.get(digest, ()))
        for future in watching:
            future.get_loop().call_soon_threadsafe(_tell, future, digest)

    @contextmanager
    def watched(self, digests: Iterable[str]) -> Iterator[Missing]:
        """To be begun before the request goes to the engine."""
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


class MissingError(Exception):
    """The engine waits for an embedding that the request came without."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"the engine needs the embedding of {digest}")
        self.digest = digest


async def unless_missing(
    pieces: AsyncGenerator[T, None], missing: Missing, taken_up: asyncio.Event, first: T
) -> AsyncGenerator[T, None]:
    """`first` once the request is taken up, or has an answer; then the pieces, which are closed where the engine comes
    to wait.

    Raises:
        MissingError: what it waits for.
    """
    taken = asyncio.ensure_future(taken_up.wait())
    coming = asyncio.ensure_future(following(pieces))
    begun = False
    try:
        while True:
            awaited: set[asyncio.Future[Any]] = {coming, missing} if begun else {coming, missing, taken}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if missing.done() and not coming.done():
                raise MissingError(missing.result())
            if not begun:
                begun = True
                yield first
            elif (piece := coming.result()) is not None:
                yield piece
                coming = asyncio.ensure_future(following(pieces))
            else:
                return
    finally:
        taken.cancel()
        await given_up(coming)


def _tell(future: Missing, digest: str) -> None:
    if not future.done():
        future.set_result(digest)
