"""What share of their time replicas should be busy, learnt from traffic whose bursts are known."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.busy_share import FIRST_SHARE, LEARNING_S, SETTLED_S, SHARES, BusyShare, GivenWork
from deployments.scaling_policy import ScalingTargets, VisualLoad, VisualScaler

SPEED = 100.0


class Sample(NamedTuple):
    timestamp: float
    value: float


def learnt(traffic: list[float], hold_s: float = 60.0) -> BusyShare:
    """After as many seconds of so many tokens each."""
    found = BusyShare(target_s=1.0, hold_s=hold_s)
    for tokens in traffic:
        found.second(tokens, SPEED)
    return found


def bursts(height: float, every: int, last: int = 3, seconds: int = 1200) -> list[float]:
    """A thousand tokens a second, `height` times as many for `last` seconds now and then."""
    return [1000.0 * (height if second % every < last else 1.0) for second in range(seconds)]


def test_steady_traffic_needs_nothing_to_spare() -> None:
    assert learnt([1000.0] * 600).share == SHARES[0]


def test_bursts_that_come_again_want_spare_replicas() -> None:
    """Longer apart than replicas are held for, so that each begins with what steady traffic asks for."""
    found = [learnt(bursts(height, every=200)).share for height in (1.0, 2.0, 3.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] == SHARES[0]
    assert found[1] < 0.6
    # 3000 a second for 3 s and a second's half of the target to wait: at least 2500 of them, of 1000 that are usual.
    assert found[2] <= 0.4


def test_bursts_that_replicas_are_held_for_cost_none_to_spare() -> None:
    often, seldom = (learnt(bursts(2.0, every=every, seconds=4000), hold_s=120).share for every in (60, 240))
    assert often > seldom


def test_rises_only_after_some_minutes() -> None:
    assert BusyShare(1.0, 60.0).share == FIRST_SHARE
    assert learnt([0.0] * 1000).share == FIRST_SHARE
    assert learnt([0.0] * 1000 + [1000.0] * (int(LEARNING_S) - 1)).share == FIRST_SHARE
    assert learnt([0.0] * 1000 + [1000.0] * int(LEARNING_S)).share == SHARES[0]


def test_falls_at_once_and_forgets() -> None:
    calm = [1000.0] * 600
    jolt = [5000.0] * 3
    assert learnt(calm + jolt).share == SHARES[-1]
    assert learnt(calm + jolt + calm).share < SHARES[0]
    assert learnt(calm + jolt + [1000.0] * 9000).share == SHARES[0]


def test_what_one_replica_can_do_is_never_late() -> None:
    """Where there is little traffic, a single image of a second's work is no burst: a replica is there or none."""
    assert learnt([60.0 if second % 50 == 0 else 0.0 for second in range(1200)]).share == SHARES[0]


@given(st.lists(st.floats(0, 1e6), max_size=400), st.floats(1, 1e6))
def test_is_always_one_of_those_there_are(traffic: list[float], speed: float) -> None:
    found = BusyShare(1.0, 30.0)
    for tokens in traffic:
        found.second(tokens, speed)
        assert found.share in SHARES


def test_each_seconds_work_from_counters() -> None:
    """Two replicas that report at other times, one of them anew after a restart; nothing is counted twice."""
    given_work = GivenWork()
    assert given_work.seconds(100.0 + SETTLED_S, {}) == []
    first = {
        "a": [Sample(100.0, 50.0), Sample(101.0, 150.0), Sample(103.0, 350.0)],
        "b": [Sample(100.5, 0.0), Sample(101.5, 60.0)],
    }
    assert given_work.seconds(100.0 + SETTLED_S, first) == []
    assert given_work.seconds(102.0 + SETTLED_S, first) == pytest.approx([100 + 30, 100 + 30])
    # b is gone; a begins again at 0.
    assert given_work.seconds(104.0 + SETTLED_S, {"a": [Sample(103.5, 0.0), Sample(104.0, 20.0)]}) == pytest.approx(
        [100, 20]
    )


def test_a_long_pause_is_not_reckoned_second_by_second() -> None:
    given_work = GivenWork()
    given_work.seconds(0.0, {"a": [Sample(0.0, 0.0)]})
    assert len(given_work.seconds(1e9, {"a": [Sample(1e9, 5.0)]})) <= 3600


def test_the_scaler_uses_it_unless_it_is_told() -> None:
    """2000 tokens a second at 100 each: 20 replicas that are always busy."""

    def asked(busy_share: float | None) -> int:
        scaler = VisualScaler(ScalingTargets(busy_share=busy_share, growth=100))
        load = VisualLoad(0.0, 40, 40, 0.0, 0.0, 2000.0, SPEED, 10.0)
        for second in range(600):
            given_tokens = {"a": [Sample(float(second), 2000.0 * second)]}
            found = scaler.replicas(
                dataclasses.replace(load, now_s=float(second), given=given_tokens), least=1, most=90
            )
        return found

    assert (asked(None), asked(0.5), asked(1.0)) == (25, 40, 20)
