"""Choices of a replica before its call, by the router as Serve's own code drives it."""

from __future__ import annotations

import asyncio

import pytest
from ray.serve.request_router import ReplicaID

from deployments.common.replica_errors import IdentityGoneError
from deployments.routing import choices
from deployments.routing.affinity import Call
from deployments.telemetry.metrics import Counter, Counters
from tests.unit.deployments.routing.router_fleet import ENCODER, KEYS, Fleet, busy, run


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Counter]:
    found: list[Counter] = []
    monkeypatch.setattr(Counters, "add", lambda _, count, number=1, **labels: found.extend(int(number) * [count]))
    return found


def test_what_chooses_at_once_is_spread_and_called_where_it_was_chosen(counted: list[Counter]) -> None:
    """A choice that did not count sent all that chose before the first call to one replica, and the bound sent their
    calls to others: 249 of 400 were called where they had been chosen."""

    async def scenario() -> None:
        fleet = Fleet("abcd")
        requests = [str(number) for number in range(40)]
        found = await asyncio.gather(*(fleet.choose(Call(KEYS[0]), request) for request in requests))
        assert max(fleet.load("abcd")) <= 40 / 4 + 3
        assert sum(fleet.load("abcd")) == 40
        calls = [Call(KEYS[0], replica=name) for name in found]
        assert await asyncio.gather(*map(fleet.chosen, calls, requests)) == found
        assert sum(fleet.load("abcd")) == 40, "each counts once"
        for name, request in zip(found, requests, strict=True):
            fleet.end(name, request)
        assert fleet.load("abcd") == [0, 0, 0, 0]

    run(scenario)
    assert Counter.CHOICES_NOT_CALLED not in counted
    assert counted.count(Counter.AFFINITY_SPILLS) > 0, "counted as they choose"


def test_where_the_chosen_one_is_full_or_lost_another_of_its_host_takes_the_call(counted: list[Counter]) -> None:
    async def scenario() -> None:
        fleet = Fleet("a", load_factor=100)
        fleet.hosts = {"a": "one", "b": "one", "c": "two"}
        for request in "12":
            assert await fleet.choose(Call(KEYS[0]), request) == "a"
        fleet.use("abc")
        call = Call(KEYS[0], host="one", replica="a")
        fleet.full.add("a")
        fleet.router.on_new_queue_len_info(ReplicaID("a", ENCODER), 10)
        assert await fleet.chosen(call, "1") == "b"
        fleet.router.on_replica_actor_died(ReplicaID("a", ENCODER))
        assert await fleet.chosen(call, "2") == "b"
        fleet.router.on_replica_actor_died(ReplicaID("b", ENCODER))
        assert await fleet.chosen(call, "3") == "c"
        assert fleet.load("c") == [1]

    run(scenario)
    assert counted.count(Counter.CHOICES_NOT_CALLED) == 2


def test_another_choice_of_a_request_ends_the_one_before(counted: list[Counter]) -> None:
    async def scenario() -> None:
        fleet = Fleet("ab")
        for _ in range(3):
            await fleet.choose(Call(KEYS[0]))
        assert sum(fleet.load("ab")) == 1

    run(scenario)
    assert counted == 2 * [Counter.CHOICES_NOT_CALLED]


def test_a_choice_that_is_not_called_ends_and_is_counted(
    counted: list[Counter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "CHOICE_TIMEOUT_S", 0.0)

    async def scenario() -> None:
        fleet = Fleet("ab")
        first, _ = [await fleet.choose(Call(KEYS[0]), request) for request in "12"]
        assert fleet.load(first) == [1], "the first one has ended"
        other = ({"a", "b"} - {await fleet.chosen(Call(KEYS[0], replica=first), "2")}).pop()
        assert sorted(fleet.load("ab")) == [0, 1]
        assert other in "ab"

    run(scenario)
    assert counted == 2 * [Counter.CHOICES_NOT_CALLED]


def test_a_choice_of_a_long_prompt_asks_and_its_call_does_not() -> None:
    async def scenario() -> None:
        fleet = Fleet("abc", probe_min_cost=1000)
        fleet.told = {"a": busy(9000), "b": busy(500), "c": busy(8000)}
        assert await fleet.choose(Call(KEYS[0], cost=1000)) == "b"
        asked = len(fleet.asked)
        assert await fleet.chosen(Call(KEYS[0], cost=1000, replica="b")) == "b"
        assert (asked, len(fleet.asked)) == (3, 3)

    run(scenario)


def test_a_choice_whose_identity_no_replica_has_fails() -> None:
    """Serve asks for no reason: a replica that cannot take the call was chosen."""

    async def scenario() -> None:
        fleet = Fleet("")
        fleet.identities = {"a": "new"}
        fleet.use("a")
        with pytest.raises(IdentityGoneError):
            await fleet.choose(Call(KEYS[0], identity="old"))

    run(scenario)


def test_without_affinity_the_least_loaded_on_the_host_takes_the_call() -> None:
    async def scenario() -> None:
        fleet = Fleet("", by_key=False)
        fleet.hosts = {"a": "one", "b": "two", "c": "two"}
        fleet.use("abc")
        found = [await fleet.chosen(Call(KEYS[0], host="two"), str(number)) for number in range(4)]
        assert sorted(found) == ["b", "b", "c", "c"]

    run(scenario)
