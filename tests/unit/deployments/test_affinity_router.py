"""The router as Serve's own code drives it, with replicas that are stand-ins: each call gets its own, and ends once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from deployments.affinity import Call, published
from deployments.affinity_router import HELD, AffinityRouter

ENCODER = DeploymentID("Encoder", "vitray")
KEYS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(40)]


class Fleet:
    """A router over replicas `a`, `b`, …; `full` names those that take no more."""

    def __init__(self, names: str, **arguments: Any) -> None:
        self.full: set[str] = set()
        self.held: dict[str, bytes] = {}
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

        replica = SimpleNamespace(
            replica_id=ReplicaID(name, ENCODER),
            max_ongoing_requests=10,
            routing_stats={HELD: self.held[name]} if name in self.held else {},
            get_queue_len=queue_len,
        )
        return cast(RunningReplica, replica)

    def ask(self, label: str, request: str = "request") -> asyncio.Task[RunningReplica]:
        metadata = RequestMetadata(request_id=request, internal_request_id=request, session_id=label)
        pending = PendingRequest(args=[], kwargs={}, metadata=metadata)
        return asyncio.create_task(self.router._choose_replica_for_request(pending))

    async def chosen(self, call: Call, request: str = "request") -> str:
        return (await self.ask(call.label(), request)).replica_id.unique_id

    def end(self, name: str, request: str = "request") -> None:
        self.router.on_request_completed(ReplicaID(name, ENCODER), request)

    def load(self, names: str) -> list[int]:
        return [self.router._affinity.load(name) for name in names]


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


def test_calls_of_one_request_each_get_their_own_replica() -> None:
    """Serve finds a call by the request's id, which they share: they were mixed up, and some never got one."""

    async def scenario() -> None:
        alone, fleet = Fleet("abc"), Fleet("abc", load_bound=100)
        homes = []
        for key in KEYS:
            homes.append(await alone.chosen(Call(key)))
            alone.end(homes[-1])
        tasks = [fleet.ask(Call(key).label()) for key in KEYS]
        found = [replica.replica_id.unique_id for replica in await asyncio.gather(*tasks)]
        assert found == homes
        assert len(set(found)) == 3
        assert sum(fleet.load("abc")) == len(KEYS)
        for name in found:
            fleet.end(name)
        assert fleet.load("abc") == [0, 0, 0]
        assert not fleet.router._under_way

    run(scenario)


def test_calls_that_come_at_once_keep_the_bound() -> None:
    async def scenario() -> None:
        fleet = Fleet("abcd")
        await asyncio.gather(*[fleet.ask(Call(KEYS[0], attempt=1).label(), str(number)) for number in range(40)])
        assert sum(fleet.load("abcd")) == 40
        assert max(fleet.load("abcd")) <= 1.25 * 40 / 4 + 1

    run(scenario)


def test_it_follows_what_replicas_report() -> None:
    async def scenario() -> None:
        fleet = Fleet("abc")
        home = await fleet.chosen(Call(KEYS[0]))
        fleet.end(home)
        other = min(set("abc") - {home})
        fleet.held[other] = published([KEYS[0]])
        fleet.use("abc")
        assert await fleet.chosen(Call(KEYS[0]), "another") == other

    run(scenario)


def test_a_full_replica_is_passed_by_and_one_that_died_is_forgotten() -> None:
    async def scenario() -> None:
        fleet = Fleet("abc", load_bound=100)
        home = await fleet.chosen(Call(KEYS[0]))
        fleet.full.add(home)
        fleet.router.on_new_queue_len_info(ReplicaID(home, ENCODER), 10)
        second = await fleet.chosen(Call(KEYS[0]))
        assert second != home
        fleet.router.on_replica_actor_died(ReplicaID(second, ENCODER))
        (third,) = set("abc") - {home, second}
        assert await fleet.chosen(Call(KEYS[0])) == third
        for name in (home, second, third):
            fleet.end(name)
        assert fleet.load(home + third) == [0, 0]

    run(scenario)


@pytest.mark.parametrize("steps", range(8))
def test_a_call_that_is_given_up_is_not_counted_for_ever(steps: int) -> None:
    """At whichever moment, that included at which it has got its replica and has not heard of it."""

    async def scenario() -> None:
        fleet = Fleet("ab")
        task = fleet.ask(Call(KEYS[0], 70).label())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():  # it had got it: Serve tells when it ends
            fleet.end(task.result().replica_id.unique_id)
        assert fleet.load("ab") == [0, 0]
        assert await fleet.chosen(Call(KEYS[0])) in "ab", "others go on"

    run(scenario)


def test_what_names_no_call_goes_to_any_replica() -> None:
    async def scenario() -> None:
        fleet = Fleet("ab")
        found = [await fleet.chosen(Call(), str(number)) for number in range(4)]
        assert sorted(found) == ["a", "a", "b", "b"], "to the one with less to do"
        assert (await fleet.ask("a session of a client's own")).replica_id.unique_id in "ab"

    run(scenario)
