"""The store of responses: its bound in bytes, equal items, expiry and tenants."""

from __future__ import annotations

import asyncio
import json
import secrets
import tracemalloc
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.ingress.responses.store import (
    ITEM_OVERHEAD_BYTES,
    REFERENCE_BYTES,
    RESPONSE_OVERHEAD_BYTES,
    ResponseStore,
)
from deployments.telemetry.metrics import Counter, Counters

TTL_S = 100.0
RESPONSE = b'{"id": "resp"}'


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def done(call: Coroutine[Any, Any, Any]) -> Any:
    """The result of a method that waits for nothing."""
    try:
        call.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waits")


def put(
    store: ResponseStore, name: str, *items: bytes, tenant: str = "t", previous: str | None = None, output: bytes = b""
) -> bool:
    begun = done(store.put(tenant, name, previous, items))
    return bool(begun and done(store.complete(tenant, name, RESPONSE, [output] if output else [])))


def found(store: ResponseStore, *names: str, tenant: str = "t") -> list[bool]:
    return [done(store.get(tenant, name)) is not None for name in names]


@pytest.fixture
def evicted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reasons of evictions."""
    reasons: list[str] = []

    def add(_: Counters, counter: Counter, number: int = 1, **labels: str) -> None:
        assert counter is Counter.RESPONSES_EVICTED
        reasons.append(labels["reason"])

    monkeypatch.setattr(Counters, "add", add)
    return reasons


def test_a_conversation_is_its_turns_items() -> None:
    store = ResponseStore(10**6, TTL_S)
    assert put(store, "a", b"1", output=b"2")
    assert put(store, "b", b"3", previous="a", output=b"4")
    assert done(store.conversation("t", "b")) == [b"1", b"2", b"3", b"4"]
    assert done(store.input_items("t", "b")) == [b"1", b"2", b"3"]
    assert done(store.get("t", "b")) == RESPONSE


@pytest.mark.parametrize("sent_whole", [False, True])
def test_an_image_is_stored_once_however_many_turns_have_it(sent_whole: bool) -> None:
    """Whether a client names the previous response or sends every item again."""
    image, turns = bytes(100_000), 50
    store = ResponseStore(10**7, TTL_S)
    assert put(store, "0", image)
    for turn in range(1, turns):
        own = (image, *(b"%d" % number for number in range(1, turn + 1))) if sent_whole else (b"%d" % turn,)
        assert put(store, str(turn), *own, previous=None if sent_whole else str(turn - 1))
    assert len(done(store.conversation("t", str(turns - 1)))) == turns
    assert store.num_bytes < len(image) * 2


def test_items_of_tenants_are_apart() -> None:
    store = ResponseStore(10**6, TTL_S)
    put(store, "a", b"x" * 1000)
    before = store.num_bytes
    put(store, "a", b"x" * 1000, tenant="u")
    assert store.num_bytes == 2 * before
    assert done(store.delete("u", "a"))
    assert found(store, "a") == [True]
    assert store.num_bytes == before


def test_the_least_recently_used_is_evicted_first(evicted: list[str]) -> None:
    one = RESPONSE_OVERHEAD_BYTES + len(RESPONSE) + 1000 + ITEM_OVERHEAD_BYTES + REFERENCE_BYTES
    store = ResponseStore(3 * one, TTL_S)
    for name in "abc":
        put(store, name, name.encode() * 1000)
    assert found(store, "a") == [True]
    put(store, "d", b"d" * 1000)
    assert found(store, *"abcd") == [True, False, True, True]
    assert evicted == ["bytes"]
    assert store.num_bytes == 3 * one


def test_what_is_larger_than_the_store_evicts_nothing_else(evicted: list[str]) -> None:
    store = ResponseStore(10_000, TTL_S)
    put(store, "a", b"x")
    assert not put(store, "b", bytes(10_000))
    assert not put(store, "c", b"x", output=bytes(10_000))
    assert found(store, *"abc") == [True, False, False]
    assert evicted == ["too_large"] * 2


def test_an_item_that_a_response_has_often_counts_once_for_its_bound(evicted: list[str]) -> None:
    """A conversation with the same image in each turn was too large for the store that held it."""
    store = ResponseStore(100_000, TTL_S)
    image, previous = b"i" * 20_000, None
    for turn in range(8):
        assert put(store, str(turn), image, b"%d" % turn, previous=previous)
        previous = str(turn)
    assert found(store, "0", "7") == [True, True]
    assert store.num_bytes < 40_000
    assert evicted == []


def test_expiry_counts_from_the_last_use(evicted: list[str]) -> None:
    store = ResponseStore(10**6, TTL_S, clock := Clock())
    put(store, "a", b"1")
    put(store, "b", b"2")
    clock.now = TTL_S / 2
    assert found(store, "a") == [True]
    clock.now = TTL_S
    assert found(store, "a", "b") == [True, False]
    clock.now = 3 * TTL_S
    done(store.check_health())
    assert store.num_bytes == 0
    assert evicted == ["expired"] * 2


def test_a_response_without_an_end_is_not_found() -> None:
    store = ResponseStore(10**6, TTL_S)
    done(store.put("t", "a", None, [b"1"]))
    assert found(store, "a") == [False]
    assert done(store.conversation("t", "a")) is None
    assert not done(store.delete("t", "a"))
    assert not done(store.put("t", "b", "a", [b"2"]))
    assert not done(store.complete("t", "b", RESPONSE, []))


def test_what_will_not_be_complete_is_discarded() -> None:
    """It could be neither found nor deleted, but was kept until it expired."""
    store = ResponseStore(10**6, TTL_S)
    assert put(store, "a", b"1", output=b"2")
    num_bytes = store.num_bytes
    assert done(store.put("t", "b", "a", [b"3"]))
    for name in ("a", "b", "b", "c"):
        done(store.discard("t", name))
    assert store.num_bytes == num_bytes
    assert found(store, "a", "b") == [True, False]


def test_the_memory_of_many_small_responses_is_within_the_bound() -> None:
    """What Python needs around a few bytes is many times as much."""
    bound = 4_000_000
    store = ResponseStore(bound, TTL_S)
    tracemalloc.start()
    try:
        for number in range(6000):
            put(store, f"resp_{secrets.token_hex(16)}", b"%d" % number, tenant=secrets.token_hex(32), output=b"x")
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bound * 0.9 < store.num_bytes <= bound
    assert used < bound


class Stores(RuleBasedStateMachine):
    """Against a model without a bound: what is found is right, and bytes are those of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(20_000, TTL_S, Clock())
        self.known: dict[tuple[str, str], list[bytes]] = {}
        self.names = 0

    @rule(
        tenant=st.sampled_from("tu"),
        items=st.lists(st.sampled_from([b"a", b"b" * 300, b"c" * 3000]), max_size=4),
        previous=st.integers(0, 30),
        ends=st.booleans(),
    )
    def puts(self, tenant: str, items: list[bytes], previous: int, ends: bool) -> None:
        name, self.names = str(self.names), self.names + 1
        before = str(previous) if done(self.store.get(tenant, str(previous))) else None
        earlier = self.known[tenant, before] if before else []
        if done(self.store.put(tenant, name, before, items)) and ends:
            output = json.dumps(name).encode()
            if done(self.store.complete(tenant, name, RESPONSE, [output])):
                self.known[tenant, name] = [*earlier, *items, output]

    @rule(tenant=st.sampled_from("tu"), number=st.integers(0, 30))
    def deletes(self, tenant: str, number: int) -> None:
        there = done(self.store.get(tenant, str(number))) is not None
        assert done(self.store.delete(tenant, str(number))) == there
        self.known.pop((tenant, str(number)), None)

    @rule(tenant=st.sampled_from("tu"), number=st.integers(0, 30))
    def discards(self, tenant: str, number: int) -> None:
        done(self.store.discard(tenant, str(number)))

    @rule(seconds=st.sampled_from([1.0, 40.0, 150.0]))
    def passes(self, seconds: float) -> None:
        self.store._clock.now += seconds  # type: ignore[attr-defined]

    @invariant()
    def holds(self) -> None:
        store = self.store
        for (tenant, name), stored in list(store._responses.items()):
            if stored.response is not None:
                assert [item.key[1] for item in (*stored.input, *stored.output)] == self.known[tenant, name]
        entries = [(item, each) for each in store._responses.values() for item in (*each.input, *each.output)]
        assert {item.key for item, _ in entries} == store._items.keys()
        expected = sum(RESPONSE_OVERHEAD_BYTES + len(each.response or b"") for each in store._responses.values())
        expected += sum(len(key[1]) + ITEM_OVERHEAD_BYTES for key in store._items) + REFERENCE_BYTES * len(entries)
        assert store.num_bytes == expected <= 20_000


TestStores = Stores.TestCase


def test_methods_wait_for_nothing() -> None:
    """They run one after the other on the replica's event loop only because of that."""
    store = ResponseStore(10**6, TTL_S)
    assert put(store, "a", b"1")
    assert asyncio.run(store.get("t", "a")) == RESPONSE
