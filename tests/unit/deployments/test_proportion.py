"""Encoders and language models together: who the line waits for, and who gets the GPUs where they are short."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.llm_scaling import LLMLoad, LLMTargets
from deployments.proportion import Bounds, IngressLoad, Pool, ProportionScaler, lack, split, with_ingress
from deployments.scaling_policy import ScalingTargets, VisualLoad

ENCODERS = VisualLoad(
    now_s=0.0,
    running=2,
    asked_for=2,
    backlog_tokens=0,
    waiting_images=0,
    arriving_tokens_per_s=0,
    tokens_per_s=1000,
    tokens_per_image=100,
)
LLMS = LLMLoad(
    now_s=0.0, running=2, asked_for=2, running_requests=0, waiting_requests=0, coming_requests=0, kv_cache_use=0
)
WIDE = (Bounds(0, 100), Bounds(0, 100))
AT_ONCE = ScalingTargets(busy_share=1, hold_s=0, growth=1000), LLMTargets(target_requests=10, hold_s=0, growth=1000)


def scaler(**pool: Any) -> ProportionScaler:
    return ProportionScaler(*AT_ONCE, Pool(**pool))


def test_each_gets_what_it_needs_where_there_is_enough() -> None:
    busy = replace(ENCODERS, arriving_tokens_per_s=3000), replace(LLMS, running_requests=45)
    assert scaler().replicas(*busy, IngressLoad(), bounds=WIDE) == (3, 5)
    assert scaler(gpus=8).replicas(*busy, IngressLoad(), bounds=WIDE) == (3, 5)
    assert scaler().replicas(*busy, IngressLoad(), bounds=(Bounds(4, 9), Bounds(0, 2))) == (4, 2)


def test_a_line_that_encoders_hold_up_is_theirs() -> None:
    """All that is in flight is at the encoders; requests come to a language model no faster than that."""
    line = IngressLoad(line_tokens=6000, in_flight_tokens=2000, unaccepted_requests=80)
    held = replace(ENCODERS, backlog_tokens=2000)
    encoders, llms = with_ingress(held, LLMS, line)
    assert (encoders.waiting_tokens, llms.coming_requests) == (6000, 0)
    assert scaler().replicas(held, LLMS, line, bounds=WIDE) == (8, 2)


def test_a_line_that_language_models_hold_up_asks_for_no_encoder() -> None:
    """The encoders have nothing to do, and yet the line grows: more of them would change nothing."""
    line = IngressLoad(line_tokens=6000, in_flight_tokens=2000, unaccepted_requests=80)
    assert scaler().replicas(replace(ENCODERS, asked_for=0), LLMS, line, bounds=WIDE) == (0, 8)


def test_a_line_waits_for_both_in_the_shares_that_they_hold_up() -> None:
    line = IngressLoad(line_tokens=6000, in_flight_tokens=2000, unaccepted_requests=80)
    encoders, llms = with_ingress(replace(ENCODERS, backlog_tokens=300, waiting_images=2), LLMS, line)
    assert (encoders.waiting_tokens, llms.coming_requests) == (1500, 60)


def test_where_no_encoder_runs_the_line_is_theirs() -> None:
    line = IngressLoad(line_tokens=500, in_flight_tokens=100, unaccepted_requests=6)
    encoders, _ = with_ingress(replace(ENCODERS, running=0), LLMS, line)
    assert encoders.waiting_tokens == 500


def test_gpus_that_are_short_go_to_both_in_proportion() -> None:
    busy = replace(ENCODERS, arriving_tokens_per_s=12_000), replace(LLMS, running_requests=40)
    assert scaler(gpus=8).replicas(*busy, IngressLoad(), bounds=WIDE) == (6, 2)
    assert scaler(gpus=8, llm_gpus=2).replicas(*busy, IngressLoad(), bounds=WIDE) == (4, 2)
    assert scaler(gpus=8).replicas(*busy, IngressLoad(), bounds=(Bounds(0, 2), Bounds(1, 100))) == (2, 4)


def test_gpus_are_shifted_when_the_load_turns_and_not_before() -> None:
    """Four and four; then images stop and answers get long."""
    policy = scaler(gpus=8, shift_gain=0.2, shift_hold_s=60)
    even = (
        replace(ENCODERS, asked_for=4, arriving_tokens_per_s=10_000),
        replace(LLMS, asked_for=4, running_requests=100),
    )

    def at(now_s: float, arriving: float, requests: float, counts: tuple[int, int]) -> tuple[int, int]:
        encoders = replace(even[0], now_s=now_s, asked_for=counts[0], arriving_tokens_per_s=arriving)
        llms = replace(even[1], now_s=now_s, asked_for=counts[1], running_requests=requests)
        return policy.replicas(encoders, llms, IngressLoad(), bounds=WIDE)

    assert at(0, 10_000, 100, (4, 4)) == (4, 4)
    assert at(10, 11_000, 90, (4, 4)) == (4, 4), "a little more of one is not worth a start"
    assert at(15, 2_000, 180, (4, 4)) == (4, 4), "a burst is over before a GPU has changed sides"
    assert at(400, 2_000, 180, (4, 4)) == (1, 7)
    assert at(430, 30_000, 100, (1, 7)) == (1, 7), "shifted a moment ago"
    assert at(900, 10_000, 100, (1, 7)) == (4, 4)


def test_gpus_that_nobody_needs_are_given_out_and_shifted_for_want_only() -> None:
    policy = scaler(gpus=8, use_all=True, shift_hold_s=0)

    def at(now_s: float, arriving: float, requests: float, counts: tuple[int, int]) -> tuple[int, int]:
        encoders = replace(ENCODERS, now_s=now_s, asked_for=counts[0], arriving_tokens_per_s=arriving)
        llms = replace(LLMS, now_s=now_s, asked_for=counts[1], running_requests=requests)
        return policy.replicas(encoders, llms, IngressLoad(), bounds=WIDE)

    assert sum(at(0, 0, 0, (0, 0))) == 8
    assert at(10, 1000, 40, (4, 4)) == (4, 4), "both have what they need"
    assert at(20, 1000, 60, (4, 4)) == (2, 6)


def test_encoders_give_up_their_idle_time_where_gpus_are_short() -> None:
    """They would have twice as many as keep up with what arrives; language models have none to spare."""
    policy = ProportionScaler(ScalingTargets(busy_share=0.5, hold_s=0, growth=1000), AT_ONCE[1], Pool(8))
    busy = replace(ENCODERS, arriving_tokens_per_s=4000), replace(LLMS, running_requests=60)
    assert policy.replicas(*busy, IngressLoad(), bounds=WIDE) == (3, 5)


def test_a_pool_that_shrank_is_kept_to_at_once() -> None:
    policy = scaler(gpus=4, shift_hold_s=1e6)
    for now_s in (0.0, 1.0):
        encoders = replace(ENCODERS, now_s=now_s, asked_for=4, arriving_tokens_per_s=9000)
        llms = replace(LLMS, now_s=now_s, asked_for=4, running_requests=90)
        assert policy.replicas(encoders, llms, IngressLoad(), bounds=WIDE) == (2, 2)


def test_who_has_nothing_and_needs_something_gets_it() -> None:
    """From zero: Serve starts the first encoder by itself, and it must find a GPU."""
    encoders = replace(ENCODERS, running=0, asked_for=1, waiting_images=5, tokens_per_s=None)
    llms = replace(LLMS, asked_for=8, running=8, running_requests=500)
    assert scaler(gpus=8).replicas(encoders, llms, IngressLoad(), bounds=WIDE) == (1, 7)


@pytest.mark.parametrize(
    "wrong", [{"gpus": 0}, {"encoder_gpus": 0}, {"llm_gpus": -1}, {"shift_gain": 1}, {"shift_hold_s": math.inf}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is"):
        Pool(**wrong)


need = st.integers(0, 40)
gpus_each = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0])


@given(
    needs=st.tuples(need, need),
    gpus=st.integers(1, 24),
    each=st.tuples(gpus_each, gpus_each),
    least=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    room=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_no_other_split_lacks_less(
    needs: tuple[int, int],
    gpus: int,
    each: tuple[float, float],
    least: tuple[int, int],
    room: tuple[int, int],
) -> None:
    """Against all splits there are."""
    pool = Pool(gpus, *each)
    bounds = (Bounds(least[0], least[0] + room[0]), Bounds(least[1], least[1] + room[1]))
    found = split(needs, pool, bounds)
    assert all(bound.least <= count <= bound.most for count, bound in zip(found, bounds, strict=True))
    if pool.taken(*least) > gpus:
        assert found == least
        return
    assert pool.taken(*found) <= gpus
    possible = [
        (encoders, llms)
        for encoders in range(bounds[0].least, bounds[0].most + 1)
        for llms in range(bounds[1].least, bounds[1].most + 1)
        if pool.taken(encoders, llms) <= gpus
    ]
    # Who has as much as it needs gets no more.
    assert max(1.0, lack(needs, found)) == max(1.0, min(lack(needs, other) for other in possible))
