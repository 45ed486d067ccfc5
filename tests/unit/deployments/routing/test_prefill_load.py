"""What a language model tells of what it has to read, however requests end."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from deployments.routing.affinity import PREFIX_BYTES, PUBLISHED_DIGESTS, Call
from deployments.routing.prefill_load import PENDING_TOKENS, RUNNING_TOKENS, PrefillLoad, rank_by_pending_prefill

KEYS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(1100)]


def test_a_prompt_counts_until_it_is_read_and_an_answer_until_it_ends() -> None:
    work = PrefillLoad(has_prefix_cache=True)
    with work.track(Call(KEYS[0], cost=5000)) as first, work.track(Call(KEYS[1], cost=70)):
        assert work.routing_stats()[PENDING_TOKENS] == 5070
        for _ in range(2):
            work.finish_prefill(first)
            assert work.routing_stats()[PENDING_TOKENS] == RUNNING_TOKENS + 70
    assert work.routing_stats()[PENDING_TOKENS] == 0


def test_one_that_fails_leaves_nothing_behind_and_is_not_remembered() -> None:
    work = PrefillLoad(has_prefix_cache=True)
    with pytest.raises(RuntimeError), work.track(Call(KEYS[0], cost=5000)):
        raise RuntimeError
    assert work.routing_stats() == {PUBLISHED_DIGESTS: b"", PENDING_TOKENS: 0}


def test_the_conversations_read_last_are_told() -> None:
    work, without = PrefillLoad(has_prefix_cache=True), PrefillLoad(has_prefix_cache=False)
    for key in [*KEYS, KEYS[200]]:
        for one in (work, without):
            with one.track(Call(key, cost=1)) as taken:
                one.finish_prefill(taken)
    with work.track(Call(None, cost=1)) as taken:
        work.finish_prefill(taken)
    held = work.routing_stats()[PUBLISHED_DIGESTS]
    prefixes = [held[at : at + PREFIX_BYTES] for at in range(0, len(held), PREFIX_BYTES)]
    assert prefixes == [bytes.fromhex(key[: 2 * PREFIX_BYTES]) for key in [*KEYS[-1024:200], *KEYS[201:], KEYS[200]]]
    assert without.routing_stats()[PUBLISHED_DIGESTS] == b"", "no prefix cache"


def test_who_is_first_done_comes_first_and_equals_stay() -> None:
    told: dict[str, dict[str, Any]] = {
        "b": {PENDING_TOKENS: 10},
        "a": {PENDING_TOKENS: 10, PUBLISHED_DIGESTS: b""},
        "c": {PENDING_TOKENS: 5},
        "d": {},
    }
    assert rank_by_pending_prefill(Call(KEYS[0], cost=4000), told) == ["c", "b", "a"]
    assert rank_by_pending_prefill(Call(None, cost=4000), {}) == []
