"""Handling of failed replicas in a request router, independent of how it chooses replicas.

A replica with another version of the messages gets no calls. One that reported a permanent failure gets no more calls,
although Serve's controller needs several health checks to replace it. A call that its replica does not accept in time
is routed elsewhere: the host may have stopped responding, which gRPC does not report and Ray reports late. Serve calls
all methods on the router's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ray.exceptions import ActorUnavailableError
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from deployments.common.ray_private import (
    PrivateRequestRouter,
    ReplicaQueueLengthInfo,
    ReplicaResult,
    RunningReplicaInfo,
    is_by_reference,
)
from deployments.common.replica_errors import VersionGoneError
from deployments.routing.calls import GrpcCalls
from deployments.routing.replica_identity import has_same_protocol
from deployments.telemetry.metrics import Counter, Counters

ACCEPT_S = 2.0
"""Timeout for a replica to accept or reject a call, which its event loop does before anything else."""


class BoundedReplica(RunningReplica):
    """A replica that must accept or reject a call within ACCEPT_S."""

    def __init__(self, replica_info: RunningReplicaInfo, router: ReplicaRouter) -> None:
        super().__init__(replica_info)
        self._router = router

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult:
        result = super().try_send_request(pr, with_rejection)
        if not is_by_reference(pr):
            self._router.by_grpc.track(self.replica_id, result)
        if with_rejection:
            accepted = partial(self._wait_for_accept, pr, result, result.get_rejection_response)
            result.get_rejection_response = accepted  # type: ignore[method-assign]
        return result

    async def _wait_for_accept(
        self,
        pending: PendingRequest,
        result: ReplicaResult,
        ask: Callable[[], Awaitable[ReplicaQueueLengthInfo | None]],
    ) -> ReplicaQueueLengthInfo | None:
        """Raises ActorUnavailableError after ACCEPT_S without an answer: Serve then chooses again, and chooses this
        replica only after it has reported its queue length."""
        try:
            async with asyncio.timeout(ACCEPT_S):
                answer = await ask()
            if answer is not None and not answer.accepted:
                self._router.on_rejected(pending, self.replica_id.unique_id)
            return answer
        except TimeoutError:
            result.cancel()
            self._router.counts.add(Counter.CALL_ACCEPT_TIMEOUTS, target=self.replica_id.deployment_id.name)
            silent = f"the call was not accepted in {ACCEPT_S:g} s"
            raise ActorUnavailableError(silent, self.actor_id.binary()) from None
        finally:
            # It refers to the result and the call, whose files would be kept until cycles are collected.
            vars(result).pop("get_rejection_response", None)


class ReplicaRouter(PrivateRequestRouter):
    """Router of one deployment handle in one process."""

    def initialize_state(self, **_: Any) -> None:  # noqa: ANN401 - Serve's signature
        self._excluded: set[ReplicaID] = set()
        self._has_seen_own_version = self._is_version_gone = False
        self._routable: dict[ReplicaID, RunningReplica] = {}
        self.by_grpc = GrpcCalls()
        """Calls by gRPC, which does not report that a replica's host is lost."""
        self.counts = Counters()

    def create_replica_wrapper(self, replica_info: RunningReplicaInfo) -> RunningReplica:
        return BoundedReplica(replica_info, self)

    def on_rejected(self, pending: PendingRequest, name: str) -> None:
        """Called with a call that the replica with this unique id has rejected, before Serve chooses again."""

    def exclude(self, name: str) -> None:
        """Excludes the replica with this unique id from routing until Serve removes it."""
        replica_id = self.replica_id(name)
        if replica_id in self.curr_replicas:
            self._excluded.add(replica_id)
            self.on_replica_actor_died(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self.known_replicas = replicas
        self._excluded &= {replica.replica_id for replica in replicas}
        own = [one for one in replicas if has_same_protocol(one)]
        self._has_seen_own_version |= bool(own)
        self._is_version_gone = self._has_seen_own_version and bool(replicas) and not own
        working = [one for one in own if one.replica_id not in self._excluded]
        self._set_routable(working)
        super().update_replicas(working)
        self.refuse_pending()

    def refusal(self) -> VersionGoneError | None:
        """Calls wait for the first replica of this version, but not once an update has replaced the last one."""
        return VersionGoneError() if self._is_version_gone else None

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._set_routable(list(self.curr_replicas.values()))

    def _set_routable(self, replicas: list[RunningReplica]) -> None:
        """Sets the replicas that calls may be routed to."""
        before, self._routable = self._routable, {replica.replica_id: replica for replica in replicas}
        self.by_grpc.watch_removed(replica for name, replica in before.items() if name not in self._routable)
