"""How many encoders visual work asks for: bounds, monotony, no flapping, to zero and back, what is not measured yet."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.scaling.encoder_scaler import ScalingTargets, VisualLoad, VisualScaler
from tests.unit.deployments.scaling.test_utilization_target import Sample

SPEED = 1000.0
AMOUNTS = st.floats(0, 1e9)


IDLE = VisualLoad(
    now_s=0.0,
    running_replicas=4,
    target_replicas=4,
    backlog_tokens=0.0,
    waiting_images=0.0,
    arriving_tokens_per_s=0.0,
    tokens_per_s=SPEED,
    tokens_per_image=100.0,
)


def load(**changes: Any) -> VisualLoad:
    return dataclasses.replace(IDLE, **changes)


def needed(found: VisualLoad, *, most: int = 1000, **targets: float) -> int:
    return VisualScaler(ScalingTargets(**{"max_scale_up_factor": 1e6, **targets})).compute_need(
        found, min_replicas=0, max_replicas=most
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"backlog_tokens": 6000.0}, 3),  # 6000 tokens in 2 s at 1000 a second
        ({"backlog_tokens": 6001.0}, 4),
        ({"waiting_images": 60.0}, 3),  # 100 tokens each
        ({"arriving_tokens_per_s": 4000.0}, 8),  # each busy half its time
        ({"backlog_tokens": 2000.0, "waiting_images": 20.0, "arriving_tokens_per_s": 500.0}, 3),
        ({"arriving_tokens_per_s": 1e-3}, 0),
        ({}, 0),
    ],
)
def test_by_hand(changes: dict[str, float], expected: int) -> None:
    assert needed(load(**changes), target_encode_delay_s=2.0, target_utilization=0.5) == expected


def test_a_backlog_may_wait_for_a_replica_to_start() -> None:
    found = load(backlog_tokens=50_000.0)
    assert (needed(found), needed(found, replica_startup_s=24.0)) == (50, 2)


def test_a_backlog_is_cleared_within_the_target() -> None:
    """By as many as are asked for, while work goes on arriving."""
    found = load(backlog_tokens=50_000.0, arriving_tokens_per_s=7_300.0)
    replicas = needed(found, target_encode_delay_s=1.5)
    assert found.backlog_tokens + 1.5 * found.arriving_tokens_per_s <= replicas * SPEED * 1.5


@given(AMOUNTS, AMOUNTS, AMOUNTS, st.floats(1e-3, 1e9), st.integers(0, 50), st.integers(0, 50), st.integers(0, 100))
def test_within_bounds(
    backlog: float, waiting: float, arriving: float, speed: float, least: int, more: int, running: int
) -> None:
    found = load(
        backlog_tokens=backlog,
        waiting_images=waiting,
        arriving_tokens_per_s=arriving,
        tokens_per_s=speed,
        running_replicas=running,
        target_replicas=running,
    )
    assert (
        least
        <= VisualScaler(ScalingTargets()).choose_replicas(found, min_replicas=least, max_replicas=least + more)
        <= least + more
    )


@given(AMOUNTS, AMOUNTS, AMOUNTS)
def test_more_backlog_never_asks_for_fewer(backlog: float, more: float, arriving: float) -> None:
    found = load(backlog_tokens=backlog, arriving_tokens_per_s=arriving)
    larger = dataclasses.replace(found, backlog_tokens=backlog + more)
    replicas = [
        VisualScaler(ScalingTargets()).choose_replicas(each, min_replicas=0, max_replicas=1000)
        for each in (found, larger)
    ]
    assert replicas[0] <= replicas[1]


@given(st.floats(0, 1e6), st.floats(0, 1e5), st.integers(0, 200))
def test_constant_load_never_flaps(arriving: float, backlog: float, start: int) -> None:
    """The number goes up at most, then down once; it never turns around again."""
    scaler, replicas, seen = VisualScaler(ScalingTargets()), start, []
    for now_s in range(0, 600, 2):
        found = load(
            now_s=now_s,
            arriving_tokens_per_s=arriving,
            backlog_tokens=backlog,
            running_replicas=replicas,
            target_replicas=replicas,
        )
        replicas = scaler.choose_replicas(found, min_replicas=0, max_replicas=500)
        seen.append(replicas)
    turns = [b - a for a, b in itertools.pairwise(seen) if a != b]
    falls = [turn for turn in turns if turn < 0]
    assert len(falls) <= 1
    assert seen[-100:] == [seen[-1]] * 100
    assert all(turn > 0 for turn in turns[: len(turns) - len(falls)])


def test_goes_down_only_to_the_most_of_the_hold_time() -> None:
    scaler = VisualScaler(
        ScalingTargets(scale_down_stabilization_s=60, max_scale_up_factor=10, target_utilization=1, tolerance=0)
    )
    seen, replicas = [], 10
    for now_s, arriving in ((0, 10_000.0), (30, 2_000.0), (59, 6_000.0), (61, 2_000.0), (118, 2_000.0), (120, 2_000.0)):
        found = load(now_s=now_s, arriving_tokens_per_s=arriving, running_replicas=replicas, target_replicas=replicas)
        replicas = scaler.choose_replicas(found, min_replicas=0, max_replicas=100)
        seen.append(replicas)
    assert seen == [10, 10, 10, 6, 6, 2]


def test_a_small_spare_is_not_taken_away() -> None:
    scaler = VisualScaler(ScalingTargets(scale_down_stabilization_s=0, target_utilization=1, tolerance=0.1))
    ask = lambda now_s, arriving: scaler.choose_replicas(  # noqa: E731
        load(now_s=now_s, arriving_tokens_per_s=arriving, running_replicas=100, target_replicas=100),
        min_replicas=0,
        max_replicas=200,
    )
    assert (ask(1, 95_000.0), ask(2, 90_000.0)) == (100, 90)


def test_grows_by_steps() -> None:
    """Of what runs, not of what was asked for: until replicas have started, no more are asked for."""
    scaler = VisualScaler(ScalingTargets(max_scale_up_factor=2))
    asked = [
        scaler.choose_replicas(
            load(backlog_tokens=1e6, running_replicas=running, target_replicas=asked_for),
            min_replicas=0,
            max_replicas=1000,
        )
        for running, asked_for in ((4, 4), (4, 8), (8, 8), (16, 16))
    ]
    assert asked == [8, 8, 16, 32]


def test_to_zero_and_back() -> None:
    """What it has learnt stays while there is no replica to measure anything."""
    scaler = VisualScaler(ScalingTargets(target_utilization=0.8, scale_down_stabilization_s=30))
    busy = load(arriving_tokens_per_s=1600.0, running_replicas=2, target_replicas=2)
    assert scaler.choose_replicas(busy, min_replicas=0, max_replicas=10) == 2
    idle = load(running_replicas=2, target_replicas=2, tokens_per_s=None, tokens_per_image=None)
    assert scaler.choose_replicas(dataclasses.replace(idle, now_s=29), min_replicas=0, max_replicas=10) == 2
    assert scaler.choose_replicas(dataclasses.replace(idle, now_s=31), min_replicas=0, max_replicas=10) == 0
    nobody = dataclasses.replace(idle, now_s=40, running_replicas=0, target_replicas=0)
    assert scaler.choose_replicas(nobody, min_replicas=0, max_replicas=10) == 0
    assert (
        scaler.choose_replicas(
            dataclasses.replace(nobody, now_s=41, waiting_images=15.0), min_replicas=0, max_replicas=10
        )
        == 2
    )


@pytest.mark.parametrize("work", [{"waiting_images": 1.0}, {"backlog_tokens": 100.0}])
def test_one_small_image_needs_a_replica_though_one_takes_long_to_start(work: dict[str, float]) -> None:
    assert needed(load(running_replicas=1, target_replicas=1, **work), replica_startup_s=120.0) == 1


def test_a_clock_that_is_set_back_keeps_no_replicas() -> None:
    scaler = VisualScaler(ScalingTargets())
    asked = 1

    def at(second: int, tokens: float, arriving: float) -> int:
        samples = {"a": [Sample(float(second), tokens)]}
        found = load(
            now_s=float(second),
            running_replicas=asked,
            target_replicas=asked,
            arriving_tokens_per_s=arriving,
            received_tokens=samples,
        )
        return scaler.choose_replicas(found, min_replicas=1, max_replicas=20)

    for second in range(10_000, 10_900):
        asked = at(second, 2000.0 * second, 2000.0)
    assert asked > 2
    for second in range(7_000, 8_500):
        asked = at(second, 2000.0 * 10_900, 0.0)
    assert asked == 1


def test_the_last_replica_goes_whatever_the_tolerance() -> None:
    scaler = VisualScaler(ScalingTargets(scale_down_stabilization_s=0, tolerance=0.9))
    assert [
        scaler.choose_replicas(load(now_s=at, running_replicas=1, target_replicas=1), min_replicas=0, max_replicas=10)
        for at in (1, 2)
    ] == [1, 0]


def test_unmeasured_keeps_what_there_is() -> None:
    unknown = load(tokens_per_s=None, tokens_per_image=None, backlog_tokens=1e9)
    assert VisualScaler(ScalingTargets()).choose_replicas(unknown, min_replicas=0, max_replicas=100) == 4
    from_none = dataclasses.replace(unknown, running_replicas=0, target_replicas=0)
    assert VisualScaler(ScalingTargets()).choose_replicas(from_none, min_replicas=0, max_replicas=100) == 1


def test_unmeasured_and_idle_goes_to_the_minimum() -> None:
    """The first image after a scale-up from zero may be refused: nothing is measured then, and the GPU was kept."""
    scaler = VisualScaler(ScalingTargets(scale_down_stabilization_s=60))
    idle = load(running_replicas=3, target_replicas=3, tokens_per_s=None, tokens_per_image=None)
    asked = [
        scaler.choose_replicas(dataclasses.replace(idle, now_s=now_s), min_replicas=0, max_replicas=9)
        for now_s in (0, 59, 61)
    ]
    assert asked == [3, 3, 0]
    starting = dataclasses.replace(idle, running_replicas=0, now_s=61.0)
    assert scaler.compute_need(starting, min_replicas=0, max_replicas=9) == 3, "or none would ever be up"
    arriving = dataclasses.replace(idle, now_s=62, arriving_tokens_per_s=100.0)
    assert scaler.compute_need(arriving, min_replicas=0, max_replicas=9) == 3


@pytest.mark.parametrize("utilization", [0.5, None])
def test_replicas_that_start_in_place_of_lost_ones_are_not_taken_away(utilization: float | None) -> None:
    """Seven of eight are lost, and take longer to start than the window lasts."""
    scaler = VisualScaler(ScalingTargets(target_utilization=utilization, scale_down_stabilization_s=60))
    needs_eight = load(
        running_replicas=8, target_replicas=8, arriving_tokens_per_s=8 * SPEED * 0.49, backlog_tokens=100.0
    )
    for now_s in range(0, 300, 5):
        running = 8 if now_s < 30 else 1
        told = dataclasses.replace(needs_eight, now_s=float(now_s), running_replicas=running)
        assert scaler.choose_replicas(told, min_replicas=0, max_replicas=10) == 8


def test_a_new_scaler_takes_nothing_away_at_once() -> None:
    """Serve makes a new one with every change of the configuration, before any replica has reported to it."""
    scaler = VisualScaler(ScalingTargets(target_utilization=0.8, scale_down_stabilization_s=60))
    silent = load(running_replicas=40, target_replicas=40, tokens_per_s=None, tokens_per_image=None)
    assert scaler.choose_replicas(silent, min_replicas=1, max_replicas=100) == 40
    told = load(running_replicas=40, target_replicas=40, now_s=59, arriving_tokens_per_s=800.0)
    assert scaler.choose_replicas(told, min_replicas=1, max_replicas=100) == 40
    assert scaler.choose_replicas(dataclasses.replace(told, now_s=120), min_replicas=1, max_replicas=100) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"target_encode_delay_s": 0},
        {"target_encode_delay_s": math.inf},
        {"target_utilization": 0},
        {"target_utilization": 1.1},
        {"scale_down_stabilization_s": -1},
        {"max_scale_up_factor": 1},
        {"tolerance": 1},
        {"tolerance": math.nan},
    ],
)
def test_refuses_what_makes_no_sense(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is .*; it must be"):
        ScalingTargets(**wrong)


def test_a_hold_that_is_learnt_keeps_what_arrived_and_not_what_waited() -> None:
    """Bursts of 3 s every five minutes, until replicas are kept for longer than that; then one long wait."""
    scaler = VisualScaler(ScalingTargets(max_scale_up_factor=100))
    given_tokens, asked, counts = 0.0, 8, []
    for second in range(4000):
        given_tokens += 16_000.0 if second % 300 < 3 else 4000.0
        samples = {"a": [Sample(float(second), given_tokens)]}
        waits = 1e6 if second == 3500 else 0.0
        found = load(
            now_s=float(second),
            running_replicas=asked,
            target_replicas=asked,
            arriving_tokens_per_s=4000.0,
            backlog_tokens=waits,
            received_tokens=samples,
        )
        asked = scaler.choose_replicas(found, min_replicas=1, max_replicas=100)
        counts.append(asked)
    standing = set(counts[3000:3500])
    assert len(standing) == 1
    assert counts[3500] > max(standing)
    assert max(counts[3500 + 121 :]) <= max(standing)
    assert counts[-1] > 4.0 / 0.95  # of what steady traffic alone would take
