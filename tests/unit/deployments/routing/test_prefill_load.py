"""What a language model tells of what it has to read, however requests end."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from deployments.routing.affinity import HELD, PREFIX_BYTES, Call
from deployments.routing.prefill_load import RUNNING_TOKENS, WORK, PrefillLoad, soonest

KEYS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(1100)]


def test_a_prompt_counts_until_it_is_read_and_an_answer_until_it_ends() -> None:
    work = PrefillLoad(remembers=True)
    with work.taken(Call(KEYS[0], cost=5000)) as first, work.taken(Call(KEYS[1], cost=70)):
        assert work.told()[WORK] == 5070
        for _ in range(2):
            work.read(first)
            assert work.told()[WORK] == RUNNING_TOKENS + 70
    assert work.told()[WORK] == 0


def test_one_that_fails_leaves_nothing_behind_and_is_not_remembered() -> None:
    work = PrefillLoad(remembers=True)
    with pytest.raises(RuntimeError), work.taken(Call(KEYS[0], cost=5000)):
        raise RuntimeError
    assert work.told() == {HELD: b"", WORK: 0}


def test_the_conversations_read_last_are_told() -> None:
    work, without = PrefillLoad(remembers=True), PrefillLoad(remembers=False)
    for key in [*KEYS, KEYS[200]]:
        for one in (work, without):
            with one.taken(Call(key, cost=1)) as taken:
                one.read(taken)
    with work.taken(Call(None, cost=1)) as taken:
        work.read(taken)
    held = work.told()[HELD]
    prefixes = [held[at : at + PREFIX_BYTES] for at in range(0, len(held), PREFIX_BYTES)]
    assert prefixes == [bytes.fromhex(key[: 2 * PREFIX_BYTES]) for key in [*KEYS[-1024:200], *KEYS[201:], KEYS[200]]]
    assert without.told()[HELD] == b"", "no prefix cache"


def test_who_is_first_done_comes_first_and_equals_stay() -> None:
    told: dict[str, dict[str, Any]] = {"b": {WORK: 10}, "a": {WORK: 10, HELD: b""}, "c": {WORK: 5}, "d": {}}
    assert soonest(Call(KEYS[0], cost=4000), told) == ["c", "b", "a"]
    assert soonest(Call(None, cost=4000), {}) == []
