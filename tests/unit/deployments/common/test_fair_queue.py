"""Whose turn it is in an encoder replica, in a virtual clock: small requests pass large ones, nobody waits for ever."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.common.fair_queue import MAX_YIELD_S, FairQueue, virtual_arrival_s
from deployments.encoder_replica.decode.pool import FairSemaphore

SPEED = 1000.0


@dataclass(frozen=True)
class Arrival:
    at_s: float
    tokens: int
    tokens_before: int
    number: int = 0

    @property
    def place(self) -> float:
        return virtual_arrival_s(self.at_s, tokens=self.tokens, tokens_before=self.tokens_before, tokens_per_s=SPEED)


def request(at_s: float, *tokens: int) -> list[Arrival]:
    return [Arrival(at_s, count, sum(tokens[:number])) for number, count in enumerate(tokens)]


def served(arrivals: list[Arrival], speed: float = SPEED) -> dict[Arrival, float]:
    """When each begins on a device that does one at a time, whoever is first in line."""
    coming = sorted(arrivals, key=lambda one: one.at_s)
    line: FairQueue[Arrival] = FairQueue()
    began: dict[Arrival, float] = {}
    now = 0.0
    while coming or line:
        if not line:
            now = max(now, coming[0].at_s)
        while coming and coming[0].at_s <= now:
            line.add(coming[0].place, coming.pop(0))
        first = line.pop()
        began[first] = now
        now += first.tokens / speed
    return began


def test_a_small_request_passes_the_rest_of_a_large_one() -> None:
    """Sixteen images of 100 ms each; what comes after 50 ms begins when the image that is under way ends."""
    large, small = request(0.0, *[100] * 16), request(0.05, 4)
    began = served(large + small)
    assert began[small[0]] == pytest.approx(0.1)
    assert began[large[15]] == pytest.approx(1.504)


def test_equal_requests_are_complete_one_after_the_other_if_their_images_have_one_place() -> None:
    """Four images of 100 ms each, ten milliseconds apart: otherwise all of the first images come first."""
    first, second = ([Arrival(at_s, 100, 300, number) for number in range(4)] for at_s in (0.0, 0.01))
    began = served([*first, *second])
    assert max(began[one] for one in first) == pytest.approx(0.3)
    first, second = request(0.0, *[100] * 4), request(0.01, *[100] * 4)
    assert max(served([*first, *second])[one] for one in first) == pytest.approx(0.6)


def test_small_requests_without_end_starve_no_large_one() -> None:
    """The device is half as fast as what arrives; the large one begins before any that came MAX_YIELD_S after it."""
    large = request(1.0, 100_000)
    small = [one for number in range(10_000) for one in request(number * 0.001 + number * 1e-9, 2)]
    began = served(large + small)
    overtook = [one for one in small if began[one] < began[large[0]] and one.at_s > large[0].at_s]
    assert overtook
    assert max(one.at_s for one in overtook) <= large[0].at_s + MAX_YIELD_S


def test_without_a_known_speed_it_goes_by_age() -> None:
    assert virtual_arrival_s(5.0, tokens=9000, tokens_before=9000, tokens_per_s=0) == 5.0


@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.lists(st.integers(1, 20_000), min_size=1, max_size=5)), min_size=1, max_size=30
    ),
    st.floats(10, 10_000),
)
def test_nobody_is_overtaken_by_what_comes_long_after(asked: list[tuple[float, list[int]]], speed: float) -> None:
    """Whatever comes, and however fast the device really is."""
    arrivals = [one for number, (at_s, tokens) in enumerate(asked) for one in request(at_s + number * 1e-6, *tokens)]
    began = served(arrivals, speed)
    assert len(began) == len(set(arrivals)), "everybody gets a turn"
    for one in began:
        for other in began:
            if began[other] < began[one]:
                assert other.at_s <= one.at_s + MAX_YIELD_S
            elif one.at_s + MAX_YIELD_S < other.at_s:
                assert began[one] <= began[other]


def test_turns_come_by_place_and_those_who_leave_hold_up_nobody() -> None:
    async def play() -> list[str]:
        turns, order = FairSemaphore(1), []

        async def take(name: str, place: float) -> None:
            await turns.acquire(place)
            order.append(name)

        await take("first", 0.0)
        waiting = [asyncio.create_task(take(name, place)) for name, place in (("c", 3), ("a", 1), ("b", 2), ("d", 4))]
        await asyncio.sleep(0)
        waiting[2].cancel()  # b, as it waits
        turns.release()
        waiting[1].cancel()  # a, as its turn has just come
        await asyncio.gather(*waiting[1:3], return_exceptions=True)
        assert order == ["first", "c"]
        turns.release()
        turns.release()
        await asyncio.gather(*waiting, return_exceptions=True)
        await take("e", 0.0)
        return order

    assert asyncio.run(asyncio.wait_for(play(), 10)) == ["first", "c", "d", "e"]
