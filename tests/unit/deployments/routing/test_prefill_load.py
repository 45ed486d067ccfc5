"""What a language model tells of what it has to read, however requests end."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from deployments.routing.affinity import Call
from deployments.routing.prefill_load import (
    CONVERSATIONS,
    PENDING_TOKENS,
    PREFIX_BYTES,
    RUNNING_TOKENS,
    PrefillLoad,
    choose_probed,
    rank_by_pending_prefill,
)

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
    assert work.routing_stats() == {CONVERSATIONS: b"", PENDING_TOKENS: 0}


def test_the_conversations_read_last_are_told() -> None:
    work, without = PrefillLoad(has_prefix_cache=True), PrefillLoad(has_prefix_cache=False)
    for key in [*KEYS, KEYS[200]]:
        for one in (work, without):
            with one.track(Call(key, cost=1)) as taken:
                one.finish_prefill(taken)
    with work.track(Call(None, cost=1)) as taken:
        work.finish_prefill(taken)
    held = work.routing_stats()[CONVERSATIONS]
    prefixes = [held[at : at + PREFIX_BYTES] for at in range(0, len(held), PREFIX_BYTES)]
    assert prefixes == [bytes.fromhex(key[: 2 * PREFIX_BYTES]) for key in [*KEYS[-1024:200], *KEYS[201:], KEYS[200]]]
    assert without.routing_stats()[CONVERSATIONS] == b"", "no prefix cache"


def test_who_is_first_done_comes_first_and_equals_stay() -> None:
    told: dict[str, dict[str, Any]] = {
        "b": {PENDING_TOKENS: 10},
        "a": {PENDING_TOKENS: 10, CONVERSATIONS: b""},
        "c": {PENDING_TOKENS: 5},
        "d": {},
    }
    near = dict.fromkeys("abcd", False)
    assert rank_by_pending_prefill(Call(KEYS[0], cost=4000), told, near) == ["c", "b", "a"]
    assert rank_by_pending_prefill(Call(None, cost=4000), {}, {}) == []


def test_another_host_has_to_be_so_much_better_as_it_lacks() -> None:
    told: dict[str, dict[str, Any]] = {"near": {PENDING_TOKENS: 900}, "far": {PENDING_TOKENS: 0}}
    far = {"near": False, "far": True}
    for leaving_cost, first in ((0, "far"), (899, "far"), (901, "near")):
        assert rank_by_pending_prefill(Call(KEYS[0], leaving_cost=leaving_cost), told, far)[0] == first
    told["far"][CONVERSATIONS] = bytes.fromhex(KEYS[0])[:PREFIX_BYTES]
    call = Call(KEYS[0], cost=6000, leaving_cost=10_000)
    assert rank_by_pending_prefill(call, told, far)[0] == "far", (
        "it has read the turns before, so its host has the images"
    )


def test_replicas_are_probed_on_the_host_of_the_best_and_on_others() -> None:
    hosts = {name: name[0] for name in ("x1", "x2", "x3", "x4", "y1", "y2", "z1")}
    assert choose_probed(["x1", "y2", "x3", "z1", "y1", "x2", "x4"], hosts) == {
        "x1": False,
        "x3": False,
        "x2": False,
        "y2": True,
        "z1": True,
    }
    assert list(choose_probed(["a", "b", "c", "d"], {})) == ["a", "b", "c"], "hosts are unknown"
    assert choose_probed([], {}) == {}
