"""How fast work comes and goes, in a clock of the test's own."""

from __future__ import annotations

import contextlib

import pytest

from deployments.common.throughput import ARRIVALS_OVER_S, BEST_SPEED_OVER_S, SPEED_OVER_S, BusySpeed, InFlightTokens


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_work_is_under_way_until_it_ends_or_fails() -> None:
    work = InFlightTokens(Clock())
    with work.job(100):
        with contextlib.suppress(RuntimeError), work.job(30):
            assert work.tokens == 130
            raise RuntimeError
        assert work.tokens == 100
    assert work.tokens == 0


def test_tokens_before_a_place_in_the_queue() -> None:
    work = InFlightTokens(Clock())
    with work.job(100, 2.0), work.job(100, 2.0):
        with work.job(30, 1.0):
            assert [work.tokens_before(place) for place in (0.5, 1.0, 1.5, 2.0)] == [0, 30, 30, 230]
        assert work.tokens_before(1.5) == 0
    assert work.tokens_before(9.0) == 0


def test_the_size_of_jobs_is_right_or_unknown_after_hours_without_one() -> None:
    """Both sums decayed until they were rounded: a mean of 1,000 tokens was 1 after an hour, for good."""
    clock = Clock()
    work = InFlightTokens(clock)
    for _ in range(100):
        with work.job(1000):
            clock.now += 0.1
    means = []
    for _ in range(20_000):
        clock.now += 0.5
        assert work.arriving_tokens_per_s() >= 0
        means.append(work.tokens_per_job())
    assert all(mean in (0, pytest.approx(1000)) for mean in means)
    assert means[0] == pytest.approx(1000)
    assert means[-1] == 0
    with work.job(50):
        assert work.tokens_per_job() == pytest.approx(50)


def test_arrivals_of_a_steady_stream() -> None:
    """One job of 50 tokens every 20 ms is 2500 tokens a second; a few seconds after the last there are next to none."""
    clock = Clock()
    work = InFlightTokens(clock)
    assert (work.arriving_tokens_per_s(), work.tokens_per_job()) == (0, 0)
    for _ in range(2000):
        clock.now += 0.02
        with work.job(50):
            pass
    assert work.arriving_tokens_per_s() == pytest.approx(2500, rel=0.01)
    assert work.tokens_per_job() == pytest.approx(50)
    clock.now += 10 * ARRIVALS_OVER_S
    assert work.arriving_tokens_per_s() < 1
    assert work.tokens_per_job() == pytest.approx(50)
    clock.now += 1e5
    assert (work.arriving_tokens_per_s(), work.tokens_per_job()) == (0, 0)


def test_speed_counts_busy_time_only() -> None:
    clock = Clock()
    speed = BusySpeed(clock)
    assert speed.tokens_per_s == 0
    for _ in range(100):
        speed.begin()
        clock.now += 0.1
        speed.end(200)
        clock.now += 60
    assert speed.tokens_per_s == pytest.approx(2000)


def test_jobs_side_by_side_take_their_time_once() -> None:
    """Two batches of four jobs, one after the other, 0.1 s each: 8 × 100 tokens in 0.2 s."""
    clock = Clock()
    speed = BusySpeed(clock)
    for _ in range(8):
        speed.begin()
    for _ in range(2):
        clock.now += 0.1
        for _ in range(4):
            speed.end(100)
    assert speed.tokens_per_s == pytest.approx(4000, rel=0.01)


def test_small_batches_do_not_pass_for_a_slow_replica() -> None:
    clock = Clock()
    speed = BusySpeed(clock)

    def batches(number: int, tokens: int, seconds: float) -> None:
        for _ in range(number):
            speed.begin()
            clock.now += seconds
            speed.end(tokens)

    batches(100, 4000, 0.05)
    batches(1000, 200, 0.02)
    assert 75_000 < speed.tokens_per_s <= 80_000
    batches(100, int(10 * BEST_SPEED_OVER_S), 0.1 * BEST_SPEED_OVER_S)  # as slow as 100 a second, and busy all the time
    assert speed.tokens_per_s == pytest.approx(100, rel=0.05)


def test_what_was_dropped_was_not_done() -> None:
    clock = Clock()
    speed = BusySpeed(clock)
    speed.begin()
    speed.begin()
    clock.now += 1
    speed.end(0)
    speed.end(500)
    assert speed.tokens_per_s == pytest.approx(500)


def test_recent_speed_falls_while_nothing_is_done() -> None:
    """The best speed stays: a standstill says nothing of how many replicas are worth while."""
    clock = Clock()
    speed = BusySpeed(clock)
    assert speed.recent_tokens_per_s == 0
    speed.begin()
    for _ in range(1000):
        speed.begin()
        clock.now += 0.1
        speed.end(100)
    assert speed.recent_tokens_per_s == pytest.approx(1000, rel=0.02)
    clock.now += SPEED_OVER_S
    assert 100 < speed.recent_tokens_per_s < 300
    clock.now += 1e9
    assert 0 < speed.recent_tokens_per_s < 1e-6
    assert speed.tokens_per_s == pytest.approx(1000, rel=0.1)
