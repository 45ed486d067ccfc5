"""Leases of embeddings beside the scheduler: an engine never finds gone what it has begun with, and nothing stays."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.transfer.header import Header
from deployments.vllm.connector.lease_table import EndedLease, EngineLease, LeaseTable


def digest(number: int) -> str:
    return f"{number:064x}"


def engine_lease(lease: str, number: int = 1) -> EngineLease:
    return EngineLease(lease, "server", 4096, Header(digest(number), "bfloat16", (6, 8)), 0.0)


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable()


def test_a_request_waits_for_all_of_its_embeddings(table: LeaseTable) -> None:
    table.grant(engine_lease("a", 1))
    assert table.reserve("r", [digest(1), digest(2)]) == 1
    assert table.reserve("r", [digest(2), digest(1)]) == 0
    table.grant(engine_lease("b", 2))
    assert table.reserve("r", [digest(1), digest(2)]) == 2
    assert table.reserve("text", []) == 0


def test_a_request_that_waited_in_vain_holds_nothing(table: LeaseTable) -> None:
    table.grant(engine_lease("a", 1))
    assert table.reserve("r", [digest(2), digest(1)]) == 0
    assert table.release("a") == [EndedLease("a", 0)]
    assert table.finish_request("r") == []
    assert len(table._digest_by_lease) == 0


def test_what_a_request_has_begun_with_stays_while_it_waits_for_the_rest(table: LeaseTable) -> None:
    table.grant(engine_lease("a", 1))
    assert table.reserve("r", [digest(1), digest(2)]) == 1
    table.plan_load(digest(1))
    assert table.release("a") == []
    assert table.reserve("r", [digest(1), digest(2)]) == 1
    assert table.finish_request("r") == [EndedLease("a", 1)]
    assert len(table._digest_by_lease) == 0


def test_a_lease_that_is_withdrawn_stays_while_its_request_runs(table: LeaseTable) -> None:
    """The client has gone; the engine hears of it later, and may be in the middle of the prompt."""
    table.grant(engine_lease("a"))
    assert table.reserve("r", [digest(1)])
    assert table.release("a") == []
    assert table.has(digest(1))
    assert table.plan_load(digest(1)) == engine_lease("a")
    assert table.finish_request("r") == [EndedLease("a", 1)]
    assert not table.has(digest(1))
    assert len(table._digest_by_lease) == 0


def test_a_request_that_comes_back_after_preemption_counts_once(table: LeaseTable) -> None:
    table.grant(engine_lease("a"))
    for _ in range(3):
        assert table.reserve("r", [digest(1)])
        table.plan_load(digest(1))
    assert table.finish_request("r") == []
    assert table.release("a") == [EndedLease("a", 3)]


def test_requests_share_an_embedding_and_the_last_lease_stays_for_all(table: LeaseTable) -> None:
    table.grant(engine_lease("a"))
    assert table.reserve("first", [digest(1)])
    table.grant(engine_lease("b"))
    assert table.reserve("second", [digest(1)])
    planned = table.plan_load(digest(1))
    assert planned is not None
    assert planned.name == "b"
    assert table.release("a") == [EndedLease("a", 0)], "b serves both"
    assert table.release("b") == []
    assert table.finish_request("second") == []
    assert table.has(digest(1)), "the first one may need it still"
    assert table.finish_request("first") == [EndedLease("b", 1)]


def test_a_lease_does_not_end_between_the_question_for_it_and_the_end_of_the_step(table: LeaseTable) -> None:
    table.grant(engine_lease("a"))
    assert table.pin(digest(1))
    assert not table.pin(digest(2))
    assert table.release("a") == []
    assert table.plan_load(digest(1)) == engine_lease("a")
    assert table.end_step() == [EndedLease("a", 1)]
    assert (len(table._digest_by_lease), table.end_step()) == (0, [])


def test_what_nobody_knows_is_no_error(table: LeaseTable) -> None:
    assert table.release("never given") == []
    assert table.finish_request("never seen") == []
    assert table.plan_load(digest(1)) is None


DIGESTS = st.sampled_from([digest(1), digest(2)])


class Scheduling(RuleBasedStateMachine):
    """vLLM's scheduler, and the listening thread that gives and withdraws leases between any two of its calls.

    A step asks for what a request needs, then plans its loads, then is built. A request that came without its
    embedding takes a lease of its own; one that brings its data may find another request's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.num_leases = 0
        self.open: dict[str, str] = {}
        """Digests of leases whose request runs in the replica."""
        self.ended: list[EndedLease] = []
        self.running: dict[str, str] = {}
        """Digests that requests in the engine came without."""
        self.asked: list[str] = []
        """Digests for which the step has been told that they can be loaded."""
        self.num_planned = 0

    @rule(wanted=DIGESTS)
    def give(self, wanted: str) -> None:
        self.num_leases += 1
        lease = f"lease {self.num_leases:03}"
        self.table.grant(EngineLease(lease, "server", 0, Header(wanted, "bfloat16", (6, 8)), 0.0))
        self.open[lease] = wanted

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[lease]
        self.ended += self.table.release(lease)

    @rule(wanted=DIGESTS, name=st.sampled_from(["r1", "r2", "r3"]))
    def start(self, wanted: str, name: str) -> None:
        if name not in self.running and self.table.reserve(name, [wanted]):
            self.running[name] = wanted

    @rule(wanted=DIGESTS)
    def ask(self, wanted: str) -> None:
        if self.table.pin(wanted):
            self.asked.append(wanted)

    @precondition(lambda self: self.asked)
    @rule()
    def plan_load(self) -> None:
        self._plan_load(self.asked.pop())

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def load_again(self, data: st.DataObject) -> None:
        """After preemption."""
        self._plan_load(data.draw(st.sampled_from(sorted(self.running.values()))))

    def _plan_load(self, wanted: str) -> None:
        planned = self.table.plan_load(wanted)
        assert planned is not None
        assert planned.header.digest == wanted
        self.num_planned += 1

    @rule()
    def build(self) -> None:
        self.asked = []
        self.ended += self.table.end_step()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[name]
        self.ended += self.table.finish_request(name)

    @invariant()
    def what_was_promised_is_there(self) -> None:
        assert all(self.table.has(wanted) for wanted in (*self.running.values(), *self.asked, *self.open.values()))

    @invariant()
    def no_lease_ends_twice_or_before_its_request(self) -> None:
        ended = [each.name for each in self.ended]
        assert len(set(ended)) == len(ended)
        assert not set(ended) & set(self.open)

    def teardown(self) -> None:
        for name in list(self.running):
            self.ended += self.table.finish_request(name)
        for lease in list(self.open):
            self.ended += self.table.release(lease)
        self.ended += self.table.end_step()
        assert len(self.ended) == self.num_leases
        assert sum(each.num_planned for each in self.ended) == self.num_planned
        assert len(self.table._digest_by_lease) == 0


TestScheduling = Scheduling.TestCase
