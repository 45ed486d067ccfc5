"""Whether there are encoders: when that is asked, what "none" takes, and how it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from deployments import encoder_watch
from deployments.encoder_watch import EncoderWatch, NoEncoderError

AFTER_S = 0.01
UNAVAILABLE = DeploymentUnavailableError(cast(Any, "Encoder"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_watch, "PROMPT_S", 0.001)
    monkeypatch.setattr(encoder_watch, "AGAIN_S", 0.001)


class Encoders:
    """`running` of them; what they are asked is answered when `answer` has the answer."""

    def __init__(self, running: int = 0) -> None:
        self.running = running
        self.asked = self.looked = 0
        self.answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.watch = EncoderWatch(self._ask, self._any_there, after_s=AFTER_S)

    async def _ask(self) -> object:
        self.asked += 1
        return await asyncio.shield(self.answer)

    async def _any_there(self) -> bool:
        self.looked += 1
        return self.running > 0

    async def until(self, none_there: bool) -> None:
        while self.watch.none_there != none_there:  # noqa: ASYNC110  # what is tested has no event for it
            await asyncio.sleep(0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(60):
            await scenario

    asyncio.run(in_time())


async def never() -> None:
    await asyncio.Event().wait()


def test_calls_that_encoders_take_promptly_are_not_watched() -> None:
    async def scenario() -> None:
        encoders = Encoders(1)

        async def taken() -> str:
            return "ref"

        assert await encoders.watch.unless_none(taken()) == "ref"
        assert (encoders.asked, encoders.watch.none_there) == (0, False)

    run(scenario())


def test_what_a_call_fails_with_is_told() -> None:
    async def lost() -> None:
        raise RayActorError()

    async def scenario() -> None:
        encoders = Encoders(1)
        with pytest.raises(RayActorError):
            await encoders.watch.unless_none(lost())
        assert (encoders.asked, encoders.watch.none_there) == (0, False)

    run(scenario())


def test_without_an_encoder_a_call_is_given_up_and_until_there_is_one_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(encoder_watch.logger, "warning", told.append)

    async def scenario() -> None:
        encoders = Encoders()
        calls = [asyncio.ensure_future(never()) for _ in range(3)]
        results = await asyncio.gather(*map(encoders.watch.unless_none, calls), return_exceptions=True)
        assert [type(result) for result in results] == [NoEncoderError] * 3
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        assert encoders.watch.none_there
        assert encoders.asked == 1, "one question waits for an encoder, whoever else does"
        looked = encoders.looked
        await asyncio.sleep(3 * AFTER_S)
        assert encoders.looked == looked, "nobody needs to look any more"
        encoders.answer.set_result("here")
        await encoders.until(none_there=False)

    run(scenario())
    assert told == [
        "no encoder is there: language models encode by themselves until one is",
        "an encoder is there again",
    ]


def test_encoders_that_are_only_busy_are_waited_for() -> None:
    async def scenario() -> None:
        encoders = Encoders(1)
        taken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(encoders.watch.unless_none(taken))
        while encoders.looked < 3:  # noqa: ASYNC110  # a stand-in has no event for it
            await asyncio.sleep(0)
        assert not waiting.done()
        taken.set_result("ref")
        assert await waiting == "ref"
        assert not encoders.watch.none_there
        encoders.running = 0  # and then they are gone: the question still waits, and tells
        with pytest.raises(NoEncoderError):
            await encoders.watch.unless_none(never())

    run(scenario())


def test_where_serve_has_given_up_nobody_waits() -> None:
    async def unavailable() -> None:
        raise UNAVAILABLE

    async def scenario() -> None:
        encoders = Encoders()
        encoders.answer.set_exception(UNAVAILABLE)
        with pytest.raises(NoEncoderError):
            await encoders.watch.unless_none(unavailable())
        assert encoders.watch.none_there
        asked = encoders.asked
        while encoders.asked < asked + 3:  # noqa: ASYNC110  # it is asked again, and again
            await asyncio.sleep(0)
        assert encoders.watch.none_there
        encoders.answer = asyncio.get_running_loop().create_future()
        encoders.answer.set_result("here")
        await encoders.until(none_there=False)

    run(scenario())


def test_an_encoder_that_dies_as_it_answers_is_none() -> None:
    async def scenario() -> None:
        encoders = Encoders()
        with pytest.raises(NoEncoderError):
            await encoders.watch.unless_none(never())
        asked, lost = encoders.asked, encoders.answer
        encoders.answer = asyncio.get_running_loop().create_future()
        lost.set_exception(RayActorError())
        while encoders.asked == asked:  # noqa: ASYNC110  # a stand-in has no event for it
            await asyncio.sleep(0)
        assert encoders.watch.none_there
        encoders.answer.set_result("here")
        await encoders.until(none_there=False)

    run(scenario())
