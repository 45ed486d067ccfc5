"""An answer's pieces in their order: the next is made while one is on its way. It must not know what they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


async def after(first: T, pieces: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """`first`, while the first of the pieces is under way already; then the pieces."""
    coming = asyncio.ensure_future(following(pieces))
    try:
        yield first
        piece = await coming
    finally:
        await given_up(coming)
    if piece is not None:
        yield piece
        async for piece in pieces:
            yield piece


class Started(Generic[T]):
    """Pieces whose first is under way. Let `rest` or `give_up` follow."""

    def __init__(self, pieces: AsyncGenerator[T, None]) -> None:
        self._pieces = pieces
        self._first = asyncio.ensure_future(following(pieces))

    async def rest(self) -> AsyncGenerator[T, None]:
        """All of the pieces."""
        try:
            piece = await self._first
            while piece is not None:
                yield piece
                piece = await following(self._pieces)
        finally:
            await self.give_up()

    async def give_up(self) -> None:
        """Closes them, and waits until nothing runs any more."""
        await given_up(self._first)
        await self._pieces.aclose()


async def following(pieces: AsyncGenerator[T, None]) -> T | None:
    """The next; None after the last."""
    return await anext(pieces, None)


async def given_up(coming: asyncio.Future[Any]) -> None:
    """Cancels what `following` has under way, and waits until nothing runs any more."""
    coming.cancel()
    await asyncio.wait([coming])
    if not coming.cancelled():
        coming.exception()  # told already, or to nobody who is left
