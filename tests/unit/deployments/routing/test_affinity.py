"""Where calls go: where the key went last, else to the key's own replica, and never past the bound.

One file, since single rules are tried on the same few replicas and then, by `Followed`, all of them together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.affinity import (
    FREE_CALLS,
    ActiveCall,
    Affinity,
    Call,
    Work,
)
from tests.unit.deployments.routing.affinities import KEYS, affinity_of, begun

NAMES = st.sets(st.text(st.characters(codec="ascii"), min_size=1, max_size=8), min_size=1, max_size=12)


def homes(affinity: Affinity) -> dict[str, str]:
    return {key: affinity.candidates(Call(key))[0] for key in KEYS}


@given(NAMES, st.text(st.characters(codec="ascii"), min_size=9, max_size=10))
def test_a_replica_that_joins_takes_its_share_and_moves_no_other_key(names: set[str], new: str) -> None:
    before, after = homes(affinity_of(*names)), homes(affinity_of(*names, new))
    assert all(after[key] in (before[key], new) for key in KEYS)
    moved = sum(after[key] == new for key in KEYS) / len(KEYS)
    assert moved == pytest.approx(1 / (len(names) + 1), abs=0.15)


@given(NAMES.filter(lambda names: len(names) > 1))
def test_a_replica_that_leaves_moves_its_own_keys_alone(names: set[str]) -> None:
    gone = max(names)
    before, after = affinity_of(*names), affinity_of(*(names - {gone}))
    for key in KEYS:
        assert after.candidates(Call(key)) == [name for name in before.candidates(Call(key)) if name != gone]


@given(NAMES)
def test_order_is_the_same_for_every_router(names: set[str]) -> None:
    assert homes(affinity_of(*sorted(names))) == homes(affinity_of(*sorted(names, reverse=True)))


def test_keys_are_spread_evenly() -> None:
    counts = Counter(homes(affinity_of(*"abcd")).values())
    assert len(counts) == 4
    assert max(counts.values()) < 1.3 * len(KEYS) / 4


class Followed:
    """An Affinity with loads kept a second time, in exact numbers."""

    def __init__(self, load_factor: Fraction, names: set[str], separate_cache_hits: bool) -> None:
        self.bound = load_factor
        self.affinity = Affinity(load_factor=float(load_factor), separate_cache_hits=separate_cache_hits)
        self.affinity.set_replicas(names)
        self.loads: dict[Work, dict[str, int]] = {work: dict.fromkeys(names, 0) for work in Work}
        self.calls: list[ActiveCall] = []
        self.sent: dict[str, tuple[str, int, str]] = {}
        """Where a key went last, the attempt, and the replica that failed it before."""
        self.separate_cache_hits = separate_cache_hits
        self.gone = ""

    def takes(self, name: str, call: Call, work: Work) -> bool:
        loads = self.loads[work]
        if work is Work.SERVE_CACHED:
            last = self.sent.get(call.key or "", ("",))[0]
            if not (self.separate_cache_hits and last == name != self.failed(call)):
                return False
        mean = Fraction(sum(loads.values()), len(loads))
        bound = max(self.bound * (mean + Fraction(call.weight, len(loads))), mean + FREE_CALLS * call.weight)
        return len(loads) == 1 or loads[name] <= bound

    def taking(self, call: Call) -> set[str]:
        """Who takes the call within the bound; where that is only the one that failed it, all others beyond it."""
        names = set(self.loads[Work.COMPUTE])
        takes = {name for name in names if any(self.takes(name, call, work) for work in Work)}
        failed = {self.failed(call)}
        return takes if takes - failed or not names - failed else names - failed

    def failed(self, call: Call) -> str:
        """The replica that failed the attempt before."""
        last, attempt, before = self.sent.get(call.key or "", ("", 0, ""))
        return (last if attempt < call.attempt else before) if call.attempt else ""

    def send(self, call: Call) -> None:
        failed = self.failed(call)
        found = self.affinity.candidates(call)
        names = self.loads[Work.COMPUTE]
        assert found
        assert set(found) == self.taking(call)
        for name in names.keys() - set(found):
            assert self.affinity.begin(name, call) is None
        work = Work.SERVE_CACHED if self.takes(found[0], call, Work.SERVE_CACHED) else Work.COMPUTE
        begun = self.affinity.begin(found[0], call)
        assert begun == ActiveCall(found[0], call.weight, work)
        self.loads[work][found[0]] += call.weight
        self.calls.append(begun)
        if call.key is not None:
            self.sent[call.key] = (found[0], call.attempt, failed)

    def finish(self, number: int) -> None:
        begun = self.calls.pop(number % len(self.calls))
        self.affinity.end(begun)
        if begun.name in self.loads[begun.work]:
            self.loads[begun.work][begun.name] -= begun.weight

    def exchange(self, gone: str, new: str) -> None:
        """`new` may have been there before, and have calls of then."""
        for work, loads in self.loads.items():
            del loads[gone]
            loads[new] = sum(begun.weight for begun in self.calls if (begun.name, begun.work) == (new, work))
        self.gone = gone
        self.affinity.set_replicas(self.loads[Work.COMPUTE])


@given(
    NAMES,
    st.sampled_from([Fraction(1), Fraction(5, 4), Fraction(2)]),
    st.booleans(),
    st.lists(
        st.one_of(
            st.builds(Call, st.sampled_from([*KEYS[:5], None]), st.integers(1, 5000), st.integers(0, 2)),
            st.integers(0, 100),
            st.sampled_from(["exchange", "return"]),
        ),
        max_size=60,
    ),
)
def test_the_bound_is_never_passed(
    names: set[str], bound: Fraction, separate_cache_hits: bool, steps: list[Call | int | str]
) -> None:
    """While replicas come and go: who is asked has at most the bound times the mean, or
    two calls more than the mean."""
    followed = Followed(bound, names, separate_cache_hits)
    for number, step in enumerate(steps):
        if isinstance(step, Call):
            followed.send(step)
        elif isinstance(step, int) and followed.calls:
            followed.finish(step)
        elif step == "exchange":
            followed.exchange(min(followed.loads[Work.COMPUTE]), f"new replica {number}")
        elif step == "return" and followed.gone:
            followed.exchange(max(followed.loads[Work.COMPUTE]), followed.gone)
    for work, loads in followed.loads.items():
        assert {name: followed.affinity.load(name, work) for name in loads} == loads


def test_replicas_that_return_have_what_is_under_way_there() -> None:
    """Calls of before took their weight from a load that began anew at none. With less than nothing under way
    everywhere, the bound kept every call from every replica."""
    affinity = affinity_of("a", "b")
    calls = [begun(affinity, affinity.candidates(Call(key))[0], Call(key)) for key in KEYS[:40]]
    affinity.set_replicas([])
    affinity.end(calls.pop())
    affinity.set_replicas("ab")
    assert affinity.load("a") + affinity.load("b") == len(calls)
    for call in calls:
        affinity.end(call)
    assert (affinity.load("a"), affinity.load("b")) == (0, 0)
    assert affinity.candidates(Call(KEYS[0])) != []


def test_a_call_goes_to_replicas_of_its_identity_alone_and_the_bound_is_theirs() -> None:
    """Half of the replicas are updated: the mean over all of them would leave a call none that may take it."""
    affinity = affinity_of()
    affinity.set_replicas("abcd", {"a": "old", "b": "old", "c": "new"})
    loads = dict.fromkeys("abcd", 0)
    for key in KEYS:
        call = Call(key, identity="old")
        name = affinity.candidates(call)[0]
        assert set(affinity.rank(call)) == set("ab")
        assert affinity.begin("c", call, bounded=False) is None
        begun(affinity, name, call)
        loads[name] += 1
    assert max(loads.values()) <= 1.25 * len(KEYS) / 2 + 1
    assert loads["c"] == loads["d"] == 0
    assert affinity.candidates(Call(KEYS[0], identity="new")) == ["c"]
    assert not affinity.can_serve(Call(KEYS[0], identity="newer"))
    assert set(affinity.rank(Call())) == set("abcd")


def test_what_a_replica_was_sent_it_gives_beside_its_work() -> None:
    """At the bound of what a replica has to do it still gives; at that of what it has to give, others do the work."""
    affinity = Affinity(separate_cache_hits=True)
    affinity.set_replicas("abcd")
    home, second, *_ = affinity.candidates(Call(KEYS[0]))
    affinity.begin(home, Call(KEYS[0], 1000))
    joins = [affinity.begin(home, Call(KEYS[0], 10)) for _ in range(3)]
    assert joins == 3 * [ActiveCall(home, 10, Work.SERVE_CACHED)]
    assert affinity.candidates(Call(KEYS[0], 10))[0] == second, "it has 30 to give, others nothing"
    for call in joins:
        assert call is not None
        affinity.end(call)
    assert affinity.candidates(Call(KEYS[0], 10))[0] == home


def test_a_replica_over_the_bound_is_passed_by_and_the_next_has_the_key_then() -> None:
    affinity = affinity_of(*"abcd")
    home, second, *_ = affinity.candidates(Call(KEYS[0]))
    busy = begun(affinity, home, Call(KEYS[1], 100))
    assert affinity.candidates(Call(KEYS[0], 10))[0] == second
    assert affinity.is_spill(second, Call(KEYS[0], 10))
    spilled = begun(affinity, second, Call(KEYS[0], 10))
    affinity.end(busy)
    affinity.end(spilled)
    assert affinity.candidates(Call(KEYS[0], 10))[:2] == [second, home], "it was sent there last"
    assert not affinity.is_spill(second, Call(KEYS[0], 10))


def test_what_left_holds_nothing_any_more() -> None:
    affinity = affinity_of(*"abcd")
    home, *others = affinity.candidates(Call(KEYS[0]))
    call = begun(affinity, others[0], Call(KEYS[0]))
    affinity.set_replicas([home, *others[1:]])
    affinity.end(call)
    assert affinity.candidates(Call(KEYS[0])) == [home, *others[1:]]
    affinity.set_replicas([home, *others])
    assert affinity.candidates(Call(KEYS[0]))[0] == others[0], "back again, and it went there last"
    assert affinity.load(others[0]) == 0


@pytest.mark.parametrize("separate_cache_hits", [True, False])
def test_another_try_goes_elsewhere(separate_cache_hits: bool) -> None:
    affinity = affinity_of(*"abc", separate_cache_hits=separate_cache_hits)
    first = affinity.candidates(Call(KEYS[0]))[0]
    affinity.end(begun(affinity, first, Call(KEYS[0])))
    assert affinity.candidates(Call(KEYS[0]))[0] == first
    assert affinity.candidates(Call(KEYS[0], attempt=1))[-1] == first
    affinity.set_replicas([first])
    assert affinity.candidates(Call(KEYS[0], attempt=1)) == [first], "where there is no other"


def test_what_one_replica_failed_does_not_go_back_there_for_its_being_free() -> None:
    """One with a broken GPU fails at once and has nothing to do: the bound sent it all that it had failed, again."""
    affinity = affinity_of(*"ab")
    key = next(key for key in KEYS if affinity.candidates(Call(key))[0] == "a")
    affinity.end(begun(affinity, "a", Call(key)))
    begun(affinity, "b", Call(weight=9))
    assert affinity.candidates(Call(key)) == ["a"]
    assert affinity.candidates(Call(key, attempt=1)) == ["b"]
    begun(affinity, "b", Call(key, attempt=1))
    assert affinity.load("b") == 10


def test_all_calls_of_a_try_go_to_the_same_one() -> None:
    """The chunks of a video share its key. Every second one of another try went back to the replica that fails."""
    affinity = affinity_of(*"abc", separate_cache_hits=True)
    chunk = Call(KEYS[0], 8, sticky=True)
    failing = affinity.candidates(chunk)[0]
    for _ in range(4):
        affinity.end(begun(affinity, failing, chunk))
    avoided = {failing}
    for attempt in (1, 2):
        again = replace(chunk, attempt=attempt)
        found = []
        for _ in range(4):
            found.append(affinity.candidates(again)[0])
            affinity.end(begun(affinity, found[-1], again))
        assert len(set(found)) == 1
        assert found[0] not in avoided
        avoided = {found[0]}


def test_a_sticky_call_goes_where_the_one_before_went_and_is_computed() -> None:
    """Chunks of a video counted as cache hits, and went elsewhere once a replica had many."""
    affinity = affinity_of(*"abc", separate_cache_hits=True)
    chunk = Call(KEYS[0], 100, sticky=True)
    home = affinity.candidates(chunk)[0]
    other = min(set("abc") - {home})
    begun(affinity, home, Call(weight=1000))
    assert affinity.candidates(chunk)[0] != home, "the first goes by load"
    begun(affinity, other, chunk)
    for number in range(2, 8):
        assert affinity.candidates(chunk)[0] == other
        begun(affinity, other, chunk)
        assert (affinity.load(other, Work.COMPUTE), affinity.load(other, Work.SERVE_CACHED)) == (100 * number, 0)
    assert affinity.candidates(replace(chunk, sticky=False))[0] == other, "a cache hit"
    assert affinity.is_spill(home, replace(chunk, key=KEYS[1])) is False


def test_with_few_calls_nothing_spills_for_its_being_the_second() -> None:
    """The mean over 64 replicas is less than one call; what came second or third to its home was sent elsewhere."""
    affinity = affinity_of(*(f"replica {number}" for number in range(64)))
    home = affinity.candidates(Call(KEYS[0]))[0]
    for _ in range(3):
        assert not affinity.is_spill(home, Call(KEYS[0]))
        begun(affinity, home, Call(KEYS[0]))
    assert affinity.candidates(Call(KEYS[0]))[0] != home


def test_without_a_key_the_least_loaded_goes_first() -> None:
    affinity = affinity_of(*"abc", load_factor=3)
    affinity.begin("a", Call(weight=5))
    affinity.begin("b", Call(weight=2))
    assert affinity.candidates(Call(weight=9)) == ["c", "b", "a"]
    assert {affinity_of(*"abc").candidates(Call())[0] for _ in range(100)} == set("abc")


def test_nobody_is_nobody() -> None:
    assert Affinity().candidates(Call(KEYS[0])) == []
    assert Affinity().candidates(Call()) == []
    assert Affinity().begin("a", Call()) is None
    assert not Affinity().is_spill("a", Call())


@given(
    st.builds(
        Call,
        st.none() | st.sampled_from(KEYS),
        st.integers(0),
        st.integers(0),
        leaving_cost=st.integers(0),
        host=st.sampled_from(["", "boot-id/4026531840/0"]),
        replica=st.sampled_from(["", "x1y2z3"]),
        only_choose=st.booleans(),
        refused_by=st.sampled_from([(), ("x1y2z3",), ("x1y2z3", "a")]),
        refusable=st.booleans(),
        sticky=st.booleans(),
    )
)
def test_a_call_survives_its_label(call: Call) -> None:
    assert Call.from_session_id(call.to_session_id()) == call


@pytest.mark.parametrize("label", ["", "session", "zz:1:1", "ab:x:0", "ab:1", "::"])
def test_what_is_no_label_is_a_call_without_a_key(label: str) -> None:
    assert Call.from_session_id(label) == Call()
