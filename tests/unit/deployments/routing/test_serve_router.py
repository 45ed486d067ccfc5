"""The router as Serve's own code drives it, with replicas that are stand-ins: each call gets its own, and ends once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.serve.request_router import ReplicaID

from deployments.common.replica_errors import EngineDeadError, IdentityGoneError, VersionGoneError
from deployments.routing.affinity import Call
from deployments.telemetry.metrics import Counter, Counters
from tests.unit.deployments.routing.router_fleet import ENCODER, KEYS, Fleet, busy, run


def test_calls_of_one_request_each_get_their_own_replica() -> None:
    """Serve finds a call by the request's id, which they share: they were mixed up, and some never got one."""

    async def scenario() -> None:
        alone, fleet = Fleet("abc"), Fleet("abc", load_factor=100)
        homes = []
        for key in KEYS:
            homes.append(await alone.chosen(Call(key)))
            alone.end(homes[-1])
        tasks = [fleet.ask(Call(key).to_session_id()) for key in KEYS]
        found = [replica.replica_id.unique_id for replica in await asyncio.gather(*tasks)]
        assert found == homes
        assert len(set(found)) == 3
        assert sum(fleet.load("abc")) == len(KEYS)
        for name in found:
            fleet.end(name)
        assert fleet.load("abc") == [0, 0, 0]
        assert not fleet.router._active

    run(scenario)


def test_calls_that_come_at_once_keep_the_bound() -> None:
    async def scenario() -> None:
        fleet = Fleet("abcd")
        await asyncio.gather(
            *[fleet.ask(Call(KEYS[0], attempt=1).to_session_id(), str(number)) for number in range(40)]
        )
        assert sum(fleet.load("abcd")) == 40
        assert max(fleet.load("abcd")) <= 1.25 * 40 / 4 + 1

    run(scenario)


def test_replicas_with_another_version_of_the_messages_get_no_calls() -> None:
    async def scenario() -> None:
        fleet = Fleet("abcd")
        fleet.other_version = "abd"
        fleet.use("abcd")
        assert {await fleet.chosen(Call(key)) for key in KEYS} == {"c"}
        assert [one.replica_id.unique_id for one in fleet.router.known_replicas] == list("abcd")
        fleet.use("")
        waiting = fleet.ask(Call(KEYS[0]).to_session_id(), "waiting")
        await asyncio.wait([waiting], timeout=0.1)
        assert not waiting.done()
        fleet.use("abd")
        for call in (waiting, fleet.ask(Call(KEYS[0]).to_session_id(), "late")):
            with pytest.raises(VersionGoneError):
                await asyncio.wait_for(call, 5)
        fleet.use("cd")
        assert await fleet.chosen(Call(KEYS[0])) == "c"
        # A new one waits for the first replica of its version.
        new = Fleet("")
        new.other_version = "abd"
        new.use("abd")
        waiting = new.ask(Call(KEYS[0]).to_session_id(), "first")
        await asyncio.wait([waiting], timeout=0.1)
        assert not waiting.done()
        new.use("abcd")
        assert (await waiting).replica_id.unique_id == "c"

    run(scenario)


def test_a_refused_call_goes_elsewhere_until_it_may_not_be_refused_again() -> None:
    async def scenario() -> None:
        fleet = Fleet("abcd", load_factor=100, refusable=True)
        pending = fleet.pending(Call(KEYS[0], 100, cost=100).to_session_id())
        ranked = fleet.router._affinity.rank(Call(KEYS[0]))
        asked, refusable = [], []
        for _ in range(3):
            name = (await fleet.router._choose_replica_for_request(pending)).replica_id.unique_id
            asked.append(name)
            refusable.append(Call.from_session_id(pending.metadata.session_id).refusable)
            fleet.router.on_rejected(pending, name)
            fleet.end(name)
            pending.reset_future()
        assert asked == ranked[:3]
        assert refusable == [True, True, False]
        assert Call.from_session_id(pending.metadata.session_id).refused_by == tuple(ranked[:2])
        assert fleet.load("abcd") == [0, 0, 0, 0]

    run(scenario)


@pytest.mark.parametrize(
    ("names", "call"),
    [
        ("abc", Call(KEYS[0], 100)),  # a chunk of a video, or its plan
        ("abc", Call(None, 100, cost=100)),
        ("a", Call(KEYS[0], 100, cost=100)),
    ],
)
def test_a_call_that_may_not_be_refused(names: str, call: Call) -> None:
    """Without a cost or a key, or with nobody else to take it. A replica that rejects it is full, and asked again."""

    async def scenario() -> None:
        fleet = Fleet(names, refusable=True)
        pending = fleet.pending(call.to_session_id())
        name = (await fleet.router._choose_replica_for_request(pending)).replica_id.unique_id
        assert not Call.from_session_id(pending.metadata.session_id).refusable
        fleet.router.on_rejected(pending, name)
        assert Call.from_session_id(pending.metadata.session_id).refused_by == ()

    run(scenario)


def test_a_full_replica_is_passed_by_and_one_that_died_is_forgotten() -> None:
    async def scenario() -> None:
        fleet = Fleet("abc", load_factor=100)
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


def test_a_replica_that_has_failed_gets_no_more_calls() -> None:
    """Serve's controller has it among those that run until its health checks have failed some times."""

    async def scenario() -> None:
        fleet = Fleet("ab")
        home = await fleet.chosen(Call(KEYS[0]))
        fleet.end(home)
        (other,) = set("ab") - {home}
        fleet.router.exclude(home)
        fleet.router.exclude("a stranger")
        for _ in range(2):
            assert await fleet.chosen(Call(KEYS[0])) == other
            fleet.use("ab")
        fleet.use(other)
        assert fleet.router._excluded == set()

    run(scenario)


@pytest.mark.parametrize("by_key", [True, False])
def test_a_call_reaches_replicas_of_its_identity_alone(by_key: bool) -> None:
    """A replica with other numerics refused every job, and had least to do: it drew the jobs of all the others."""

    async def scenario() -> None:
        fleet = Fleet("", by_key=by_key)
        fleet.identities = {"a": "eager", "b": "fused", "c": "fused", "d": "fused"}
        fleet.use("abcd")
        chosen = [await fleet.chosen(Call(key, identity="fused"), key) for key in KEYS]
        assert set(chosen) == set("bcd")
        assert await fleet.chosen(Call(KEYS[0], identity="eager")) == "a"
        assert await fleet.chosen(Call(), "any") == "a"

    run(scenario)


def test_a_replica_whose_engine_is_dead_when_asked_gets_no_more_calls() -> None:
    """It had nothing to do, and so was the best choice."""

    async def scenario() -> None:
        fleet = Fleet("ab", probe_min_cost=1000)
        fleet.told = {"a": busy(500), "b": EngineDeadError("b", False)}
        assert await fleet.chosen(Call(KEYS[0], cost=1000), "1") == "a"
        assert fleet.router._excluded == {ReplicaID("b", ENCODER)}

    run(scenario)


def test_a_call_whose_identity_no_replica_has_any_more_fails_at_once() -> None:
    """It waited for a replica of its identity until the deadline. While no replica runs it waits for the first."""

    async def scenario() -> None:
        fleet = Fleet("")
        fleet.identities = {"a": "old", "b": "new"}
        early = fleet.ask(Call(KEYS[0], identity="old").to_session_id())
        await asyncio.sleep(0)
        fleet.use("ab")
        assert (await early).replica_id.unique_id == "a"
        fleet.full.add("a")
        fleet.router.on_new_queue_len_info(ReplicaID("a", ENCODER), 10)
        waiting = fleet.ask(Call(KEYS[1], identity="old").to_session_id())
        while not fleet.router._pending_requests_to_fulfill:  # noqa: ASYNC110  # Serve has no event for it
            await asyncio.sleep(0)
        fleet.use("b")
        for call in (waiting, fleet.ask(Call(KEYS[2], identity="old").to_session_id())):
            with pytest.raises(IdentityGoneError):
                await call
        assert not fleet.router._pending_requests_by_id
        while fleet.router._routing_tasks:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.001)

    run(scenario)


@pytest.mark.parametrize("steps", range(8))
def test_a_call_that_is_given_up_is_not_counted_for_ever(steps: int) -> None:
    """At whichever moment, that included at which it has got its replica and has not heard of it."""

    async def scenario() -> None:
        fleet = Fleet("ab")
        task = fleet.ask(Call(KEYS[0], 70).to_session_id())
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


def test_a_long_prompt_goes_where_it_is_read_first_whoever_sent_the_rest() -> None:
    async def scenario() -> None:
        fleet = Fleet("abc", probe_min_cost=1000)
        fleet.told = {"a": busy(9000), "b": busy(500), "c": busy(8000)}
        found = [await fleet.chosen(Call(key, cost=1000), key) for key in KEYS[:8]]
        assert found == ["b"] * 8, "the bound is over what is sent from here, and does not count"
        assert sorted(fleet.asked) == sorted("abc" * 8)
        for key in KEYS[:8]:
            fleet.end("b", key)
        assert fleet.load("abc") == [0, 0, 0]

    run(scenario)


def test_replicas_of_other_hosts_are_probed_and_chosen_if_they_make_up_for_what_they_lack() -> None:
    async def scenario() -> None:
        fleet = Fleet("", probe_min_cost=1000)
        fleet.hosts = {name: "x" if name in "abcd" else "y" for name in "abcdefg"}
        fleet.use("abcdefg")
        near = fleet.hosts[fleet.router._affinity.rank(Call(KEYS[0]))[0]]
        for name, host in fleet.hosts.items():
            fleet.told[name] = busy(500 if host == near else 0)
        chosen = await fleet.chosen(Call(KEYS[0], cost=1000, leaving_cost=600), "1")
        assert fleet.hosts[chosen] == near
        assert sorted(fleet.hosts[name] == near for name in fleet.asked) == [False, False, True, True, True]
        assert fleet.hosts[await fleet.chosen(Call(KEYS[0], cost=1000, leaving_cost=400), "2")] != near

    run(scenario)


def test_a_prefix_that_is_there_is_not_read_again() -> None:
    async def scenario() -> None:
        fleet = Fleet("abc", probe_min_cost=1000)
        fleet.told = {"a": busy(4000, KEYS[0]), "b": busy(500), "c": busy(600)}
        assert await fleet.chosen(Call(KEYS[0], cost=3000), "1") == "b", "sooner read anew"
        assert await fleet.chosen(Call(KEYS[0], cost=3600), "2") == "a"
        assert await fleet.chosen(Call(KEYS[1], cost=3600), "3") == "b"

    run(scenario)


def test_nobody_is_asked_for_what_is_short_or_tried_before_or_alone() -> None:
    async def scenario() -> None:
        fleet = Fleet("ab", probe_min_cost=1000)
        for number, call in enumerate([Call(KEYS[0], cost=999), Call(KEYS[0], cost=9999, attempt=1)]):
            await fleet.chosen(call, str(number))
        never = Fleet("ab")
        await never.chosen(Call(KEYS[0], cost=10**6))
        alone = Fleet("a", probe_min_cost=1000)
        assert await alone.chosen(Call(KEYS[0], cost=9999)) == "a"
        assert fleet.asked == never.asked == alone.asked == []

    run(scenario)


@pytest.mark.parametrize("silent", [None, RuntimeError("gone"), {}])
def test_who_does_not_tell_is_left_out_and_counted(silent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[Counter, int, str]] = []

    def add(_: Counters, count: Counter, number: int = 1, *, target: str = "") -> None:
        if number:
            counted.append((count, number, target))

    monkeypatch.setattr(Counters, "add", add)

    async def scenario() -> None:
        fleet = Fleet("abc", probe_min_cost=1000)
        fleet.told = {"a": silent, "b": busy(500), "c": silent}
        assert await fleet.chosen(Call(KEYS[0], cost=1000), "1") == "b"
        fleet.told["b"] = silent
        began = asyncio.get_running_loop().time()
        assert await fleet.chosen(Call(KEYS[0], cost=1000), "2") in "abc", "as one that nobody is asked for"
        assert asyncio.get_running_loop().time() - began < 5

    run(scenario)
    assert counted == (
        []
        if silent == {}
        else [(Counter.LOAD_PROBE_TIMEOUTS, 2, "Encoder"), (Counter.LOAD_PROBE_TIMEOUTS, 3, "Encoder")]
    )


def test_where_those_that_told_are_full_another_takes_it() -> None:
    async def scenario() -> None:
        fleet = Fleet("abcd", probe_min_cost=1000)
        fleet.told = {name: busy(500) for name in "abcd"}
        await fleet.chosen(Call(KEYS[0], cost=1000), "1")
        fleet.full |= set(fleet.asked)
        for name in fleet.asked:
            fleet.router.on_new_queue_len_info(ReplicaID(name, ENCODER), 10)
        (fourth,) = set("abcd") - set(fleet.asked)
        assert await fleet.chosen(Call(KEYS[0], cost=1000), "2") == fourth

    run(scenario)
