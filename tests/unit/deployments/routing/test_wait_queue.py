"""Calls that wait for full replicas: places go to those who wait longest, at once, and nobody waits for another's."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from ray.serve.request_router import ReplicaID, RunningReplica

from deployments.common.replica_errors import IdentityGoneError
from deployments.routing.affinity import Call
from tests.unit.deployments.routing.router_fleet import ENCODER, KEYS, Fleet, run

NEVER_S = 600.0


def fleet(names: str, full: str, identities: dict[str, str] | None = None, **arguments: Any) -> Fleet:
    """One whose router never tries again by itself while a call of it is in flight."""
    made = Fleet("", **arguments)
    made.router.update_backoff_params(NEVER_S, None, NEVER_S)
    made.identities, made.full = identities or {}, set(full)
    made.use(names)
    return made


async def waiting(given: Fleet, *calls: Call) -> list[asyncio.Task[RunningReplica]]:
    tasks = []
    for number, call in enumerate(calls):
        tasks.append(given.ask(call.to_session_id(), f"waiting {number}"))
        await asyncio.sleep(0.02)
    assert len(given.router._wait_queue._calls) == min(len(calls), 2 * len(given.router.curr_replicas))
    return tasks


async def ended(tasks: Sequence[asyncio.Task[Any]]) -> list[int]:
    """Returns the numbers of the tasks that have ended after a while."""
    await asyncio.sleep(0.05)
    return [number for number, task in enumerate(tasks) if task.done()]


def test_each_place_lets_one_call_try_in_order() -> None:
    """All that waited were sent to the replica, with their files, and all but one came back."""

    async def scenario() -> None:
        given = fleet("a", "a")
        cache, order = given.router.replica_queue_len_cache, []

        async def call(number: int) -> None:
            await given.router._choose_replica_for_request(given.pending("", f"waiting {number}"))
            order.append(number)
            given.full.add("a")
            cache.update(ReplicaID("a", ENCODER), 10)  # as Serve does when it sends a call

        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(call(number)))
            await asyncio.sleep(0.02)
        given.end("a", "rejected")
        assert await ended(tasks) == [], "there was no place"
        for number in range(5):
            given.full.clear()
            cache.update(ReplicaID("a", ENCODER), 9)
            given.end("a", "other")
            await ended(tasks)
            assert order == list(range(number + 1))
        assert len(given.router._wait_queue._calls) == 0

    run(scenario)


def test_who_comes_waits_behind_those_who_wait() -> None:
    async def scenario() -> None:
        given = fleet("a", "a")
        tasks = await waiting(given, Call(), Call())
        given.full.clear()
        tasks.append(given.ask("", "late"))
        assert await ended(tasks) == []
        given.end("a", "other")
        assert await ended(tasks) == [0, 1, 2]

    run(scenario)


@pytest.mark.parametrize("identity", ["new", ""])
def test_a_place_goes_to_the_oldest_call_that_can_use_it(identity: str) -> None:
    async def scenario() -> None:
        given = fleet("ab", "ab", {"a": "old", "b": "new"})
        tasks = await waiting(given, Call(identity="old"), Call(identity="old"), Call(identity=identity))
        given.full = {"a"}
        given.end("b", "other")
        assert await ended(tasks) == [2]
        with pytest.raises(IdentityGoneError):
            await given.chosen(Call(identity="gone"))
        given.full.clear()
        given.end("a", "other")
        assert await ended(tasks) == [0, 1, 2]

    run(scenario)


def test_a_place_is_not_lost_with_the_call_that_was_to_have_it() -> None:
    async def scenario() -> None:
        given = fleet("a", "a")
        tasks = await waiting(given, Call(), Call())
        given.full.clear()
        given.end("a", "other")
        tasks[0].cancel()
        assert await ended(tasks) == [0, 1]
        assert (tasks[0].cancelled(), tasks[1].cancelled()) == (True, False)

    run(scenario)


def test_a_place_that_becomes_free_during_a_try_is_used() -> None:
    async def scenario() -> None:
        given = fleet("a", "a")

        async def slow_queue_len(deadline_s: float) -> int:
            number = 10 if given.full else 0
            await asyncio.sleep(0.05)
            return number

        replica = given.router.curr_replicas[ReplicaID("a", ENCODER)]
        replica.get_queue_len = slow_queue_len  # type: ignore[method-assign]
        given.router.replica_queue_len_cache.update(replica.replica_id, 10)
        task = given.ask("", "waiting")
        await asyncio.sleep(0.08)  # its second try is under way
        given.full.clear()
        given.end("a", "other")
        assert (await asyncio.wait_for(task, 10)).replica_id.unique_id == "a"

    run(scenario)


def test_a_new_replica_is_used_at_once() -> None:
    async def scenario() -> None:
        given = fleet("a", "a")
        tasks = await waiting(given, Call(), Call())
        given.use("ab")
        assert await ended(tasks) == [0, 1]

    run(scenario)


def test_the_oldest_call_tries_by_itself_often_where_no_call_of_its_router_can_end() -> None:
    """Only calls of other ingresses leave places then."""

    async def scenario() -> None:
        given = fleet("a", "a")
        tasks = await waiting(given, Call())
        given.router.update_backoff_params(0.01, None, NEVER_S)
        tasks[0].cancel()
        tasks = [given.ask("", "quiet"), given.ask("", "quiet too")]
        await asyncio.sleep(0.1)
        given.full.clear()
        assert await ended(tasks) == [0, 1]

    run(scenario)


@pytest.mark.parametrize("full", ["c", "bc"])
def test_a_refused_call_returns_to_who_refused_it_if_no_other_takes_it(full: str) -> None:
    async def scenario() -> None:
        given = fleet("abc", full, refusable=True)
        assert await given.chosen(Call(KEYS[0], 100, cost=100, refused_by=("a", "b"))) in set("ab") - set(full)

    run(scenario)


def test_calls_that_were_assigned_are_not_kept_while_an_older_one_waits() -> None:
    """Serve kept them with their files until the oldest call had a place."""

    class File(bytearray):
        pass

    async def scenario() -> None:
        given = fleet("ab", "a", {"a": "old", "b": "new"})
        tasks = await waiting(given, Call(identity="old"))
        pending = given.pending(Call(identity="new").to_session_id(), "other")
        pending.args = [File(1)]
        kept = weakref.ref(pending.args[0])
        await given.router._choose_replica_for_request(pending)
        del pending
        await asyncio.sleep(0)
        gc.collect()
        assert kept() is None
        assert await ended(tasks) == []

    run(scenario)
