"""Pieces of an answer, of which the next is made while one is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from deployments.llm.streams import PrefetchedStream


async def ending_slowly(ended: list[str], *pieces: int) -> AsyncGenerator[int, None]:
    """Waits after its last piece. Its end takes a while, also if it is cancelled meanwhile."""
    try:
        for piece in pieces:
            yield piece
        await asyncio.sleep(60)
    finally:
        try:
            await asyncio.sleep(0.05)
        finally:
            await asyncio.sleep(0.05)
            ended.append("closed")


def test_what_is_begun_goes_on_before_it_is_read_and_is_read_whole() -> None:
    async def scenario() -> None:
        made: list[int] = []

        async def pieces() -> AsyncGenerator[int, None]:
            for number in range(3):
                made.append(number)
                yield number

        begun = PrefetchedStream(pieces())
        await asyncio.sleep(0.01)
        assert made == [0]
        assert [piece async for piece in begun.read()] == [0, 1, 2]
        await begun.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("reads", [False, True])
def test_what_is_begun_and_given_up_is_closed_before_it_goes_on(reads: bool) -> None:
    async def scenario() -> None:
        ended: list[str] = []
        begun = PrefetchedStream(ending_slowly(ended, 1))
        await asyncio.sleep(0.01)
        if reads:
            async with aclosing(begun.read()) as rest:
                assert await anext(rest) == 1
        else:
            await begun.aclose()
        assert ended == ["closed"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_who_is_cancelled_while_a_stream_ends_waits_for_its_end() -> None:
    """A generator that runs cannot be closed: its leases were kept until the replica ended."""

    async def scenario() -> None:
        ended: list[str] = []
        begun = PrefetchedStream(ending_slowly(ended))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(begun.aclose())
        await asyncio.sleep(0.01)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert ended == ["closed"]
        await begun.aclose()

    asyncio.run(scenario())


def test_what_fails_after_it_was_begun_is_told_to_who_reads_it_and_to_nobody_else() -> None:
    async def broken() -> AsyncGenerator[int, None]:
        for number in list[int]():
            yield number
        raise LookupError("broken")

    async def scenario() -> None:
        with pytest.raises(LookupError, match="broken"):
            await anext(PrefetchedStream(broken()).read())
        await PrefetchedStream(broken()).aclose()

    asyncio.run(scenario())
