"""Serve's request router for deployments whose replicas hold things: `affinity.py` decides, this carries it out.

    serve.deployment(request_router_config=RequestRouterConfig(
        request_router_class="deployments.affinity_router:AffinityRouter", request_router_kwargs={"load_bound": 1.25}))

A caller names the call by `handle.options(session_id=Call(digest, tokens).label())`; what comes without goes to the
replica with least to do. Replicas tell what they hold through `record_routing_stats`, which Serve's controller asks for
and hands to every router. Before a call that costs much the router itself asks some replicas what they have to do now,
since others send to them too. It must not know what is encoded or answered.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from ray.serve._private.common import RequestMetadata
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.affinity import HELD, Affinity, Begun, Call
from deployments.grpc_calls import GrpcCalls
from deployments.metrics import Count, Counts
from deployments.prompt_work import soonest

ASKED = 3
"""Replicas that are asked before a call that costs much: of all of them, the first by its key."""
ASK_S = 0.05
"""Who has not answered by then is not waited for."""


class AffinityRouter(RequestRouter):
    """One a handle and process. Serve calls everything here on the router's event loop."""

    def initialize_state(
        self, *, load_bound: float = 1.25, giving_apart: bool = False, ask_from: int | None = None, **_: object
    ) -> None:
        """The arguments are those of `Affinity`, and `ask_from`: a call's cost from which on replicas are asked; None:
        never.
        """
        self._ask_from = ask_from
        self._affinity = Affinity(load_bound=load_bound, giving_apart=giving_apart)
        self._names: dict[str, RunningReplica] = {}
        self._reported: dict[str, bytes] = {}
        # By replica and request. Several calls of one request share its id: they may end in another order than is told
        # here, which is no matter once all have ended.
        self._under_way: defaultdict[tuple[ReplicaID, str], list[Begun]] = defaultdict(list)
        self._by_grpc = GrpcCalls()
        self._counts = Counts()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._use(replicas)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._use(list(self.curr_replicas.values()))

    def _use(self, replicas: list[RunningReplica]) -> None:
        before, self._names = self._names, {replica.replica_id.unique_id: replica for replica in replicas}
        self._by_grpc.taken_away(replica for name, replica in before.items() if name not in self._names)
        self._affinity.set_replicas(self._names)
        self._reported = {name: held for name, held in self._reported.items() if name in self._names}
        for name, replica in self._names.items():
            held = (replica.routing_stats or {}).get(HELD, b"")
            if held != self._reported.get(name, b""):
                self._affinity.publish(name, held)
                self._reported[name] = held

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each replica within the bound by itself, the best first; Serve takes the next where one is full."""
        call = Call()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = (
                True  # where all are full, Serve waits before it asks again
            )
            call = Call.from_label(pending_request.metadata.session_id)
        names = (await self._asked(call) if self._asks(call) else []) or self._affinity.order(call)
        return [[self._names[name]] for name in names if name in self._names]

    def _asks(self, call: Call) -> bool:
        """One that was tried before goes where it was not, by what is known here."""
        return self._ask_from is not None and call.cost >= self._ask_from and not call.attempt and len(self._names) > 1

    async def _asked(self, call: Call) -> list[str]:
        """All replicas, those first that answer, by what they say; none where nobody does."""
        ranked = self._affinity.ranked(call)
        names = ranked[:ASKED]
        asking = {name: asyncio.ensure_future(routing_stats(self._names[name])) for name in names}
        try:
            await asyncio.wait(asking.values(), timeout=ASK_S)
            told = {name: task.result() for name, task in asking.items() if task.done() and not task.exception()}
        finally:
            for task in asking.values():
                task.cancel()
        if untold := len(names) - len(told):
            self._counts.add(Count.CALLS_UNTOLD, untold, reason=self._deployment_id.name)
        first = soonest(call, told)
        return [*first, *(name for name in ranked if name not in first)] if first else []

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: RequestMetadata | None = None
    ) -> PendingRequest | None:
        """The very call that a replica was chosen for.

        Serve looks for it by the id of the HTTP request, which the calls of one request share: one of them would be
        given another's replica, and that one would be left to wait for ever.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                return pending
        return None

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: RequestMetadata | None = None
    ) -> None:
        """Gives the replica to the call, unless it has been given too much while its queue was asked for."""
        pending = self._get_pending_request_matching_internal_request_id(request_metadata)
        if pending is None:
            return
        call = Call.from_label(pending.metadata.session_id)
        name = replica.replica_id.unique_id
        asks = self._asks(call)
        spilled = not asks and self._affinity.passes_by(name, call)
        begun = self._affinity.begin(name, call, bounded=not asks)
        if begun is None:
            return
        if spilled:
            self._counts.add(Count.CALLS_SPILLED, reason=self._deployment_id.name)
        self._under_way[replica.replica_id, pending.metadata.internal_request_id].append(begun)
        super()._fulfill_next_pending_request(replica, request_metadata)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except asyncio.CancelledError:
            future = pending_request.future
            if future.done() and not future.cancelled():  # given away a moment ago: Serve will not tell that it is over
                self.on_request_completed(future.result().replica_id, pending_request.metadata.internal_request_id)
            raise

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve calls it once for every call that got a replica, however it went."""
        under_way = self._under_way.get((replica_id, internal_request_id))
        if not under_way:
            return
        self._affinity.end(under_way.pop(0))
        if not under_way:
            del self._under_way[replica_id, internal_request_id]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """It was counted when the replica was chosen; of one by gRPC nobody else tells that its host is lost."""
        if not pending_request.metadata._by_reference:
            self._by_grpc.begun(replica_id, result)


async def routing_stats(replica: RunningReplica) -> dict[str, Any]:
    """What the replica tells now, of what Serve's controller asks it every few seconds."""
    told: dict[str, Any] = await replica._actor_handle.record_routing_stats.remote()
    return told
