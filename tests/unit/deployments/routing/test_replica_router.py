"""What every router does about replicas that fail: unaccepted calls are tried elsewhere, accepted ones watched."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray import ActorID
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaQueueLengthInfo,
    RequestMetadata,
    RunningReplicaInfo,
)
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from configs.schema import LLMConfig
from deployments.app import routing
from deployments.routing import replica_router
from deployments.routing.replica_identity import version_metadata
from deployments.routing.replica_router import ReplicaRouter
from deployments.routing.serve_router import AffinityRouter
from deployments.telemetry.metrics import Counter, Counters
from tests.cycles import assert_freed

LLM = DeploymentID("LLM", "vitray")
NAME = ReplicaID("a", LLM)
ACTOR = ActorID.from_random()


class Call:
    """One that its replica accepts, or never, or rejects."""

    def __init__(self, *, accepts: bool, rejects: bool = False) -> None:
        self.accepts, self.rejects = accepts, rejects
        self.cancelled = False

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo:
        if not self.accepts and not self.rejects:
            await asyncio.Event().wait()
        return ReplicaQueueLengthInfo(self.accepts, 1)

    def add_done_callback(self, tell: object) -> None: ...

    def cancel(self) -> None:
        self.cancelled = True


def pending(*, by_reference: bool = False) -> PendingRequest:
    metadata = RequestMetadata("request", "request", _by_reference=by_reference)
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


def replica(monkeypatch: pytest.MonkeyPatch, *calls: Call, of: ReplicaRouter | None = None) -> RunningReplica:
    """One that is sent the calls in turn."""
    to_send = iter(calls)

    def init(self: Any, info: RunningReplicaInfo) -> None:
        self._replica_info = info
        self._actor_handle = SimpleNamespace(_actor_id=ACTOR)

    monkeypatch.setattr(RunningReplica, "__init__", init)
    monkeypatch.setattr(RunningReplica, "try_send_request", lambda *_: next(to_send))
    info = SimpleNamespace(replica_id=NAME, routing_stats={}, replica_metadata=version_metadata())
    return (of or router()).create_replica_wrapper(cast(Any, info))


def router() -> ReplicaRouter:
    source = DeploymentHandleSource.REPLICA
    made = AffinityRouter(deployment_id=LLM, handle_source=source, use_replica_queue_len_cache=True)
    made.initialize_state()
    return made


def test_a_call_that_is_not_accepted_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a host that falls silent gRPC reports nothing: what was sent before Ray noticed waited for its deadline."""
    counted: list[tuple[Counter, str]] = []
    monkeypatch.setattr(Counters, "add", lambda _, count, *, target: counted.append((count, target)))
    monkeypatch.setattr(replica_router, "ACCEPT_S", 0.05)
    silent, living = Call(accepts=False), Call(accepts=True)

    async def scenario() -> None:
        result = replica(monkeypatch, silent).try_send_request(pending(), True)
        with pytest.raises(ActorUnavailableError):
            await result.get_rejection_response()
        result = replica(monkeypatch, living).try_send_request(pending(), True)
        told = await result.get_rejection_response()
        assert told is not None
        assert told.accepted

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert (silent.cancelled, living.cancelled) == (True, False)
    assert counted == [(Counter.CALL_ACCEPT_TIMEOUTS, "LLM")]


@pytest.mark.parametrize("call", [Call(accepts=True), Call(accepts=False, rejects=True), Call(accepts=False)])
def test_the_files_of_a_call_are_not_kept_by_a_cycle(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    """All requests of some seconds were kept until Python collected cycles, for which it stopped for 0.1 to 0.2 s."""
    monkeypatch.setattr(replica_router, "ACCEPT_S", 0.05)

    async def scenario() -> weakref.ref[PendingRequest]:
        sent = pending()
        result = replica(monkeypatch, call).try_send_request(sent, True)
        with contextlib.suppress(ActorUnavailableError):
            await result.get_rejection_response()
        return weakref.ref(sent)

    assert_freed(scenario)


def test_a_rejected_call_is_reported_to_its_router(monkeypatch: pytest.MonkeyPatch) -> None:
    rejected: list[tuple[PendingRequest, str]] = []
    monkeypatch.setattr(AffinityRouter, "on_rejected", lambda _, *call: rejected.append(call))

    async def scenario() -> None:
        calls = pending(), pending()
        for call, accepts in zip(calls, (True, False), strict=True):
            result = replica(monkeypatch, Call(accepts=accepts, rejects=not accepts)).try_send_request(call, True)
            told = await result.get_rejection_response()
            assert told is not None
            assert told.accepted is accepts
        assert rejected == [(calls[1], "a")]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_without_affinity_replicas_are_watched_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls by gRPC that a host had accepted before it was lost waited for their deadline."""
    config = routing(LLMConfig(affinity=False, num_gpus=0))
    assert issubclass(cast(type, config.get_request_router_class()), AffinityRouter)

    async def scenario() -> None:
        async def died(_: object, *, deadline_s: float) -> int:
            raise ActorDiedError

        by_grpc, by_ray, watching = Call(accepts=True), Call(accepts=True), router()
        lost = replica(monkeypatch, by_grpc, by_ray, of=watching)
        monkeypatch.setattr(RunningReplica, "get_queue_len", died)
        watching._set_routable([lost])
        lost.try_send_request(pending(), True)
        lost.try_send_request(pending(by_reference=True), True)
        watching._set_routable([])  # before either is accepted
        while not by_grpc.cancelled:  # noqa: ASYNC110 - nothing that tells of it
            await asyncio.sleep(0.01)
        assert not by_ray.cancelled, "of those Ray reports it"

    asyncio.run(asyncio.wait_for(scenario(), 60))
