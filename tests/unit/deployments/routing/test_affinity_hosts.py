"""Where calls go among several hosts: near their reader first, and to the chosen replica."""

from __future__ import annotations

import dataclasses

from deployments.routing.affinity import (
    Affinity,
    Call,
)
from tests.unit.deployments.routing.affinities import KEYS, begun


def on_two_hosts() -> Affinity:
    """Replicas `a` and `b` on the host "one", `c` and `d` on "two"; with names that end alike in other respects."""
    made = Affinity()
    made.set_replicas("abcd", hosts={"a": "one", "b": "one", "c": "two", "d": "two"})
    return made


def test_replicas_of_the_calls_host_go_first_in_the_keys_order() -> None:
    affinity = on_two_hosts()
    for key in KEYS:
        home = affinity.candidates(Call(key))
        near = affinity.candidates(Call(key, host="two"))
        assert near == sorted(home, key=lambda name: name in "ab"), "then the key's home among all"
        assert affinity.candidates(Call(key, host="a third")) == home
    on_one = {affinity.candidates(Call(key, host="one"))[0] for key in KEYS}
    assert on_one == set("ab")


def test_what_a_host_has_no_room_for_goes_to_the_keys_home_among_all() -> None:
    affinity = on_two_hosts()
    for name in "cd":
        begun(affinity, name, Call(weight=100))
    home = next(name for name in affinity.candidates(Call(KEYS[0])) if name in "ab")
    found = affinity.candidates(Call(KEYS[0], 10, host="two"))
    assert found[0] == home
    assert affinity.is_spill(home, Call(KEYS[0], 10, host="two"))
    assert not affinity.is_spill(home, Call(KEYS[0], 10, host="one"))


def test_a_call_without_weight_is_never_spilled() -> None:
    """It asks a busy encoder for what it has. The bound without a free call sent it to an idle one, which encoded the
    image again."""
    affinity = on_two_hosts()
    for name in "cd":
        begun(affinity, name, Call(weight=100))
    assert affinity.candidates(Call(KEYS[0], 0, host="two"))[0] in "cd"


def test_a_failed_replica_goes_last_though_it_is_alone_on_the_host() -> None:
    affinity = Affinity()
    affinity.set_replicas("ab", hosts={"a": "one", "b": "two"})
    affinity.end(begun(affinity, "a", Call(KEYS[0], host="one")))
    assert affinity.candidates(Call(KEYS[0], attempt=1, host="one")) == ["b", "a"]


def test_the_chosen_one_goes_first_and_past_the_bound() -> None:
    """It was within the bound as it was chosen. Where it has gone, or has another identity, others take the call."""
    affinity = on_two_hosts()
    begun(affinity, "c", Call(weight=100))
    call = Call(KEYS[0], host="two", replica="c")
    assert affinity.candidates(call)[:2] == ["c", "d"]
    assert affinity.begin("c", call) is not None
    affinity.set_replicas("ab", hosts={"a": "one", "b": "one"})
    assert affinity.candidates(call) == affinity.candidates(Call(KEYS[0]))
    affinity.set_replicas("abc", {"a": "old", "b": "old", "c": "new"})
    assert "c" not in affinity.candidates(dataclasses.replace(call, identity="old"))


def test_a_refused_call_goes_to_the_next_of_the_host_then_to_the_home_among_all() -> None:
    affinity = on_two_hosts()
    for key in KEYS[:40]:
        call = Call(key, 10, host="two")
        first, second, *others = affinity.rank(call)
        call = dataclasses.replace(call, refused_by=(first,))
        assert affinity.candidates(call)[0] == second
        assert affinity.candidates(call)[-1] == first, "if no other takes it"
        call = dataclasses.replace(call, refused_by=(first, second))
        assert affinity.candidates(call)[:2] == others
        assert set(affinity.candidates(call)[2:]) == {first, second}
        call = dataclasses.replace(call, refused_by=tuple("abcd"))
        assert affinity.candidates(call) == affinity.rank(Call(key)), "one must take it"


def test_a_refused_retry_returns_to_who_refused_it_before_who_failed_it() -> None:
    affinity = on_two_hosts()
    key = KEYS[0]
    failed = begun(affinity, affinity.rank(Call(key))[0], Call(key)).name
    busy, *others = affinity.rank(Call(key, attempt=1))[:-1]
    assert affinity.rank(Call(key, attempt=1))[-1] == failed
    assert affinity.candidates(Call(key, attempt=1, refused_by=(busy,))) == [*others, busy, failed]


def test_a_refused_call_exceeds_the_bound_rather_than_return() -> None:
    affinity = on_two_hosts()
    for name in "bcd":
        begun(affinity, name, Call(weight=1000))
    candidates = affinity.candidates(Call(KEYS[0], 1, refused_by=("a",)))
    assert (set(candidates[:3]), candidates[3:]) == (set("bcd"), ["a"])


def test_a_call_is_refusable_while_another_can_take_it() -> None:
    affinity = on_two_hosts()
    assert [affinity.is_refusable(Call(KEYS[0], refused_by=tuple("abc"[:n]))) for n in range(4)] == [True] * 2 + [
        False
    ] * 2
    affinity.set_replicas("ab", {"a": "old", "b": "new"})
    assert affinity.is_refusable(Call(KEYS[0]))
    assert not affinity.is_refusable(Call(KEYS[0], refused_by=("a",)))
    assert not affinity.is_refusable(Call(KEYS[0], identity="old"))
