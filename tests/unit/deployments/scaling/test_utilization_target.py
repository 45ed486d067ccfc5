"""What share of their time replicas should be busy, and how long they stay, learnt from traffic that is known."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.scaling.encoder_scaler import ScalingTargets, VisualLoad, VisualScaler
from deployments.scaling.utilization_target import (
    ARRIVALS_OVER_S,
    DEFAULT_STARTUP_S,
    FINAL_AFTER_S,
    FIRST_UTILIZATION,
    LATE_FRACTION,
    LEARNING_S,
    MAX_RISE_PER_MINUTE,
    MEMORY_S,
    UTILIZATIONS,
    WINDOW_FACTORS,
    WORKING_FRACTION,
    ArrivalSeries,
    LearnedUtilization,
)

SPEED = 100.0
STEADY_SHARE = next(share for share in UTILIZATIONS if share <= WORKING_FRACTION)
"""Of traffic that has no bursts."""


class Sample(NamedTuple):
    timestamp: float
    value: float


def learnt(traffic: list[float], hold_s: float = 60.0) -> LearnedUtilization:
    """After as many seconds of so many tokens each."""
    found = LearnedUtilization(target_s=1.0, window_s=hold_s)
    for tokens in traffic:
        found.step(tokens, SPEED)
    return found


def bursts(height: float, every: int, last: int = 3, seconds: int = 1200) -> list[float]:
    """A thousand tokens a second, `height` times as many for `last` seconds now and then."""
    return [1000.0 * (height if second % every < last else 1.0) for second in range(seconds)]


def test_steady_traffic_needs_nothing_to_spare() -> None:
    assert learnt([1000.0] * 600).utilization == STEADY_SHARE


def test_bursts_that_come_again_want_spare_replicas() -> None:
    """Longer apart than replicas can be held for, so that each begins with what steady traffic asks for."""
    found = [learnt(bursts(height, every=400)).utilization for height in (1.0, 2.0, 3.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] == STEADY_SHARE
    assert found[1] < 0.65
    # 3000 a second for 3 s, of 1000 that are usual; 0.8 of a second's work may wait: at least 9000 within 3.8 s.
    assert found[2] <= 0.95 * 3.8 / 9


def test_bursts_that_replicas_are_held_for_cost_none_to_spare() -> None:
    often, seldom = (learnt(bursts(2.0, every=every, seconds=4000), hold_s=120) for every in (60, 1000))
    assert often.utilization > seldom.utilization
    assert often.window_s >= 60


def rises_and_falls(share: float, over_s: float, seconds: int) -> list[float]:
    """A thousand tokens a second on average."""
    return [1000.0 * (1 + share * math.sin(2 * math.pi * second / over_s)) for second in range(seconds)]


def test_steady_traffic_with_bursts_is_met_by_a_fleet_that_stands() -> None:
    """Bursts of 3 s that come every 5 minutes, and 120 s are long forgotten until then."""
    found = LearnedUtilization(target_s=1.0, window_s=120.0)
    wanted = []
    for tokens in bursts(4.0, every=300, seconds=6000):
        found.step(tokens, SPEED)
        wanted.append(found.target_tokens_per_s)
    last = wanted[-1800:]
    assert found.window_s == 600.0
    assert max(last) == pytest.approx(min(last))
    fixed = Fleet(hold_s=120.0)
    sizes = [fixed.second(tokens) for tokens in bursts(4.0, every=300, seconds=6000)]
    share = max(share for share in UTILIZATIONS if not any(fixed.late(share, sizes)[-1200:]))
    assert last[-1] < 0.9 * sum(size for size, *_ in sizes[-1800:]) / 1800 / share


def test_traffic_that_swells_is_followed() -> None:
    """A fleet that is held for minutes would be near the most of it for most of the time."""
    found = learnt(rises_and_falls(0.6, over_s=1200, seconds=6000), hold_s=120.0)
    assert found.window_s <= 60.0


def test_nothing_is_forgotten_while_nothing_comes() -> None:
    jolts = [1000.0] * 600 + [5000.0] * 3
    assert learnt(jolts + [0.0] * 9000).utilization == UTILIZATIONS[-1]


def test_rises_only_after_some_minutes() -> None:
    assert LearnedUtilization(1.0, 60.0).utilization == FIRST_UTILIZATION
    assert learnt([0.0] * 1000).utilization == FIRST_UTILIZATION
    assert learnt([0.0] * 1000 + [1000.0] * (int(LEARNING_S) - 1)).utilization == FIRST_UTILIZATION
    assert learnt([0.0] * 1000 + [1000.0] * int(LEARNING_S)).utilization == STEADY_SHARE


def test_falls_at_once_and_forgets() -> None:
    calm = [1000.0] * 600
    jolt = [5000.0] * 3
    assert learnt(calm + jolt).utilization == UTILIZATIONS[-1]
    assert learnt(calm + jolt + calm).utilization < STEADY_SHARE
    assert learnt(calm + jolt + [1000.0] * int(MEMORY_S + 1200)).utilization > 0.9 * STEADY_SHARE


def test_what_one_replica_can_do_is_never_late() -> None:
    """Where there is little traffic, a single image of a second's work is no burst: a replica is there or none."""
    assert learnt([60.0 if second % 50 == 0 else 0.0 for second in range(1200)]).utilization == UTILIZATIONS[0]


@given(st.lists(st.floats(0, 1e6), max_size=400), st.floats(1, 1e6))
def test_is_always_one_of_those_there_are(traffic: list[float], speed: float) -> None:
    found = LearnedUtilization(1.0, 30.0)
    for tokens in traffic:
        found.step(tokens, speed)
        assert UTILIZATIONS[-1] <= found.utilization <= UTILIZATIONS[0]
        assert found.window_s in [times * 30.0 for times in WINDOW_FACTORS]
        assert found.target_tokens_per_s >= 0


class Fleet:
    """A reckoned fleet, told slowly: everything is kept, and looked up anew in every second."""

    def __init__(self, hold_s: float) -> None:
        self._hold = round(hold_s)
        self._traffic: list[float] = []
        self._arriving: list[float] = []

    def second(self, tokens: float) -> tuple[float, float, float]:
        """The most that arrived of late, that of replicas that have started, and what arrives, tokens a second."""
        self._traffic.append(tokens)
        kept = math.exp(-1 / ARRIVALS_OVER_S)
        self._arriving.append((self._arriving[-1] if self._arriving else 0.0) * kept + tokens * (1 - kept))
        now = len(self._traffic) - 1
        asked_for = [
            self._most(second - round(FINAL_AFTER_S))
            for second in range(max(0, now - round(DEFAULT_STARTUP_S) + 1), now + 1)
        ]
        return self._most(now), min(asked_for), tokens

    def late(self, share: float, sizes: list[tuple[float, float, float]]) -> list[bool]:
        """Of each second, whether the fleet with this share was."""
        backlog, late, starting = 0.0, [], round(DEFAULT_STARTUP_S + FINAL_AFTER_S + 4 * ARRIVALS_OVER_S)
        for second, (_, running, tokens) in enumerate(sizes):
            if second < starting:
                late.append(False)
                continue
            capacity = max(WORKING_FRACTION * running / share, SPEED)
            backlog = max(0.0, backlog + tokens - capacity)
            late.append(backlog > LATE_FRACTION * capacity)
        return late

    def _most(self, now: int) -> float:
        return max(self._arriving[max(0, now - self._hold + 1) : now + 1], default=0.0) if now >= 0 else 0.0


@pytest.mark.parametrize("seed", range(3))
def test_fleets_are_reckoned_as_they_are_slowly(seed: int) -> None:
    """The pair that is followed: the largest share of each hold that was not late, and of these the fewest replicas."""
    chance = random.Random(seed)
    traffic = [
        chance.choice([0.0, 200.0, 900.0, 1100.0]) * (chance.choice([3, 5]) if chance.random() < 0.02 else 1)
        for _ in range(420)
    ]
    traffic[0] = 1000.0
    found = learnt(traffic, hold_s=20.0)
    with_traffic = list(itertools.accumulate(tokens > 0 for tokens in traffic))
    pairs = []
    for times in WINDOW_FACTORS:
        fleet = Fleet(times * 20.0)
        sizes = [fleet.second(tokens) for tokens in traffic]
        late = {share: fleet.late(share, sizes) for share in UTILIZATIONS}
        share = math.inf
        for now in range(int(LEARNING_S) - 1, len(traffic)):
            known = [second for second in range(now + 1) if with_traffic[second] > with_traffic[now] - MEMORY_S]
            good = [share for share in UTILIZATIONS if not any(late[share][second] for second in known)]
            share = min(max(good, default=UTILIZATIONS[-1]), share * MAX_RISE_PER_MINUTE ** (1 / 60))
        asked_for = [0.0] * round(FINAL_AFTER_S) + [most for most, *_ in sizes[: -round(FINAL_AFTER_S)]]
        aged = sum(most * math.exp(-age / MEMORY_S) for age, most in enumerate(reversed(asked_for)))
        pairs.append((aged / share, share, times * 20.0, sizes[-1][0] / share))
    _, share, hold_s, wanted = min(pairs)
    assert found.utilization == pytest.approx(share)
    assert found.window_s == hold_s
    assert found.target_tokens_per_s == pytest.approx(wanted)


def test_each_seconds_work_from_counters() -> None:
    """Two replicas that report at other times, one of them anew after a restart; nothing is counted twice."""
    given_work = ArrivalSeries()
    assert given_work.final_seconds(100.0 + FINAL_AFTER_S, {}) == []
    first = {
        "a": [Sample(100.0, 50.0), Sample(101.0, 150.0), Sample(103.0, 350.0)],
        "b": [Sample(100.5, 0.0), Sample(101.5, 60.0)],
    }
    assert given_work.final_seconds(100.0 + FINAL_AFTER_S, first) == []
    assert given_work.final_seconds(102.0 + FINAL_AFTER_S, first) == pytest.approx([100 + 30, 100 + 30])
    # b is gone; a begins again at 0.
    assert given_work.final_seconds(
        104.0 + FINAL_AFTER_S, {"a": [Sample(103.5, 0.0), Sample(104.0, 20.0)]}
    ) == pytest.approx([100, 20])


def test_a_long_pause_is_not_reckoned_second_by_second() -> None:
    given_work = ArrivalSeries()
    given_work.final_seconds(0.0, {"a": [Sample(0.0, 0.0)]})
    assert len(given_work.final_seconds(1e9, {"a": [Sample(1e9, 5.0)]})) <= 3600


def test_the_scaler_uses_it_unless_it_is_told() -> None:
    """2000 tokens a second at 100 each: 20 replicas that are always busy."""

    def asked(target_utilization: float | None) -> int:
        scaler = VisualScaler(ScalingTargets(target_utilization=target_utilization, max_scale_up_factor=100))
        load = VisualLoad(0.0, 40, 40, 0.0, 0.0, 2000.0, SPEED, 10.0)
        for second in range(600):
            given_tokens = {"a": [Sample(float(second), 2000.0 * second)]}
            found = scaler.choose_replicas(
                dataclasses.replace(load, now_s=float(second), received_tokens=given_tokens),
                min_replicas=1,
                max_replicas=90,
            )
        return found

    assert (asked(None), asked(0.5), asked(1.0)) == (math.ceil(20 / STEADY_SHARE), 40, 20)
