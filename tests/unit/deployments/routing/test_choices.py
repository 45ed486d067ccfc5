"""What is chosen is load until its call begins, another is chosen or its time is over, and nothing else ever is."""

from __future__ import annotations

import hashlib
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deployments.routing.affinity import ActiveCall, Affinity, Call
from deployments.routing.choices import CHOICE_TIMEOUT_S, Choices

NAMES = "abc"
KEYS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(4)]
REQUESTS = st.integers(0, 4).map(str)


class Chosen(RuleBasedStateMachine):
    """Choices and calls of a router, kept a second time; replicas come and go."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.affinity = Affinity()
        self.affinity.set_replicas(NAMES)
        self.running = set(NAMES)
        self.choices = Choices(self.affinity, clock=lambda: self.now)
        self.chosen: dict[str, tuple[str, int, float]] = {}
        self.calls: list[ActiveCall] = []

    def expire(self, replaced: str | None = None) -> None:
        over = [one for one, (_, _, ends_at) in self.chosen.items() if ends_at <= self.now or one == replaced]
        for request in over:
            del self.chosen[request]
        assert self.choices.expire(replaced) == len(over)

    @rule(request=REQUESTS, key=st.sampled_from(KEYS), weight=st.integers(1, 9), attempt=st.integers(0, 1))
    def choose(self, request: str, key: str, weight: int, attempt: int) -> None:
        self.expire(request)
        call = Call(key, weight, attempt, only_choose=True)
        before = self.affinity.rank(Call(key))
        found = self.affinity.candidates(call)
        if not found:
            return
        self.choices.begin(request, found[0], call)
        self.chosen[request] = found[0], weight, self.now + CHOICE_TIMEOUT_S
        assert self.affinity.rank(Call(key)) == before, "a choice sends the key nowhere"

    @rule(request=REQUESTS)
    def call(self, request: str) -> None:
        self.expire()
        assert self.choices.end(request) == (request in self.chosen)
        name, weight, _ = self.chosen.pop(request, ("a", 1, 0.0))
        begun = self.affinity.begin(name, Call(weight=weight, replica=name))
        assert (begun is not None) == (name in self.running)
        if begun is not None:
            self.calls.append(begun)

    @precondition(lambda self: self.calls)
    @rule(number=st.integers(0, 9))
    def finish(self, number: int) -> None:
        self.affinity.end(self.calls.pop(number % len(self.calls)))

    @rule(seconds=st.sampled_from([0.1, 1.0, CHOICE_TIMEOUT_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(names=st.sets(st.sampled_from(NAMES)))
    def replace(self, names: set[str]) -> None:
        self.running = names
        self.affinity.set_replicas(names)

    @invariant()
    def loads_are_those_of_choices_and_calls(self) -> None:
        loads = Counter(dict.fromkeys(self.running, 0))
        for name, weight, _ in self.chosen.values():
            loads[name] += weight
        for call in self.calls:
            loads[call.name] += call.weight
        assert {name: self.affinity.load(name) for name in self.running} == {name: loads[name] for name in self.running}


TestChosen = Chosen.TestCase
