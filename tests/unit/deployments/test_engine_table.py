"""Leases of embeddings beside the scheduler: an engine never finds gone what it has begun with, and nothing stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.embedding_header import Header
from deployments.engine_table import Ended, EngineTable, Place


def digest(number: int) -> str:
    return f"{number:064x}"


def place(lease: str, number: int = 1) -> Place:
    return Place(lease, "lender", 4096, Header(digest(number), "bfloat16", (6, 8), (1, 4, 6)), 0.0)


@pytest.fixture
def table() -> EngineTable:
    return EngineTable()


def test_a_request_waits_for_all_of_its_embeddings(table: EngineTable) -> None:
    table.give(place("a", 1))
    assert table.available("r", [digest(1), digest(2)]) == 1
    assert table.available("r", [digest(2), digest(1)]) == 0
    table.give(place("b", 2))
    assert table.available("r", [digest(1), digest(2)]) == 2
    assert table.available("text", []) == 0


def test_a_request_that_waited_in_vain_holds_nothing(table: EngineTable) -> None:
    table.give(place("a", 1))
    assert table.available("r", [digest(2), digest(1)]) == 0
    assert table.withdraw("a") == [Ended("a", 0)]
    assert table.finished("r") == []
    assert len(table) == 0


def test_what_a_request_has_begun_with_stays_while_it_waits_for_the_rest(table: EngineTable) -> None:
    table.give(place("a", 1))
    assert table.available("r", [digest(1), digest(2)]) == 1
    table.load(digest(1))
    assert table.withdraw("a") == []
    assert table.available("r", [digest(1), digest(2)]) == 1
    assert table.finished("r") == [Ended("a", 1)]
    assert len(table) == 0


def test_a_lease_that_is_withdrawn_stays_while_its_request_runs(table: EngineTable) -> None:
    """The client has gone; the engine hears of it later, and may be in the middle of the prompt."""
    table.give(place("a"))
    assert table.available("r", [digest(1)])
    assert table.withdraw("a") == []
    assert table.has(digest(1))
    assert table.load(digest(1)) == place("a")
    assert table.finished("r") == [Ended("a", 1)]
    assert not table.has(digest(1))
    assert len(table) == 0


def test_a_request_that_comes_back_after_preemption_counts_once(table: EngineTable) -> None:
    table.give(place("a"))
    for _ in range(3):
        assert table.available("r", [digest(1)])
        table.load(digest(1))
    assert table.finished("r") == []
    assert table.withdraw("a") == [Ended("a", 3)]


def test_requests_share_an_embedding_and_the_last_lease_stays_for_all(table: EngineTable) -> None:
    table.give(place("a"))
    assert table.available("first", [digest(1)])
    table.give(place("b"))
    assert table.available("second", [digest(1)])
    assert table.load(digest(1)).lease == "b"
    assert table.withdraw("a") == [Ended("a", 0)], "b serves both"
    assert table.withdraw("b") == []
    assert table.finished("second") == []
    assert table.has(digest(1)), "the first one may need it still"
    assert table.finished("first") == [Ended("b", 1)]


def test_what_nobody_knows_is_no_error(table: EngineTable) -> None:
    assert table.withdraw("never given") == []
    assert table.finished("never seen") == []
    with pytest.raises(KeyError):
        table.load(digest(1))


STEPS = st.lists(st.tuples(st.sampled_from(["start", "load", "leave", "finish"]), st.integers(0, 4)), max_size=60)


@given(STEPS)
def test_nothing_is_lost_and_nothing_is_left(steps: list[tuple[str, int]]) -> None:
    """Five requests for two embeddings: each has a lease of its own, runs, and may be left by its client meanwhile."""
    table, running, given_out, withdrawn, ended, loads = EngineTable(), set(), set(), set(), [], 0

    def of(request: int) -> str:
        return digest(request % 2)

    for what, request in [*steps, *[(what, r) for what in ("finish", "leave") for r in range(5)]]:
        lease = f"lease {request}"
        if what == "start" and request not in given_out:
            table.give(place(lease, request % 2))
            given_out.add(request)
            assert table.available(f"request {request}", [of(request)])
            running.add(request)
        elif what == "load" and request in running:
            assert table.load(of(request)).header.digest == of(request)
            loads += 1
        elif what == "leave" and request in given_out - withdrawn:
            ended += table.withdraw(lease)
            withdrawn.add(request)
        elif what == "finish" and request in running:
            ended += table.finished(f"request {request}")
            running.discard(request)
        assert all(table.has(of(each)) for each in running)
    assert sorted(each.lease for each in ended) == [f"lease {request}" for request in sorted(given_out)]
    assert sum(each.num_loads for each in ended) == loads
    assert len(table) == 0
