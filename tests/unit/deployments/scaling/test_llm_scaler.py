"""How many language models: the arithmetic by hand, and what holds for every load."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.scaling.llm_scaler import LLMLoad, LLMScaler, LLMTargets

IDLE = LLMLoad(
    now_s=0.0,
    running_replicas=2,
    target_replicas=2,
    running_requests=0,
    waiting_requests=0,
    queued_requests=0,
    kv_cache_use=0.0,
)
TARGETS = LLMTargets(
    target_requests=10, target_kv_cache_utilization=0.5, scale_down_stabilization_s=60, max_scale_up_factor=100
)


def needed(least: int = 0, most: int = 100, **load: Any) -> int:
    return LLMScaler(TARGETS).compute_need(replace(IDLE, **load), min_replicas=least, max_replicas=most)


@pytest.mark.parametrize(
    ("load", "replicas"),
    [
        ({}, 0),
        ({"running_requests": 20}, 2),
        ({"running_requests": 20, "waiting_requests": 1}, 3),
        ({"running_requests": 10, "waiting_requests": 10, "queued_requests": 15}, 4),
        # Two caches nearly full: ten long requests take 1.8 of them, 3.6 at half.
        ({"running_requests": 10, "kv_cache_use": 1.8}, 4),
        # As many more wait for room, and will take as much again.
        ({"running_requests": 10, "waiting_requests": 10, "kv_cache_use": 1.8}, 8),
        ({"queued_requests": 1}, 1),
    ],
)
def test_by_requests_and_by_their_cache(load: dict[str, Any], replicas: int) -> None:
    assert needed(**load) == replicas


def test_within_bounds_and_no_faster_than_growth() -> None:
    assert needed(least=1) == 1
    assert needed(most=3, running_requests=1000) == 3
    slow = LLMScaler(LLMTargets(target_requests=10, max_scale_up_factor=1.5))
    assert (
        slow.compute_need(replace(IDLE, running_replicas=4, running_requests=1000), min_replicas=0, max_replicas=100)
        == 6
    )
    assert (
        slow.compute_need(replace(IDLE, running_replicas=0, queued_requests=1000), min_replicas=0, max_replicas=100)
        == 2
    )


def test_replicas_that_start_in_place_of_lost_ones_are_not_taken_away() -> None:
    """Seven of eight are lost, and take longer to start than the window lasts: they were stopped under full load."""
    scaler = LLMScaler(LLMTargets(target_requests=10, scale_down_stabilization_s=60, max_scale_up_factor=2))
    busy = replace(IDLE, running_replicas=8, target_replicas=8, running_requests=80)
    for now_s in range(0, 300, 5):
        lost = replace(busy, running_replicas=1, running_requests=10, waiting_requests=70) if now_s >= 30 else busy
        told = replace(lost, now_s=float(now_s))
        assert scaler.choose_replicas(told, min_replicas=0, max_replicas=10) == 8


def test_holds_on_to_what_was_needed_of_late() -> None:
    scaler = LLMScaler(TARGETS)
    busy = replace(IDLE, running_replicas=5, target_replicas=5, running_requests=50)
    assert scaler.choose_replicas(busy, min_replicas=0, max_replicas=100) == 5
    idle = replace(busy, running_requests=0)
    assert scaler.choose_replicas(replace(idle, now_s=59.0), min_replicas=0, max_replicas=100) == 5
    assert scaler.choose_replicas(replace(idle, now_s=61.0), min_replicas=0, max_replicas=100) == 0
    assert scaler.choose_replicas(replace(idle, now_s=62.0), min_replicas=1, max_replicas=100) == 1


def test_a_replica_that_serve_started_itself_is_kept_until_its_first_report() -> None:
    """Without replicas, Serve starts one for a request and does not ask."""
    scaler = LLMScaler(TARGETS)
    none = replace(IDLE, running_replicas=0, target_replicas=0)
    assert [scaler.choose_replicas(replace(none, now_s=s), min_replicas=0, max_replicas=9) for s in (0, 100)] == [0, 0]
    started = replace(IDLE, running_replicas=1, target_replicas=1)
    assert scaler.choose_replicas(replace(started, now_s=200.0), min_replicas=0, max_replicas=9) == 1
    assert scaler.choose_replicas(replace(started, now_s=259.0), min_replicas=0, max_replicas=9) == 1
    assert scaler.choose_replicas(replace(started, now_s=261.0), min_replicas=0, max_replicas=9) == 0
    assert scaler.choose_replicas(replace(started, now_s=262.0), min_replicas=0, max_replicas=9) == 0, "Serve delays"


def test_a_clock_that_is_set_back_starts_the_hold_anew() -> None:
    """By Serve's clock, which is its host's: replicas were kept until it was again as late as it had been."""
    scaler = LLMScaler(TARGETS)
    busy = replace(IDLE, now_s=7200.0, target_replicas=9, running_replicas=9, running_requests=90)
    assert scaler.choose_replicas(busy, min_replicas=1, max_replicas=100) == 9
    idle = replace(busy, running_requests=0, kv_cache_use=0.0)
    assert scaler.choose_replicas(replace(idle, now_s=3600.0), min_replicas=1, max_replicas=100) == 9
    assert scaler.choose_replicas(replace(idle, now_s=3659.0), min_replicas=1, max_replicas=100) == 9
    assert scaler.choose_replicas(replace(idle, now_s=3661.0), min_replicas=1, max_replicas=100) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"target_requests": 0},
        {"target_kv_cache_utilization": 1.1},
        {"scale_down_stabilization_s": -1},
        {"max_scale_up_factor": 1},
        {"tolerance": math.nan},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is"):
        LLMTargets(**wrong)


count = st.integers(0, 5000)


@given(
    running=count,
    waiting=count,
    coming=count,
    cache=st.floats(0, 50),
    replicas=st.integers(0, 50),
    more=st.integers(1, 99),
)
def test_more_to_do_never_asks_for_less(
    running: int, waiting: int, coming: int, cache: float, replicas: int, more: int
) -> None:
    def ask(**load: Any) -> int:
        base = {"running_requests": running, "waiting_requests": waiting, "queued_requests": coming}
        return needed(running_replicas=replicas, kv_cache_use=cache, **(base | load))

    assert ask(waiting_requests=waiting + more) >= ask()
    assert ask(queued_requests=coming + more) >= ask()
    assert 0 <= ask() <= 100
