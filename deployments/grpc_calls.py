"""Calls that go from process to process by gRPC, past Ray: quicker there and back, and all that they carry is copied.

Ray tells its own callers when a replica's host is lost. gRPC tells when a process has ended, but nothing where a host
has fallen silent, so whoever calls asks Ray about replicas that Serve has taken away. This module must not know what is
called, nor how a replica is chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Generic, TypeVar

import grpc  # type: ignore[import-untyped]
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import ReplicaID, RunningReplica

LOOK_S = 2.0
"""Between two questions whether a replica lives that was taken away and has not answered yet."""

T = TypeVar("T")


class GrpcAnswer(Generic[T]):
    """An answer by gRPC, iterated and cancelled like one that Ray brings; it fails as that does where its replica is
    lost."""

    def __init__(self, answer: Any) -> None:  # noqa: ANN401 - Serve's DeploymentResponseGenerator[T], which is not typed
        self._answer = answer

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        """Raises RayActorError where the call has ended and not its caller."""
        try:
            piece: T = await anext(self._answer)
            return piece
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if waiting is None or waiting.cancelling():
                raise
            raise RayActorError(error_msg="the call was ended where it was answered, or its host is lost") from None
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise
            raise RayActorError(error_msg="the replica ended the call") from error

    def cancel(self) -> None:
        self._answer.cancel()


class GrpcCalls:
    """The calls of one router that are under way by gRPC. Used on the router's event loop."""

    def __init__(self, *, look_s: float = LOOK_S) -> None:
        self._look_s = look_s
        self._calls: dict[ReplicaID, set[ReplicaResult]] = {}
        self._watching: dict[ReplicaID, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def begun(self, replica: ReplicaID, call: ReplicaResult) -> None:
        self._calls.setdefault(replica, set()).add(call)
        call.add_done_callback(lambda _: self._ended(replica, call))

    def taken_away(self, replicas: Iterable[RunningReplica]) -> None:
        """Serve gives them nothing more: each has ended, is lost, or finishes what it was given."""
        for replica in replicas:
            name = replica.replica_id
            if name in self._calls and name not in self._watching:
                self._watching[name] = asyncio.ensure_future(self._watch(replica))

    def _ended(self, replica: ReplicaID, call: ReplicaResult) -> None:
        calls = self._calls.get(replica, set())
        calls.discard(call)
        if not calls:
            self._calls.pop(replica, None)

    async def _watch(self, replica: RunningReplica) -> None:
        """Ends its calls once Ray knows that it is no more."""
        try:
            while calls := self._calls.get(replica.replica_id):
                if await self._died(replica):
                    for call in list(calls):
                        call.cancel()
                    return
                await asyncio.sleep(self._look_s)
        finally:
            del self._watching[replica.replica_id]

    async def _died(self, replica: RunningReplica) -> bool:
        try:
            async with asyncio.timeout(self._look_s):
                await replica.get_queue_len(deadline_s=self._look_s)
        except ActorDiedError:
            return True
        except (RayError, TimeoutError):  # not to be reached, which may pass
            return False
        return False
