"""A slow encoder and a second call: when there is one, which counts, who is cancelled; then on a real Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from deployments import hedging
from deployments.hedging import Begun, Hedging
from deployments.metrics import Count, Counts
from deployments.shared_calls import SharedCall
from tests.unit.deployments.conftest import Cluster, ServedApp, deploy, until
from tests.unit.deployments.samples import png
from tests.unit.deployments.test_served_images import ask, ask_all, chat

AFTER_S = 0.01


class Response:
    """`taken`: whether a replica has the call; `there`: whether it has answered."""

    def __init__(self, *, taken: bool = True, there: bool = False) -> None:
        self.taken, self.there, self.cancelled = taken, there, False

    def cancel(self) -> None:
        self.cancelled = True


class Answer(AsyncIterator[str]):
    def __init__(self) -> None:
        self.begins = asyncio.Event()
        self.cancelled = False

    async def __anext__(self) -> str:
        await self.begins.wait()
        return "piece"

    def cancel(self) -> None:
        self.cancelled = True


class Told:
    def __init__(self) -> None:
        self.counts: list[Count] = []

    def add(self, count: Count) -> None:
        self.counts.append(count)


@pytest.fixture(autouse=True)
def looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ready(response: Response) -> bool | None:
        return response.there if response.taken else None

    monkeypatch.setattr(hedging, "ready", ready)


class Scene:
    """One call, a second one for it, and an answer that waits."""

    def __init__(self, *responses: Response) -> None:
        self.told = Told()
        self.hedging = Hedging(AFTER_S, cast(Counts, self.told))
        self.calls = [SharedCall(str(number), response) for number, response in enumerate(responses)]
        self.spares: list[Response] = []
        self.answer = Answer()
        self.begun = asyncio.Event()

    def _spare(self) -> Response:
        self.spares.append(Response())
        self.begun.set()
        return self.spares[-1]

    def hurried(self, answer: Answer | None = None) -> Coroutine[Any, Any, bool]:
        return self.hedging.hurried(Begun(answer or self.answer), self.calls, [self._spare] * len(self.calls))

    async def both_under_way(self) -> None:
        await self.begun.wait()


def test_an_answer_that_begins_in_time_is_left_alone() -> None:
    async def scenario() -> None:
        scene = Scene(Response())
        scene.answer.begins.set()
        begun: Begun[str] = Begun(scene.answer)
        assert not await scene.hedging.hurried(begun, scene.calls, [scene._spare])
        assert (await anext(begun), await anext(begun)) == ("piece", "piece")
        assert scene.spares == []

    asyncio.run(scenario())


@pytest.mark.parametrize("response", [Response(there=True), Response(taken=False)])
def test_what_does_not_wait_for_an_encoder_at_work_is_left_alone(response: Response) -> None:
    """It waits for a language model; or for any encoder at all, and a second call would wait as long."""

    async def scenario() -> None:
        scene = Scene(response)
        assert not await scene.hurried()
        assert (scene.spares, scene.answer.cancelled) == ([], False)

    asyncio.run(scenario())


def test_the_second_is_first() -> None:
    async def scenario() -> None:
        fast, slow = Response(there=True), Response()
        scene = Scene(fast, slow)
        waiting = asyncio.create_task(scene.hurried())
        await scene.both_under_way()
        (spare,) = scene.spares
        spare.there = True
        assert await waiting
        assert [call.response for call in scene.calls] == [fast, spare]
        assert (slow.cancelled, spare.cancelled, fast.cancelled, scene.answer.cancelled) == (True, False, False, True)
        assert scene.told.counts == [Count.HEDGES, Count.HEDGES_WON]

    asyncio.run(scenario())


def test_the_first_is_first_after_all() -> None:
    async def scenario() -> None:
        slow = Response()
        scene = Scene(slow)
        waiting = asyncio.create_task(scene.hurried())
        await scene.both_under_way()
        slow.there = True
        assert await waiting
        assert scene.calls[0].response is slow
        assert (slow.cancelled, scene.spares[0].cancelled) == (False, True)
        assert scene.told.counts == [Count.HEDGES]

    asyncio.run(scenario())


def test_never_a_third_call_for_one_image() -> None:
    """Two requests share it; then the second call, which won, is slow to be used by a third request."""

    async def scenario() -> None:
        scene = Scene(Response())
        both = [asyncio.create_task(scene.hurried(Answer())) for _ in range(2)]
        await scene.both_under_way()
        await asyncio.sleep(2 * AFTER_S)
        scene.spares[0].there = True
        assert await asyncio.gather(*both) == [True, True]
        scene.spares[0].there = False
        assert await scene.hurried(Answer())
        assert len(scene.spares) == 1

    asyncio.run(scenario())


def test_one_who_leaves_does_not_end_the_race_for_the_other() -> None:
    async def scenario() -> None:
        scene = Scene(Response())
        leaves, stays = (asyncio.create_task(scene.hurried(Answer())) for _ in range(2))
        await scene.both_under_way()
        leaves.cancel()
        await asyncio.wait({leaves})
        scene.spares[0].there = True
        assert await stays

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def hedged(cluster: Cluster, checkpoints: dict[str, Path]) -> Iterator[ServedApp]:
    from ray import serve

    ingress = {"hedge_after_s": 0.3, "by_grpc": False}
    yield deploy(cluster, checkpoints["qwen3_vl"], "hedged", encoders=2, ingress=ingress, max_queued_tokens=10_000)
    serve.delete("hedged")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_ray_alone_brings_the_same_answers(hedged: ServedApp, app: ServedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gRPC does: of text, and of a picture that is asked about again."""
    monkeypatch.undo()
    text = {"messages": [{"role": "user", "content": "Hello"}]}
    body = chat(png(96, 64, (5, 5, 5)))
    before = app.ingress("counts")["CALLS_BY_GRPC"]
    by_ray, by_grpc = (
        [answer.json()["images"] for answer in map(partial(ask, asked), (text, body, body))] for asked in (hedged, app)
    )
    assert by_ray[0] == by_grpc[0] == []
    for one, other in zip(by_ray[1:], by_grpc[1:], strict=True):
        assert one[0]["norm"] == pytest.approx(other[0]["norm"], rel=1e-4)
    assert app.ingress("counts")["CALLS_BY_GRPC"] - before == 2, "the first look at the picture is one of an encoder"
    assert hedged.ingress("counts")["CALLS_BY_GRPC"] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_an_encoder_that_stands_still_holds_nobody_up(hedged: ServedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has is encoded by the other one, and it is told that nobody wants it any more."""
    monkeypatch.undo()
    files = [png(64, 64, (1, 77, number)) for number in range(16)]
    hedged.encoder("hold")
    answers = ask_all(hedged, [chat(file, file) for file in files])
    assert [answer.status_code for answer in answers] == [200] * len(files)
    found = [answer.json()["images"][0]["first"] for answer in answers]
    counts = hedged.ingress("counts")
    assert 1 <= counts["HEDGES_WON"] <= counts["HEDGES"] <= len(files)
    until(lambda: not any(state["flights"] for state in hedged.encoders("state")), "the losers to be cancelled")
    hedged.encoders("release")
    again = ask_all(hedged, [chat(file) for file in files])
    assert [answer.json()["images"][0]["first"] for answer in again] == [pytest.approx(one, abs=1e-4) for one in found]
