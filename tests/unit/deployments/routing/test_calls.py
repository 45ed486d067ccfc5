"""Calls by gRPC: one whose replica is lost fails as one through Ray does, and none that is merely slow is ended."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import grpc  # type: ignore[import-untyped]
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import ReplicaID, RunningReplica

from deployments.routing.calls import GrpcAnswer, GrpcCalls
from tests.cycles import assert_freed

NAME = ReplicaID("a", DeploymentID("LLM", "vitray"))
LOOK_S = 0.02


class Call:
    """One that is under way until it is cancelled or ended."""

    def __init__(self) -> None:
        self.cancelled = False
        self._told: list[Callable[[object], None]] = []

    def add_done_callback(self, tell: Callable[[object], None]) -> None:
        self._told.append(tell)

    def end(self) -> None:
        for tell in self._told:
            tell(None)

    def cancel(self) -> None:
        self.cancelled = True
        self.end()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


async def eventually(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - nothing that tells of it
        await asyncio.sleep(LOOK_S / 4)


def replica(queue_len: Callable[[], Awaitable[int]]) -> RunningReplica:
    async def asked(deadline_s: float) -> int:
        return await queue_len()

    return cast(RunningReplica, SimpleNamespace(replica_id=NAME, get_queue_len=asked))


def begun(calls: GrpcCalls) -> Call:
    call = Call()
    calls.track(NAME, cast(ReplicaResult, call))
    return call


def test_calls_of_a_replica_that_has_died_are_ended() -> None:
    async def scenario() -> None:
        async def died() -> int:
            raise ActorDiedError

        calls = GrpcCalls(poll_s=LOOK_S)
        under_way = [begun(calls), begun(calls)]
        calls.watch_removed([replica(died)])
        await eventually(lambda: not calls._calls)
        assert [call.cancelled for call in under_way] == [True, True]

    run(scenario)


def test_calls_of_a_replica_that_finishes_its_work_are_left() -> None:
    """Serve takes it away as one that has died. What cannot be reached for a while may be there again."""

    async def scenario() -> None:
        asked: list[str] = []

        async def slow() -> int:
            asked.append("")
            if len(asked) == 1:
                raise ActorUnavailableError("no way there", None)
            await asyncio.sleep(60 if len(asked) == 2 else 0)
            return 1

        calls = GrpcCalls(poll_s=LOOK_S)
        call = begun(calls)
        calls.watch_removed([replica(slow)])
        calls.watch_removed([replica(slow)])
        await eventually(lambda: len(asked) >= 5)
        assert not call.cancelled
        call.end()
        await asyncio.sleep(4 * LOOK_S)
        told = len(asked)
        await asyncio.sleep(4 * LOOK_S)
        assert len(asked) == told
        assert (calls._calls, call.cancelled, calls._watching) == ({}, False, {})

    run(scenario)


def test_nothing_is_asked_of_a_replica_without_calls() -> None:
    async def scenario() -> None:
        async def asked() -> int:
            raise AssertionError

        calls = GrpcCalls(poll_s=LOOK_S)
        begun(calls).end()
        calls.watch_removed([replica(asked)])
        await asyncio.sleep(3 * LOOK_S)

    run(scenario)


def failing(error: BaseException) -> AsyncIterator[int]:
    async def pieces() -> AsyncIterator[int]:
        yield 1
        raise error

    return pieces()


@pytest.mark.parametrize(
    "error",
    [
        asyncio.CancelledError(),
        grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata()),
    ],
)
def test_an_answer_that_was_ended_there_tells_of_a_lost_replica(error: BaseException) -> None:
    async def scenario() -> None:
        answer: GrpcAnswer[int] = GrpcAnswer(failing(error))
        assert await anext(answer) == 1
        with pytest.raises(RayActorError):
            await anext(answer)

    run(scenario)


def test_another_error_stays_what_it_is() -> None:
    async def scenario() -> None:
        unknown = grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, grpc.aio.Metadata(), grpc.aio.Metadata())
        answer: GrpcAnswer[int] = GrpcAnswer(failing(unknown))
        await anext(answer)
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(answer)

    run(scenario)


def test_whoever_is_cancelled_while_waiting_is_cancelled() -> None:
    async def scenario() -> None:
        async def never() -> AsyncIterator[int]:
            await asyncio.sleep(60)
            yield 1

        answer: GrpcAnswer[int] = GrpcAnswer(never())
        waiting = asyncio.ensure_future(anext(answer))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await anext(GrpcAnswer(never()))

    run(scenario)


def test_an_answer_that_has_ended_is_not_kept_by_a_cycle() -> None:
    """Serve reads each piece on the router's loop. The last exception and its future referred to each other, so every
    request was kept until Python collected cycles."""

    class Answer:
        def __init__(self) -> None:
            self._pieces = self._made()

        async def _made(self) -> AsyncIterator[int]:
            yield 1

        async def __anext__(self) -> int:
            future = asyncio.run_coroutine_threadsafe(self._get(), asyncio.get_running_loop())
            return await asyncio.wrap_future(future)

        async def _get(self) -> int:
            return await anext(self._pieces)

    async def scenario() -> weakref.ref[Answer]:
        answer = Answer()
        wrapped: GrpcAnswer[int] = GrpcAnswer(answer)
        assert [piece async for piece in wrapped] == [1]
        await asyncio.sleep(0)  # the task that read last ends
        return weakref.ref(answer)

    assert_freed(scenario)
