"""Streams whose next piece is produced while the previous one is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PrefetchedStream(Generic[T]):
    """A stream whose first piece is produced from construction on. Must be ended by `read` or `aclose`."""

    def __init__(self, pieces: AsyncGenerator[T, None]) -> None:
        self._pieces = pieces
        self._first = asyncio.ensure_future(next_or_none(pieces))

    async def read(self) -> AsyncGenerator[T, None]:
        """Yields all pieces."""
        try:
            piece = await self._first
            while piece is not None:
                yield piece
                piece = await next_or_none(self._pieces)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Cancels the stream and waits until it has ended."""
        await cancel_and_wait(self._first)
        await self._pieces.aclose()


async def next_or_none(pieces: AsyncGenerator[T, None]) -> T | None:
    """Returns the next piece, or None after the last."""
    return await anext(pieces, None)


async def cancel_and_wait(pending: asyncio.Future[Any]) -> None:
    """Cancels a call of `next_or_none` and waits until it has ended, also if the caller is cancelled meanwhile: a
    generator that runs cannot be closed."""
    interrupted: asyncio.CancelledError | None = None
    while not pending.done():
        pending.cancel()
        try:
            await asyncio.wait([pending])
        except asyncio.CancelledError as error:
            interrupted = error
    if not pending.cancelled():
        pending.exception()  # marks it as retrieved: it was raised before, or its reader has left
    if interrupted is not None:
        raise interrupted
