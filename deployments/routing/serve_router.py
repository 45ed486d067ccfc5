"""Ray Serve request router for cache affinity: it applies the decisions of `affinity.py`.

    serve.deployment(request_router_config=RequestRouterConfig(
        request_router_class="deployments.routing.serve_router:AffinityRouter",
        request_router_kwargs={"load_factor": 1.25},
    ))

A caller passes `handle.options(session_id=Call(digest, tokens).to_session_id())`; a call without a session id goes to
the replica with the least load. Before an expensive call, the router probes some replicas for their present load, since
other routers send to them too. Serve's controller sends routers nothing that changes with the load.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from deployments.common.ray_private import routing_stats
from deployments.common.replica_errors import EngineDeadError, IdentityGoneError
from deployments.routing.affinity import ActiveCall, Affinity, Call
from deployments.routing.choices import Choices
from deployments.routing.prefill_load import choose_probed, rank_by_pending_prefill
from deployments.routing.replica_identity import HOST, IDENTITY, published
from deployments.routing.replica_router import ReplicaRouter
from deployments.routing.wait_queue import Try, WaitQueue
from deployments.telemetry.metrics import Counter

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
        refusable: bool = False,
        **_: object,
    ) -> None:
        """Takes the arguments of `Affinity` and:

        Args:
            probe_min_cost: least cost of a call before which replicas are probed; None never probes.
            by_key: if false, each call goes to the replica with the least load, of those on its host if it has one.
            refusable: whether replicas may refuse a call with a key because they are too busy.
        """
        super().initialize_state()
        self._refusable = refusable
        self._by_key = by_key
        self._probe_min_cost = probe_min_cost
        self._affinity = Affinity(load_factor=load_factor, separate_cache_hits=separate_cache_hits)
        self._choices = Choices(self._affinity)
        self._names: dict[str, RunningReplica] = {}
        self._hosts: dict[str, str] = {}
        self._wait_queue = WaitQueue()
        self._tries: WeakKeyDictionary[asyncio.Task[Any], Try] = WeakKeyDictionary()  # by Serve's routing task
        # By replica and request. Calls of one request share its id, so `on_request_completed` may end them in another
        # order; the loads are right once all have ended.
        self._active: defaultdict[tuple[ReplicaID, str], list[ActiveCall]] = defaultdict(list)

    def _set_routable(self, replicas: list[RunningReplica]) -> None:
        super()._set_routable(replicas)
        self._names = {replica.replica_id.unique_id: replica for replica in replicas}
        identities = {name: published(one, IDENTITY) for name, one in self._names.items()}
        self._hosts = {name: published(one, HOST) for name, one in self._names.items()}
        self._affinity.set_replicas(self._names, identities, self._hosts)
        self._wait_queue.replicas_changed()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns each replica within the bound as its own rank, best first; Serve tries the next if one is full.

        A choice counts as a call of the first one from now on. Raises IdentityGoneError for a choice.
        """
        call = Call()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # Serve waits before it tries full replicas again
            call = self._call(pending_request)
            if not call.only_choose:
                await asyncio.sleep(0)  # calls that were just assigned are counted first, as load of their replicas
                last = self._tries.setdefault(_current_task(), Try(0.0, 0))
                last.arrived_s, last.num_missed = pending_request.created_at, self._wait_queue.num_missed
            replaced = pending_request.metadata.internal_request_id if call.only_choose else None
            self.counts.add(Counter.CHOICES_NOT_CALLED, self._choices.expire(replaced))
            if self._names and not self._affinity.can_serve(call):
                error = IdentityGoneError("no running replica has the call's identity")
                if call.only_choose:
                    raise error
                self.fail(pending_request, error)
                return [candidate_replicas]  # Serve assigns no replica to a failed call and stops choosing
        is_probed = self._should_probe(call)
        names = (await self._probe(call) if is_probed else []) or self._affinity.candidates(call)
        if pending_request is not None and call.only_choose and names:
            spilled = not is_probed and self._affinity.is_spill(names[0], call)
            self.counts.add(Counter.AFFINITY_SPILLS, spilled, target=self.deployment_name)
            self._choices.begin(pending_request.metadata.internal_request_id, names[0], call)
        if pending_request is not None and not call.only_choose:
            self._tries[_current_task()].tried = names
        return [[self._names[name]] for name in names if name in self._names]

    async def wait_for_place(self, timeout_s: float) -> None:
        """Waits until a call ends and leaves its place, or for `timeout_s`. In a router that has none in flight, the
        oldest call tries more often."""
        last = self._tries.get(_current_task())
        if last is None:  # a choice, for which no replica runs
            return await super().wait_for_place(timeout_s)
        if last.place is not None and last.place not in last.tried:
            self._wait_queue.place_free(last.place, after_s=last.arrived_s)
        last.place = None
        if last.num_missed == self._wait_queue.num_missed:
            if not self._active and self._wait_queue.is_oldest(last.arrived_s):
                timeout_s = min(timeout_s, self.initial_backoff_s)
            last.place = await self._wait_queue.wait(last.arrived_s, timeout_s)

    def _call(self, pending: PendingRequest) -> Call:
        call = Call.from_session_id(pending.metadata.session_id)
        return call if self._by_key else dataclasses.replace(call, key=None, attempt=0, cost=0)

    def on_rejected(self, pending: PendingRequest, name: str) -> None:
        """Routes a call that may be refused to other replicas from now on."""
        call = Call.from_session_id(pending.metadata.session_id)
        if call.refusable:
            self.counts.add(Counter.ENCODER_REFUSALS)
            refused_by = (*call.refused_by, name)
            pending.metadata.session_id = dataclasses.replace(call, refused_by=refused_by).to_session_id()

    def _should_probe(self, call: Call) -> bool:
        """Whether to probe replicas. A retry is routed by local state, which knows the failed replica."""
        return (
            self._probe_min_cost is not None
            and call.cost >= self._probe_min_cost
            and not call.attempt
            and not call.replica
            and len(self._names) > 1
        )

    async def _probe(self, call: Call) -> list[str]:
        """Probes replicas. Returns all replicas, those that answered first, by load; empty if none answered."""
        ranked = self._affinity.rank(call)
        names = choose_probed(ranked, self._hosts)
        probes = {name: asyncio.ensure_future(routing_stats(self._names[name])) for name in names}
        try:
            await asyncio.wait(probes.values(), timeout=PROBE_TIMEOUT_S)
            stats = {name: task.result() for name, task in probes.items() if task.done() and not task.exception()}
            for name, task in probes.items():
                if task.done() and isinstance(task.exception(), EngineDeadError):
                    self.exclude(name)
        finally:
            for task in probes.values():
                task.cancel()
        if num_silent := len(names) - len(stats):
            self.counts.add(Counter.LOAD_PROBE_TIMEOUTS, num_silent, target=self.deployment_name)
        first = rank_by_pending_prefill(call, stats, names)
        return [*first, *(name for name in ranked if name not in first)] if first else []

    def try_assign(self, pending: PendingRequest, replica: RunningReplica) -> bool:
        """Adds the call to the replica's load. Returns False if the replica is gone, or exceeded the bound while Serve
        asked for its queue length.
        """
        call = self._call(pending)
        name = replica.replica_id.unique_id
        request = pending.metadata.internal_request_id
        if call.replica and self._choices.end(request) and name != call.replica:
            self.counts.add(Counter.CHOICES_NOT_CALLED)
        is_probed = self._should_probe(call)
        spilled = not is_probed and self._affinity.is_spill(name, call)
        active = self._affinity.begin(name, call, bounded=not is_probed)
        if active is None:
            return False
        self.counts.add(Counter.AFFINITY_SPILLS, spilled, target=self.deployment_name)
        self._active[replica.replica_id, request].append(active)
        self._wait_queue.place_free(None)
        if self._refusable and call.key is not None:
            refusable = call.cost > 0 and name not in call.refused_by and self._affinity.is_refusable(call)
            sent = dataclasses.replace(call, refusable=refusable)
            pending.metadata.session_id = sent.to_session_id()
        return True

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Removes one call of the request from the replica's load. Serve calls this once for every routed call."""
        self._wait_queue.place_free(replica_id.unique_id)
        active = self._active.get((replica_id, internal_request_id))
        if not active:
            return
        self._affinity.end(active.pop(0))
        if not active:
            del self._active[replica_id, internal_request_id]


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
