"""Ray Serve request router for cache affinity: it applies the decisions of `affinity.py`.

    serve.deployment(request_router_config=RequestRouterConfig(
        request_router_class="deployments.routing.serve_router:AffinityRouter",
        request_router_kwargs={"load_factor": 1.25},
    ))

A caller passes `handle.options(session_id=Call(digest, tokens).to_session_id())`; a call without a session id goes to
the replica with the least load. Replicas report their cached keys through `record_routing_stats`, which Serve's
controller sends to every router. Before an expensive call, the router probes some replicas for their present load,
since other routers send to them too.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from deployments.common.ray_private import routing_stats
from deployments.common.replica_errors import EngineDeadError, IdentityGoneError
from deployments.routing.affinity import HELD, ActiveCall, Affinity, Call
from deployments.routing.prefill_load import soonest
from deployments.routing.replica_identity import identity_of
from deployments.routing.replica_router import ReplicaRouter
from deployments.telemetry.metrics import Counter

PROBE_FANOUT = 3
"""Number of replicas probed before an expensive call: the best for its key."""
PROBE_TIMEOUT_S = 0.05
"""Replicas that have not answered a probe by then are not considered."""


class AffinityRouter(ReplicaRouter):
    """Router of one deployment handle in one process. Serve calls all methods on the router's event loop."""

    def initialize_state(
        self,
        *,
        load_factor: float = 1.25,
        separate_cache_hits: bool = False,
        probe_min_cost: int | None = None,
        by_key: bool = True,
        **_: object,
    ) -> None:
        """Takes the arguments of `Affinity` and:

        Args:
            probe_min_cost: least cost of a call before which replicas are probed; None never probes.
            by_key: if false, each call goes to the replica with the least load.
        """
        super().initialize_state()
        self._by_key = by_key
        self._probe_min_cost = probe_min_cost
        self._affinity = Affinity(load_factor=load_factor, separate_cache_hits=separate_cache_hits)
        self._names: dict[str, RunningReplica] = {}
        self._reported: dict[str, bytes] = {}
        # By replica and request. Calls of one request share its id, so `on_request_completed` may end them in another
        # order; the loads are right once all have ended.
        self._under_way: defaultdict[tuple[ReplicaID, str], list[ActiveCall]] = defaultdict(list)

    def _use(self, replicas: list[RunningReplica]) -> None:
        super()._use(replicas)
        self._names = {replica.replica_id.unique_id: replica for replica in replicas}
        self._affinity.set_replicas(self._names, {name: identity_of(replica) for name, replica in self._names.items()})
        self._reported = {name: held for name, held in self._reported.items() if name in self._names}
        for name, replica in self._names.items():
            held = (replica.routing_stats or {}).get(HELD, b"")
            if held != self._reported.get(name, b""):
                self._affinity.publish(name, held)
                self._reported[name] = held

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns each replica within the bound as its own rank, best first; Serve tries the next if one is full."""
        call = Call()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # Serve waits before it tries full replicas again
            call = self._call(pending_request)
            if self._names and not self._affinity.serves(call):
                self.fail(pending_request, IdentityGoneError("no running replica has the call's identity"))
                return [candidate_replicas]  # Serve assigns no replica to a failed call and stops choosing
        names = (await self._asked(call) if self._asks(call) else []) or self._affinity.order(call)
        return [[self._names[name]] for name in names if name in self._names]

    def _call(self, pending: PendingRequest) -> Call:
        call = Call.from_session_id(pending.metadata.session_id)
        return call if self._by_key else Call(weight=call.weight, identity=call.identity)

    def _asks(self, call: Call) -> bool:
        """Whether to probe replicas. A retry is routed by local state, which knows the failed replica."""
        return (
            self._probe_min_cost is not None
            and call.cost >= self._probe_min_cost
            and not call.attempt
            and len(self._names) > 1
        )

    async def _asked(self, call: Call) -> list[str]:
        """Probes replicas. Returns all replicas, those that answered first, by load; empty if none answered."""
        ranked = self._affinity.ranked(call)
        names = ranked[:PROBE_FANOUT]
        asking = {name: asyncio.ensure_future(routing_stats(self._names[name])) for name in names}
        try:
            await asyncio.wait(asking.values(), timeout=PROBE_TIMEOUT_S)
            told = {name: task.result() for name, task in asking.items() if task.done() and not task.exception()}
            for name, task in asking.items():
                if task.done() and isinstance(task.exception(), EngineDeadError):
                    self.failed(name)
        finally:
            for task in asking.values():
                task.cancel()
        if untold := len(names) - len(told):
            self._counts.add(Counter.LOAD_PROBE_TIMEOUTS, untold, target=self.deployment_name)
        first = soonest(call, told)
        return [*first, *(name for name in ranked if name not in first)] if first else []

    def takes(self, pending: PendingRequest, replica: RunningReplica) -> bool:
        """Adds the call to the replica's load. Returns False if the replica is gone, or exceeded the bound while Serve
        asked for its queue length.
        """
        call = self._call(pending)
        name = replica.replica_id.unique_id
        asks = self._asks(call)
        spilled = not asks and self._affinity.passes_by(name, call)
        begun = self._affinity.begin(name, call, bounded=not asks)
        if begun is None:
            return False
        if spilled:
            self._counts.add(Counter.AFFINITY_SPILLS, target=self.deployment_name)
        self._under_way[replica.replica_id, pending.metadata.internal_request_id].append(begun)
        return True

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Removes one call of the request from the replica's load. Serve calls this once for every routed call."""
        under_way = self._under_way.get((replica_id, internal_request_id))
        if not under_way:
            return
        self._affinity.end(under_way.pop(0))
        if not under_way:
            del self._under_way[replica_id, internal_request_id]
