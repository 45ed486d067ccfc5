"""Calls to a replica by gRPC instead of Ray.

gRPC has a shorter round trip, and copies everything that a call carries.

Ray reports a lost host to its callers. gRPC reports that a process has ended, but not that a host stopped responding,
so the caller asks Ray about replicas that Serve has removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Generic, TypeVar

import grpc  # type: ignore[import-untyped]
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.serve.request_router import ReplicaID, RunningReplica

from deployments.common.ray_private import ReplicaResult

POLL_S = 2.0
"""Interval of the checks whether a removed replica with calls in flight is alive."""

T = TypeVar("T")


class GrpcAnswer(Generic[T]):
    """Response by gRPC, iterated and cancelled like one by Ray, and with the same error if its replica is lost."""

    def __init__(self, answer: Any) -> None:  # noqa: ANN401 - Serve's DeploymentResponseGenerator[T], which is not typed
        self._answer = answer

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        """Raises RayActorError if the call was cancelled but not its caller."""
        try:
            piece: T = await anext(self._answer)
            return piece
        except StopAsyncIteration as end:
            # Its traceback refers to futures that refer to it: a cycle, which would keep the call and what it carried.
            end.__traceback__ = None
            raise StopAsyncIteration from None
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
    """The gRPC calls in flight of one router. Used on the router's event loop."""

    def __init__(self, *, poll_s: float = POLL_S) -> None:
        self._poll_s = poll_s
        self._calls: dict[ReplicaID, set[ReplicaResult]] = {}
        self._watching: dict[ReplicaID, asyncio.Task[None]] = {}

    def track(self, replica: ReplicaID, call: ReplicaResult) -> None:
        self._calls.setdefault(replica, set()).add(call)
        call.add_done_callback(lambda _: self._untrack(replica, call))

    def watch_removed(self, replicas: Iterable[RunningReplica]) -> None:
        """Watches replicas that Serve removed: each has ended, is lost, or is finishing its calls."""
        for replica in replicas:
            name = replica.replica_id
            if name in self._calls and name not in self._watching:
                self._watching[name] = asyncio.ensure_future(self._watch(replica))

    def _untrack(self, replica: ReplicaID, call: ReplicaResult) -> None:
        calls = self._calls.get(replica, set())
        calls.discard(call)
        if not calls:
            self._calls.pop(replica, None)

    async def _watch(self, replica: RunningReplica) -> None:
        """Cancels the replica's calls once Ray reports that it died."""
        try:
            while calls := self._calls.get(replica.replica_id):
                if await self._is_dead(replica):
                    for call in list(calls):
                        call.cancel()
                    return
                await asyncio.sleep(self._poll_s)
        finally:
            del self._watching[replica.replica_id]

    async def _is_dead(self, replica: RunningReplica) -> bool:
        try:
            async with asyncio.timeout(self._poll_s):
                await replica.get_queue_len(deadline_s=self._poll_s)
        except ActorDiedError:
            return True
        except (RayError, TimeoutError):  # unreachable, perhaps only for a while
            return False
        return False
