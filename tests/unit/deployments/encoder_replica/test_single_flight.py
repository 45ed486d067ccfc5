"""One piece of work for all who want it: shared, cancelled with the last of them, nothing left behind."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from deployments.encoder_replica.single_flight import SingleFlight
from tests.cycles import assert_freed


class Work:
    """Work that waits until it is told to go on, and counts how often it was started and cancelled."""

    def __init__(self) -> None:
        self.started = self.cancelled = 0
        self.go_on = asyncio.Event()
        self.cleaned_up = asyncio.Event()
        self.cleaned_up.set()
        self.error: Exception | None = None

    async def __call__(self) -> object:
        self.started += 1
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            await self.cleaned_up.wait()
            raise
        if self.error is not None:
            raise self.error
        return object()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Fails for anything that asyncio reports, such as an exception that nobody took."""
    reported: list[str] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(str(context)))
        await scenario()
        await asyncio.sleep(0)

    asyncio.run(watched())
    assert reported == []


async def started(flights: SingleFlight[object], work: Work, count: int) -> list[asyncio.Task[object]]:
    tasks = [asyncio.create_task(flights.run("key", work)) for _ in range(count)]
    await asyncio.sleep(0.01)
    return tasks


def test_callers_share_one_piece_of_work() -> None:
    async def scenario() -> None:
        flights, work = SingleFlight[object](), Work()
        tasks = await started(flights, work, 5)
        work.go_on.set()
        results = await asyncio.gather(*tasks)
        assert work.started == 1
        assert all(result is results[0] for result in results)
        assert len(flights) == 0

    run(scenario)


def test_keys_do_not_share() -> None:
    async def scenario() -> None:
        flights, work = SingleFlight[object](), Work()
        work.go_on.set()
        one, other = await asyncio.gather(flights.run("one", work), flights.run("other", work))
        assert work.started == 2
        assert one is not other

    run(scenario)


def test_a_result_is_not_kept() -> None:
    async def scenario() -> None:
        flights, work = SingleFlight[object](), Work()
        work.go_on.set()
        assert await flights.run("key", work) is not await flights.run("key", work)
        assert work.started == 2

    run(scenario)


def test_an_exception_reaches_every_caller_and_the_next_starts_afresh() -> None:
    async def scenario() -> None:
        flights, work = SingleFlight[object](), Work()
        tasks = await started(flights, work, 3)
        work.error = ValueError("no such image")
        work.go_on.set()
        assert await asyncio.gather(*tasks, return_exceptions=True) == [work.error] * 3
        assert len(flights) == 0
        work.error = None
        await flights.run("key", work)
        assert work.started == 2

    run(scenario)


def test_a_caller_that_leaves_does_not_stop_the_others() -> None:
    async def scenario() -> None:
        flights, work = SingleFlight[object](), Work()
        first, *others = await started(flights, work, 3)
        first.cancel()  # the one that started the work, too
        with pytest.raises(asyncio.CancelledError):
            await first
        work.go_on.set()
        await asyncio.gather(*others)
        assert (work.started, work.cancelled) == (1, 0)
        assert len(flights) == 0

    run(scenario)


def test_the_last_caller_that_leaves_cancels_the_work() -> None:
    async def scenario() -> None:
        flights, work = SingleFlight[object](), Work()
        tasks = await started(flights, work, 3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert (work.started, work.cancelled) == (1, 1)
        assert len(flights) == 0

    run(scenario)


def test_a_caller_that_comes_while_the_work_is_being_cancelled_starts_afresh() -> None:
    """It must not be handed the cancellation of somebody else's work."""

    async def scenario() -> None:
        flights, work = SingleFlight[object](), Work()
        work.cleaned_up.clear()
        (task,) = await started(flights, work, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        late = asyncio.create_task(flights.run("key", work))  # the first work is still cleaning up
        await asyncio.sleep(0.01)
        assert (work.started, work.cancelled) == (2, 1)
        work.go_on.set()
        assert await late is not None
        work.cleaned_up.set()
        await asyncio.sleep(0.01)
        assert len(flights) == 0

    run(scenario)


def test_an_error_of_cancelled_work_is_not_reported_as_lost() -> None:
    async def scenario() -> None:
        flights = SingleFlight[object]()

        async def stubborn() -> object:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise RuntimeError("failed while it was cancelled") from None
            return None

        task = asyncio.create_task(flights.run("key", stubborn))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)

    run(scenario)


def test_an_error_keeps_nothing_in_a_cycle() -> None:
    """The task with the image's file was kept until Python collected cycles."""

    class File(bytearray):
        pass

    async def scenario() -> weakref.ref[File]:
        async def fail(file: File) -> object:
            raise ValueError(len(file))

        async def call(file: File) -> None:
            with pytest.raises(ValueError, match="1"):
                await SingleFlight[object]().run("key", lambda: fail(file))

        file = File(b"1")
        await call(file)
        await asyncio.sleep(0)
        return weakref.ref(file)

    assert_freed(scenario)
