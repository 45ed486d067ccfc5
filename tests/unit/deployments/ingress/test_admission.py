"""Who may start, in a clock of the test's own: bounds that hold, a line that goes on, room that is given back once.

One file, since the bounds are tried one by one and then, by the state machine at its end, all of them together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from configs.schema import IngressConfig
from deployments.common.api_error import ApiError, OverloadedError, Shed
from deployments.ingress.admission import MAX_YIELD_S, Admission, Visit, _Stage
from deployments.telemetry.metrics import AdmissionMetrics

LIMITS = IngressConfig().model_copy(
    update={
        "max_requests_waiting": 8,
        "max_visual_tokens_in_flight": 100,
        "max_images_in_flight": 10,
        "max_visual_tokens_queued": 250,
    }
)
"""Smaller than a request may be."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Seen(AdmissionMetrics):
    """What the metrics are told."""

    def __init__(self) -> None:
        self.level = (0, 0, 0)
        self.tokens_admitted = 0
        self.tokens_shed: Counter[Shed] = Counter()
        self.requests_shed: Counter[Shed] = Counter()

    def levels(self, *, requests: int, tokens_waiting: int, tokens_in_flight: int) -> None:
        self.level = (requests, tokens_waiting, tokens_in_flight)

    def admitted(self, tokens: int) -> None:
        self.tokens_admitted += tokens

    def shed(self, reason: Shed, tokens: int) -> None:
        self.requests_shed[reason] += 1
        self.tokens_shed[reason] += tokens


class Scene:
    """An admission, its clock and what it told."""

    def __init__(self, **limits: int) -> None:
        self.clock, self.seen = Clock(), Seen()
        self.admission = Admission(LIMITS.model_copy(update=limits), self.seen, clock=self.clock)

    def asks(self, tokens: int, images: int = 1) -> Visit:
        visit = self.admission.arrive()
        visit.request(tokens, images)
        return visit

    def does(self, tokens: int, seconds: float) -> None:
        """Has a speed measured."""
        visit = self.asks(tokens)
        self.clock.now += seconds
        visit.accept()


def begun(*visits: Visit) -> list[bool]:
    return [visit.stage is _Stage.IN_FLIGHT for visit in visits]


def test_what_fits_begins_and_the_rest_waits_its_turn() -> None:
    scene = Scene()
    visits = [scene.asks(40) for _ in range(4)]
    assert begun(*visits) == [True, True, False, False]
    assert scene.seen.level == (4, 80, 80)
    visits[1].accept()
    assert begun(*visits[2:]) == [True, False]
    visits[0].leave()
    assert begun(*visits[2:]) == [True, True]
    assert scene.seen.level == (2, 0, 80)
    assert scene.seen.tokens_admitted == 160


def test_tokens_are_counted_once_however_often_they_are_admitted() -> None:
    """Deferred images are charged beside those admitted before, and after the loss of a replica all wait again."""
    scene = Scene()
    visit = scene.asks(40)
    visit.request(20, 1)
    assert scene.seen.tokens_admitted == 60
    visit.accept()
    asyncio.run(visit.requeue())
    assert begun(visit) == [True]
    assert scene.seen.tokens_admitted == 60


def test_images_are_bounded_where_tokens_are_not() -> None:
    scene = Scene()
    first, second = scene.asks(6, images=6), scene.asks(6, images=6)
    assert begun(first, second) == [True, False]
    first.accept()
    assert begun(second) == [True]


def test_text_counts_as_a_request_and_waits_for_nothing() -> None:
    scene = Scene(max_requests_waiting=3)
    scene.asks(100)
    scene.asks(100)
    text = scene.admission.arrive()
    with pytest.raises(OverloadedError, match="3 requests wait for a language model, the limit"):
        scene.admission.arrive()
    text.accept()
    scene.admission.arrive()
    assert scene.seen.requests_shed == {Shed.REQUESTS: 1}


def test_who_finds_no_room_in_line_is_refused_alone() -> None:
    scene = Scene()
    scene.asks(100)
    waiting = [scene.asks(100), scene.asks(100)]
    with pytest.raises(OverloadedError, match="200 visual tokens wait, 60 more would pass 250"):
        scene.asks(60)
    scene.asks(50)
    assert begun(*waiting) == [False, False]
    assert (scene.seen.level, scene.seen.tokens_shed) == ((4, 250, 100), {Shed.TOKENS: 60})


def test_a_small_request_overtakes_a_large_one_that_came_just_before() -> None:
    """At 10 tokens a second a request of 80 yields for 8 s."""
    for later_s, overtakes in ((2.0, True), (8.1, False)):
        scene = Scene()
        scene.does(100, 10)
        running = scene.asks(100)
        large = scene.asks(80)
        scene.clock.now += later_s
        small = scene.asks(30)
        running.accept()
        assert begun(large, small) == [not overtakes, overtakes]


def test_before_a_speed_is_measured_the_line_goes_by_age() -> None:
    scene = Scene()
    running, large, small = scene.asks(100), scene.asks(100), scene.asks(1)
    running.accept()
    assert begun(large, small) == [True, False]


def test_a_standstill_makes_nobody_yield_for_ever() -> None:
    scene = Scene()
    scene.does(100, 1)
    running = scene.asks(100)
    scene.clock.now += 3600
    large = scene.asks(100)
    scene.clock.now += MAX_YIELD_S + 0.1
    small = [scene.asks(1) for _ in range(3)]
    running.accept()
    assert begun(large, *small) == [True, False, False, False]


def test_a_flood_of_small_requests_does_not_starve_a_large_one() -> None:
    """At any moment another small one waits: the large one begins all the same, in the time that it yields."""
    scene = Scene(max_requests_waiting=100)
    scene.does(100, 10)
    running = [scene.asks(10) for _ in range(10)]
    large = scene.asks(100)
    asked_at = scene.clock.now
    while not begun(large)[0]:
        running.append(scene.asks(10))
        scene.clock.now += 1
        running.pop(0).accept()
        assert scene.clock.now - asked_at < 2 * MAX_YIELD_S + 10
    assert scene.admission.tokens_in_flight == 100


def test_large_requests_do_not_starve_a_small_one() -> None:
    """Twenty that fill everything came just before; it waits for the one under way and no other."""
    scene = Scene(max_requests_waiting=100, max_visual_tokens_queued=10_000)
    scene.does(100, 10)
    running, *waiting = [scene.asks(100) for _ in range(20)]
    scene.clock.now += 1
    small = scene.asks(2)
    running.accept()
    assert begun(small, *waiting) == [True] + [False] * 19


def test_retry_after_is_the_time_that_the_backlog_takes() -> None:
    scene = Scene(max_requests_waiting=100)
    assert scene.admission.retry_after_s() == 2  # nothing is known yet
    scene.does(100, 10)  # 10 tokens and 0.1 requests a second
    scene.asks(50)
    assert scene.admission.retry_after_s() == 10  # one request
    scene.asks(100)
    scene.asks(100)
    assert scene.admission.retry_after_s() == 30  # 250 tokens would be 25 s, three requests 30
    scene.asks(1)
    assert scene.admission.retry_after_s() == 30  # the most


def test_retry_after_grows_in_a_standstill_to_its_bound() -> None:
    scene = Scene()
    for _ in range(100):
        scene.does(100, 0.1)
    scene.asks(100)
    assert scene.admission.retry_after_s() == 2
    scene.clock.now += 60
    assert 2 < scene.admission.retry_after_s() <= 30
    scene.clock.now += 1e9
    assert scene.admission.retry_after_s() == 30


def test_a_request_whose_replica_was_lost_comes_back_to_its_old_place() -> None:
    """Nobody takes its turn, and it is not refused: it was let in, and may pass the bounds on what waits."""

    async def scenario() -> None:
        scene = Scene(max_requests_waiting=2, max_visual_tokens_queued=60)
        lost = scene.asks(60)
        scene.clock.now += 1
        lost.accept()
        running = scene.asks(100)
        other = scene.asks(60)
        again = asyncio.create_task(lost.requeue())
        await asyncio.sleep(0)
        assert scene.seen.level == (3, 120, 100)
        with pytest.raises(OverloadedError):
            scene.admission.arrive()
        running.accept()
        await asyncio.wait_for(again, 1)
        assert begun(lost, other) == [True, False]
        await lost.requeue()  # it was not accepted since
        assert scene.seen.level == (2, 60, 60)
        lost.leave()
        other.leave()
        assert scene.seen.level == (0, 0, 0)

    asyncio.run(scenario())


def test_what_turns_out_to_be_needed_is_waited_for_in_line() -> None:
    """It gives its room back meanwhile: two that wait for each other's would wait for ever."""

    async def scenario() -> None:
        scene = Scene()
        one, other = scene.asks(60), scene.asks(40)
        one.request(20, 3)
        other.request(30, 1)
        assert begun(one, other) == [True, False]
        assert scene.seen.level == (2, 70, 80)
        one.accept()
        await asyncio.wait_for(other.wait_until_admitted(), 1)
        assert (begun(other), scene.seen.level) == ([True], (1, 0, 70))
        other.leave()
        assert scene.seen.level == (0, 0, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(("tokens", "images"), [(41, 1), (1, 9)])
def test_more_than_ever_fits_is_refused(tokens: int, images: int) -> None:
    scene = Scene(max_images_in_flight=8)
    visit = scene.asks(60)
    with pytest.raises(ApiError, match=r"must be encoded, the limit is"):
        visit.request(tokens, images)
    visit.leave()
    assert scene.seen.level == (0, 0, 0)


def test_text_whose_replica_was_lost_waits_for_no_image() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.asks(100)
        scene.asks(100)
        text = scene.admission.arrive()
        text.accept()
        await asyncio.wait_for(text.requeue(), 1)
        assert scene.seen.level == (3, 100, 100)
        text.leave()
        assert scene.seen.level == (2, 100, 100)

    asyncio.run(scenario())


def test_a_visit_that_ends_any_way_gives_its_room_back_once() -> None:
    scene = Scene()
    visit = scene.asks(60)
    visit.accept()
    visit.accept()
    visit.leave(Shed.CLIENT_GONE)
    assert scene.seen.level == (0, 0, 0)
    assert not scene.seen.requests_shed


@pytest.mark.parametrize(("late", "reason"), [(True, Shed.DEADLINE), (False, Shed.CLIENT_GONE)])
@pytest.mark.parametrize("in_line", [True, False])
def test_a_request_that_is_cancelled_leaves(in_line: bool, late: bool, reason: Shed) -> None:
    async def scenario() -> None:
        scene = Scene()
        running = scene.asks(100 if in_line else 1)

        async def visit() -> None:
            with scene.admission.visit(lambda: late) as own:
                own.request(60, 1)
                await own.wait_until_admitted()
                await asyncio.Event().wait()

        task = asyncio.create_task(visit())
        await asyncio.sleep(0)
        assert scene.admission.requests == 2
        task.cancel()
        await asyncio.wait([task])
        assert scene.seen.tokens_shed == {reason: 60}
        assert scene.admission.requests == 1
        running.accept()
        assert scene.seen.level == (0, 0, 0)

    asyncio.run(scenario())


def test_a_turn_that_came_as_its_request_was_cancelled_goes_to_the_next() -> None:
    async def scenario() -> None:
        scene = Scene()
        running = scene.asks(100)
        began = []

        async def visit(number: int) -> None:
            with scene.admission.visit(lambda: False) as own:
                own.request(100, 1)
                await own.wait_until_admitted()
                began.append(number)

        tasks = [asyncio.create_task(visit(number)) for number in range(2)]
        await asyncio.sleep(0)
        running.accept()
        tasks[0].cancel()
        await asyncio.wait(tasks)
        assert began == [1]
        assert scene.seen.level == (0, 0, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("bound", "limit"),
    [
        ("max_visual_tokens_in_flight", "max_visual_tokens_per_request"),
        ("max_images_in_flight", "max_images_per_request"),
        ("max_retry_after_s", "retry_after_s"),
    ],
)
def test_a_bound_that_the_largest_request_would_never_fit_is_refused(bound: str, limit: str) -> None:
    IngressConfig.model_validate({bound: 7, limit: 7})
    with pytest.raises(ValueError, match=f"{bound} is 6, less than {limit}, 7"):
        IngressConfig.model_validate({bound: 6, limit: 7})


ASKING = (_Stage.ARRIVED, _Stage.IN_FLIGHT)


class Comings(RuleBasedStateMachine):
    """Requests that come, go, succeed and fail in any order; what is held is what those who hold it asked for."""

    @initialize(requests=st.integers(1, 12), tokens=st.integers(1, 100), images=st.integers(1, 10))
    def start(self, requests: int, tokens: int, images: int) -> None:
        self.scene = Scene(
            max_requests_waiting=requests,
            max_visual_tokens_in_flight=tokens,
            max_images_in_flight=images,
            max_visual_tokens_queued=2 * tokens,
        )
        self.visits: list[Visit] = []
        self.most = (tokens, images)

    def _pick(self, choice: int) -> Visit:
        return self.visits.pop(choice % len(self.visits))

    @rule()
    def arrives(self) -> None:
        with contextlib.suppress(OverloadedError):
            self.visits.append(self.scene.admission.arrive())

    @precondition(lambda self: any(visit.stage in ASKING for visit in self.visits))
    @rule(choice=st.integers(0), tokens=st.floats(0, 1), images=st.floats(0, 1))
    def asks(self, choice: int, tokens: float, images: float) -> None:
        """Once it has arrived, and again while it is in flight."""
        asking = [visit for visit in self.visits if visit.stage in ASKING]
        visit = asking[choice % len(asking)]
        room = self.most[0] - visit.tokens, self.most[1] - visit.images
        try:
            visit.request(round(tokens * room[0]), round(images * room[1]))
        except OverloadedError:
            self.visits.remove(visit)

    @precondition(lambda self: self.visits)
    @rule(choice=st.integers(0), how=st.sampled_from(["accepted", "left", "shed", "twice"]))
    def ends(self, choice: int, how: str) -> None:
        visit = self._pick(choice)
        ends: dict[str, list[Callable[[], None]]] = {
            "accepted": [visit.accept],
            "left": [visit.leave],
            "shed": [lambda: visit.leave(Shed.CLIENT_GONE)],
            "twice": [visit.leave, visit.accept, visit.leave],
        }
        for end in ends[how]:
            end()

    @rule(seconds=st.floats(0, 100))
    def passes(self, seconds: float) -> None:
        self.scene.clock.now += seconds

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "scene"):
            return
        admission, limits = self.scene.admission, self.scene.admission._limits
        flying = [visit for visit in self.visits if visit.stage is _Stage.IN_FLIGHT]
        waiting = [visit for visit in self.visits if visit.stage is _Stage.QUEUED]
        assert admission.requests == len(self.visits) <= limits.max_requests_waiting
        assert admission.tokens_in_flight == sum(visit.tokens for visit in flying) <= limits.max_visual_tokens_in_flight
        assert admission.images_in_flight == sum(visit.images for visit in flying) <= limits.max_images_in_flight
        assert admission.tokens_queued == sum(visit.tokens for visit in waiting) <= limits.max_visual_tokens_queued
        assert self.scene.seen.level == (admission.requests, admission.tokens_queued, admission.tokens_in_flight)
        assert LIMITS.retry_after_s <= admission.retry_after_s() <= LIMITS.max_retry_after_s
        assert flying or not waiting, "a line without anybody under way would never move"
        if waiting:
            first = admission._queue[0]
            assert first.virtual_arrival_s == min(visit.virtual_arrival_s for visit in waiting)
            room = (limits.max_visual_tokens_in_flight - admission.tokens_in_flight, limits.max_images_in_flight)
            assert first.tokens > room[0] or first.images > room[1] - admission.images_in_flight

    def teardown(self) -> None:
        """Everybody gets a turn when those before have ended."""
        if not hasattr(self, "scene"):
            return
        while self.visits:
            flying = [visit for visit in self.visits if visit.stage is not _Stage.QUEUED]
            flying[0].accept()
            self.visits.remove(flying[0])
        assert self.scene.seen.level == (0, 0, 0)


TestComings = Comings.TestCase
TestComings.settings = settings(max_examples=150, stateful_step_count=40)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 100), st.floats(0, 3)), min_size=2, max_size=40),
    st.floats(0.1, 1000),
)
def test_nobody_is_overtaken_by_who_comes_much_later(arrivals: list[tuple[int, float]], speed: float) -> None:
    scene = Scene(max_requests_waiting=100, max_visual_tokens_queued=10_000)
    scene.does(100, 100 / speed)
    running = scene.asks(100)
    asked: list[tuple[float, Visit]] = []
    order: list[Visit] = []
    for tokens, later_s in arrivals:
        scene.clock.now += later_s
        asked.append((scene.clock.now, scene.asks(tokens)))
    running.accept()
    while len(order) < len(asked):
        flying = [visit for _, visit in asked if visit.stage is _Stage.IN_FLIGHT]
        order += [visit for visit in flying if visit not in order]
        flying[0].accept()
    at = {visit: moment for moment, visit in asked}
    for turn, visit in enumerate(order):
        for earlier in order[:turn]:
            assert at[earlier] <= at[visit] + MAX_YIELD_S
            if at[earlier] > at[visit]:
                assert earlier.tokens < visit.tokens, "only a smaller one overtakes"
