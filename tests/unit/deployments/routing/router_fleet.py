"""A router as Serve's own code drives it, with stand-ins for replicas."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from deployments.routing.affinity import Call
from deployments.routing.prefill_load import CONVERSATIONS, PENDING_TOKENS, PREFIX_BYTES
from deployments.routing.replica_identity import HOST, IDENTITY, version_metadata
from deployments.routing.serve_router import AffinityRouter

ENCODER = DeploymentID("Encoder", "vitray")
KEYS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(40)]


class Fleet:
    """A router over replicas `a`, `b`, …; `full` names those that take no more."""

    def __init__(self, names: str, **arguments: Any) -> None:
        self.full: set[str] = set()
        self.identities: dict[str, str] = {}
        self.hosts: dict[str, str] = {}
        self.other_version: str = ""
        """Names of replicas with another version of the messages."""
        self.told: dict[str, dict[str, Any] | Exception | None] = {}
        """What replicas answer when they are asked; None: nothing."""
        self.asked: list[str] = []
        self.router = AffinityRouter(
            ENCODER, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True, initial_backoff_s=0.001
        )
        self.router.initialize_state(**arguments)
        self.use(names)

    def use(self, names: str) -> None:
        self.router.update_replicas([self._replica(name) for name in names])

    def _replica(self, name: str) -> RunningReplica:
        async def queue_len(deadline_s: float) -> int:
            return 10 if name in self.full else 0

        async def routing_stats() -> dict[str, Any]:
            self.asked.append(name)
            told = self.told.get(name)
            if told is None:
                await asyncio.sleep(60)
            if isinstance(told, Exception):
                raise told
            return told or {}

        replica = SimpleNamespace(
            _actor_handle=SimpleNamespace(record_routing_stats=SimpleNamespace(remote=routing_stats)),
            replica_id=ReplicaID(name, ENCODER),
            max_ongoing_requests=10,
            replica_metadata=({} if name in self.other_version else version_metadata())
            | {key: told[name] for key, told in ((IDENTITY, self.identities), (HOST, self.hosts)) if name in told},
            get_queue_len=queue_len,
        )
        return cast(RunningReplica, replica)

    def pending(self, label: str, request: str = "request") -> PendingRequest:
        metadata = RequestMetadata(request_id=request, internal_request_id=request, session_id=label)
        return PendingRequest(args=[], kwargs={}, metadata=metadata)

    def ask(self, label: str, request: str = "request") -> asyncio.Task[RunningReplica]:
        return asyncio.create_task(self.router._choose_replica_for_request(self.pending(label, request)))

    async def choose(self, call: Call, request: str = "request") -> str:
        """As Serve's `choose_replica` does without a reservation."""
        pending = self.pending(dataclasses.replace(call, only_choose=True).to_session_id(), request)
        found = self.router._choose_replicas_with_backoff(pending)
        try:
            return (await anext(found))[0].replica_id.unique_id
        finally:
            await found.aclose()

    async def chosen(self, call: Call, request: str = "request") -> str:
        return (await self.ask(call.to_session_id(), request)).replica_id.unique_id

    def end(self, name: str, request: str = "request") -> None:
        self.router.on_request_completed(ReplicaID(name, ENCODER), request)

    def load(self, names: str) -> list[int]:
        return [self.router._affinity.load(name) for name in names]


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


def busy(tokens: int, *keys: str) -> dict[str, Any]:
    return {PENDING_TOKENS: tokens, CONVERSATIONS: b"".join(bytes.fromhex(key)[:PREFIX_BYTES] for key in keys)}
