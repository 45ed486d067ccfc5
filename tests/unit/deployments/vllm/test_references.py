"""References of requests in flight: who may look up what, and for how long."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from deployments.vllm.references import References, UnknownReferenceError
from encoder.item_header import HeaderError, ItemHeader, PromptRun, PromptUpdate
from tests.programs import output_of_python


def header(number: int = 0, tokens: int = 4, modality: str = "image") -> ItemHeader:
    """`number` decides the digest."""
    update = PromptUpdate("replace", (5,), (PromptRun(5, tokens, True),))
    return ItemHeader(f"{number:064x}", modality, tokens, (update,), (1, 4, 4))


def test_a_key_may_be_looked_up_any_number_of_times() -> None:
    """`/tokenize` renders a conversation several times, and so do tool loops."""
    references = References()
    key = references.add(header())
    assert [references.header(key) for _ in range(3)] == [header()] * 3


def test_keys_are_unguessable() -> None:
    references = References()
    keys = {references.add(header()) for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key.removeprefix("vitray:")) == 22 for key in keys), "128 bits in base64"
    assert not any(header().digest in key for key in keys)


@pytest.mark.parametrize("key", ["", "vitray:", "vitray:0", "http://example.com/a.png", header().digest])
def test_an_unknown_key_is_an_error(key: str) -> None:
    references = References()
    references.add(header())
    with pytest.raises(UnknownReferenceError):
        references.header(key)


def test_a_released_key_is_unknown_while_another_request_has_the_item() -> None:
    references = References()
    first, second = references.add(header()), references.add(header())
    references.release([first])
    with pytest.raises(UnknownReferenceError):
        references.header(first)
    assert references.header(second) == references.header_by_digest(header().digest) == header()
    references.release([second, first, "never issued"])
    with pytest.raises(UnknownReferenceError):
        references.header_by_digest(header().digest)


def test_a_key_is_held_by_every_call_of_its_request() -> None:
    """A retry may come before the call that it replaces has ended."""
    references = References()
    key = references.add(header())
    assert references.add(header(), key) == key
    with pytest.raises(ValueError, match="another item's"):
        references.add(header(1), key)
    references.release([key])
    assert references.header(key) == header()
    references.release([key])
    with pytest.raises(UnknownReferenceError):
        references.header(key)
    assert (references._entries, references._holders) == ({}, Counter())


def test_a_digest_has_one_header() -> None:
    references = References()
    key = references.add(header(tokens=4))
    with pytest.raises(HeaderError, match="differ"):
        references.add(header(tokens=5))
    references.release([key])
    assert references.header(references.add(header(tokens=5))) == header(tokens=5)


def test_references_need_no_vllm() -> None:
    """The application is built where vLLM is not installed."""
    output_of_python("import sys, deployments.vllm.references; sys.exit('vllm' in sys.modules)")


class ReferenceCounts(RuleBasedStateMachine):
    """Requests add items and release them in any order, some twice; an item is there while one of them refers to it."""

    requests: Bundle[tuple[str, ...]] = Bundle("requests")
    released: Bundle[tuple[str, ...]] = Bundle("released")

    @initialize()
    def start(self) -> None:
        self.references = References()
        self.numbers: dict[str, int] = {}

    @rule(target=requests, numbers=st.lists(st.integers(0, 3), max_size=4))
    def begin(self, numbers: list[int]) -> tuple[str, ...]:
        keys = tuple(self.references.add(header(number)) for number in numbers)
        self.numbers.update(zip(keys, numbers, strict=True))
        return keys

    @rule(target=released, keys=consumes(requests))
    def end(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        self.references.release(keys)
        for key in keys:
            del self.numbers[key]
        return keys

    @rule(keys=released)
    def end_again(self, keys: tuple[str, ...]) -> None:
        self.references.release(keys)
        for key in keys:
            with pytest.raises(UnknownReferenceError):
                self.references.header(key)

    @invariant()
    def items_are_those_of_the_requests_in_flight(self) -> None:
        counts = Counter(self.numbers.values())
        assert len(self.references._digests) == counts.total()
        assert len(self.references._entries) == len(counts)
        for key, number in self.numbers.items():
            assert self.references.header(key).digest == header(number).digest
        for number in set(range(4)) - set(counts):
            with pytest.raises(UnknownReferenceError):
                self.references.header_by_digest(header(number).digest)


TestReferenceCounts = ReferenceCounts.TestCase
