"""An ingress at its limits, with stand-ins for the replicas: what waits, what is refused, what is dropped unstarted."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from ray.exceptions import RayActorError
from starlette.requests import Request

from deployments.common.api_error import Shed
from deployments.common.messages import Accepted, NotEncoded, SharedEmbedding
from deployments.ingress.deployment import Ingress
from deployments.ingress.http.chat_request import ChatRequest
from tests.unit.deployments.ingress.test_deferred import TOKENS, picture, user
from tests.unit.deployments.ingress.test_embedding_directory import Reads
from tests.unit.deployments.stand_ins import IMAGE, JSON_HEAD, RETRY_AFTER_S, Pieces, StandIns, ingress_of, told

TEXT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
PICTURE: dict[str, Any] = {"messages": [{"role": "user", "content": [IMAGE]}]}
IMAGE_TOKENS = 4
ONE_AT_A_TIME = {"max_visual_tokens_per_request": IMAGE_TOKENS, "max_visual_tokens_in_flight": IMAGE_TOKENS}
MANY = 300


class Held(Pieces):
    """An answer of a language model that takes the request when it is let to."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()
        self._pieces = [self.free, Accepted(), JSON_HEAD, b"{}"]


class AtWork:
    """An ingress that is asked several things at a time; `held` is the language model's answer to the first ones."""

    def __init__(self, num_held: int, **limits: Any) -> None:
        self.held = [Held() for _ in range(num_held)]
        self.stand_ins = StandIns(*self.held)
        self.ingress: Ingress = ingress_of(self.stand_ins, **limits)
        self.shed: Counter[tuple[str, int]] = Counter()
        self.ingress._admission_metrics.shed = self._shed  # type: ignore[method-assign]
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://h")

    def _shed(self, reason: Shed, tokens: int) -> None:
        self.shed[reason.value, tokens] += 1

    async def _app(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        await (await self.ingress(Request(scope, receive)))(scope, receive, send)

    def ask(self, body: dict[str, Any], **headers: str) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self._client.post("/v1/chat/completions", json=body, headers=headers))

    async def asked(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        return await self.ask(body, **headers)

    @property
    def waiting(self) -> tuple[int, int, int]:
        """Requests without a language model, tokens in line, tokens in flight."""
        admission = self.ingress._admission
        return admission.requests, admission.tokens_queued, admission.tokens_in_flight


async def settled() -> None:
    """Everything that can happen now has happened."""
    for _ in range(MANY):
        await asyncio.sleep(0)


@pytest.mark.parametrize("body", [TEXT, PICTURE], ids=["text", "images"])
def test_requests_count_until_a_language_model_has_them(body: dict[str, Any]) -> None:
    """Serve counts one with images when they are encoded, too late to refuse before that is done."""

    async def scenario() -> None:
        at_work = AtWork(2, max_requests_waiting=2)
        waiting = [at_work.ask(body) for _ in range(2)]
        await settled()
        for route in (at_work.asked(body), at_work._client.get("/v1/models")):
            refused = await route
            error = told(refused, 503)
            assert (error["type"], error["code"]) == ("overloaded_error", "overloaded")
            assert "2 requests wait for a language model" in error["message"]
            assert refused.headers["retry-after"] == str(RETRY_AFTER_S)
        assert len(at_work.stand_ins.requests) == 2, "Serve never heard of what was refused"
        at_work.held[0].free.set()
        assert (await waiting[0]).status_code == 200
        assert (await at_work.asked(body)).status_code == 200
        at_work.held[1].free.set()
        assert (await waiting[1]).status_code == 200
        assert at_work.waiting == (0, 0, 0)
        assert at_work.shed == {("requests_waiting", 0): 2}

    asyncio.run(scenario())


def test_an_answer_that_is_being_made_does_not_count() -> None:
    async def scenario() -> None:
        at_work = AtWork(1, max_requests_waiting=1)
        made = asyncio.Event()
        at_work.held[0]._pieces = [Accepted(), made, JSON_HEAD, b"{}"]
        first = at_work.ask(PICTURE)
        await settled()
        assert at_work.waiting == (0, 0, 0)
        assert (await at_work.asked(PICTURE)).status_code == 200
        made.set()
        assert (await first).status_code == 200

    asyncio.run(scenario())


def test_images_in_line_are_not_sent_to_an_encoder() -> None:
    async def scenario() -> None:
        at_work = AtWork(1, **ONE_AT_A_TIME)
        first, second = at_work.ask(PICTURE), at_work.ask(PICTURE)
        await settled()
        assert len(at_work.stand_ins.encodings) == 1
        assert at_work.waiting == (2, IMAGE_TOKENS, IMAGE_TOKENS)
        assert (await at_work.asked(TEXT)).status_code == 200, "text waits for no image"
        at_work.held[0].free.set()
        responses = await asyncio.gather(first, second)
        assert [response.status_code for response in responses] == [200, 200]
        assert "admission;dur=" in responses[1].headers["server-timing"]
        assert len(at_work.stand_ins.encodings) == 2
        assert at_work.waiting == (0, 0, 0)

    asyncio.run(scenario())


def test_the_same_image_twice_is_asked_for_once() -> None:
    async def scenario() -> None:
        at_work = AtWork(1, max_images_in_flight=1, max_images_per_request=1)
        body = {"messages": [{"role": "user", "content": [IMAGE, IMAGE]}]}
        assert told(await at_work.asked(body), 400)["message"].startswith("the request has 2 images")
        roomy = AtWork(1)
        task = roomy.ask(body)
        await settled()
        assert roomy.waiting == (1, 0, IMAGE_TOKENS)
        roomy.held[0].free.set()
        assert (await task).status_code == 200

    asyncio.run(scenario())


def test_a_line_that_is_full_is_a_503() -> None:
    async def scenario() -> None:
        at_work = AtWork(1, **ONE_AT_A_TIME, max_visual_tokens_queued=IMAGE_TOKENS)
        admitted = [at_work.ask(PICTURE), at_work.ask(PICTURE)]
        await settled()
        refused = await at_work.asked(PICTURE)
        assert "4 visual tokens wait, 4 more would pass 4" in told(refused, 503)["message"]
        assert int(refused.headers["retry-after"]) >= RETRY_AFTER_S
        assert at_work.shed == {("tokens_waiting", IMAGE_TOKENS): 1}
        at_work.held[0].free.set()
        assert [response.status_code for response in await asyncio.gather(*admitted)] == [200, 200]

    asyncio.run(scenario())


def test_a_deadline_that_passes_in_line_drops_the_request_unstarted() -> None:
    async def scenario() -> None:
        at_work = AtWork(1, **ONE_AT_A_TIME)
        first = at_work.ask(PICTURE)
        await settled()
        late = await at_work.asked(PICTURE, **{"x-request-timeout-s": "2"})
        error = told(late, 504)
        assert (error["code"], error["message"]) == ("timeout", "the request took longer than 2 s, the limit")
        assert at_work.shed == {("deadline", IMAGE_TOKENS): 1}
        assert at_work.waiting == (1, 0, IMAGE_TOKENS)
        at_work.held[0].free.set()
        assert (await first).status_code == 200
        assert len(at_work.stand_ins.encodings) == len(at_work.stand_ins.requests) == 1

    asyncio.run(scenario())


def test_a_deadline_that_passes_while_images_are_encoded_cancels_them() -> None:
    async def scenario() -> None:
        at_work = AtWork(1)
        late = await at_work.asked(PICTURE, **{"x-request-timeout-s": "2"})
        assert late.status_code == 504
        assert at_work.held[0].cancelled
        assert [encoding.cancelled for encoding in at_work.stand_ins.encodings] == [True]
        assert at_work.waiting == (0, 0, 0)
        assert at_work.shed == {("deadline", IMAGE_TOKENS): 1}

    asyncio.run(scenario())


def test_a_client_that_leaves_the_line_is_dropped_unstarted() -> None:
    async def scenario() -> None:
        at_work = AtWork(1, **ONE_AT_A_TIME)
        first, leaving = at_work.ask(PICTURE), at_work.ask(PICTURE)
        await settled()
        leaving.cancel()
        await asyncio.wait([leaving])
        assert at_work.shed == {("client_gone", IMAGE_TOKENS): 1}
        assert at_work.waiting == (1, 0, IMAGE_TOKENS)
        at_work.held[0].free.set()
        assert (await first).status_code == 200
        assert len(at_work.stand_ins.encodings) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [TEXT, PICTURE], ids=["text", "images"])
def test_a_request_that_is_tried_again_is_counted_again(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A language model was lost when it had the request; until the next one has it, it waits as before."""
    monkeypatch.setattr("deployments.ingress.attempt.FIRST_RETRY_DELAY_S", 0)

    async def scenario() -> None:
        at_work = AtWork(1, max_requests_waiting=1, **ONE_AT_A_TIME)
        lost = Pieces()
        lost._pieces = [Accepted(), RayActorError()]
        at_work.stand_ins.answers.insert(0, lost)
        tried = at_work.ask(body)
        await settled()
        assert len(at_work.stand_ins.requests) == 2
        assert at_work.waiting == (1, 0, IMAGE_TOKENS if body is PICTURE else 0)
        assert (await at_work.asked(TEXT)).status_code == 503
        at_work.held[0].free.set()
        assert (await tried).status_code == 200
        assert at_work.waiting == (0, 0, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [TEXT, PICTURE], ids=["text", "images"])
def test_a_request_that_fails_gives_its_room_back(body: dict[str, Any]) -> None:
    async def scenario() -> None:
        at_work = AtWork(0, max_requests_waiting=1, **ONE_AT_A_TIME)
        accepted = Pieces()
        accepted._pieces = [Accepted(), RuntimeError("any")]
        at_work.stand_ins.answers = [Pieces(RuntimeError("any")), accepted]
        assert [(await at_work.asked(body)).status_code for _ in range(3)] == [500, 500, 200]
        bad = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]}
        assert (await at_work.asked(bad)).status_code == 400
        assert at_work.waiting == (0, 0, 0)
        assert not at_work.shed

    asyncio.run(scenario())


def test_who_is_over_a_quota_leaves_the_line() -> None:
    async def scenario() -> None:
        rate_limit = {"visual_tokens_per_minute": IMAGE_TOKENS}
        at_work = AtWork(1, **ONE_AT_A_TIME, rate_limit=rate_limit)
        first = at_work.ask(PICTURE)
        await settled()
        refused = await at_work.asked(PICTURE)
        error = told(refused, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "over_quota")
        # The whole quota is free once 1 - 1/IMAGE_TOKENS of a minute has passed since the end of this one.
        assert 45 <= int(refused.headers["retry-after"]) <= 106
        assert at_work.shed == {("quota", 0): 1}
        assert at_work.waiting == (1, 0, IMAGE_TOKENS)
        at_work.held[0].free.set()
        assert (await first).status_code == 200

    asyncio.run(scenario())


def test_who_is_refused_for_want_of_room_is_not_charged() -> None:
    """Trying again as told would have used up the client's quota."""

    async def scenario() -> None:
        rate_limit = {"visual_tokens_per_minute": 3 * IMAGE_TOKENS}
        at_work = AtWork(1, **ONE_AT_A_TIME, max_visual_tokens_queued=IMAGE_TOKENS, rate_limit=rate_limit)
        admitted = [at_work.ask(PICTURE), at_work.ask(PICTURE)]
        await settled()
        for _ in range(5):
            assert (await at_work.asked(PICTURE)).status_code == 503
        at_work.held[0].free.set()
        await asyncio.gather(*admitted)
        assert (await at_work.asked(PICTURE)).status_code == 200
        assert (await at_work.asked(PICTURE)).status_code == 429

    asyncio.run(scenario())


def test_an_embedding_that_has_gone_does_not_cost_a_request_its_place() -> None:
    """It went to the end of the line, or was refused there, though it was admitted and charged."""

    async def scenario() -> None:
        at_work = AtWork(0)
        two = 2 * TOKENS
        limits = dict.fromkeys(("max_visual_tokens_per_request", "max_visual_tokens_in_flight"), two)
        reads, held, gone = Reads(), Held(), Held()
        gone._pieces = [gone.free, NotEncoded((0,))]
        reads.answers = [Pieces(JSON_HEAD, b"{}"), gone, held]
        at_work.ingress = ingress_of(reads, **limits, max_visual_tokens_queued=two)
        at_work.ingress._admission_metrics.shed = at_work._shed  # type: ignore[method-assign]
        one_picture, two_pictures = ({"messages": [user(*map(picture, range(number)))]} for number in (1, 2))
        assert (await at_work.asked(one_picture)).status_code == 200
        requests = [at_work.ask(body) for body in (one_picture, one_picture, two_pictures)]
        await settled()
        assert at_work.waiting == (3, two, two)
        gone.free.set()
        held.free.set()
        assert [(await each).status_code for each in requests] == [200] * 3
        assert isinstance(reads.given[1][0], SharedEmbedding)
        assert not at_work.shed, "though the line is full"

    asyncio.run(scenario())


def test_a_timeout_that_is_none_is_refused() -> None:
    async def scenario() -> None:
        at_work = AtWork(0)
        error = told(await at_work.asked(TEXT, **{"x-request-timeout-s": "soon"}), 400)
        assert "x-request-timeout-s is 'soon'" in error["message"]
        assert at_work.stand_ins.requests == []

    asyncio.run(scenario())


@pytest.fixture
def no_cycles_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_cycles_collected")
@pytest.mark.parametrize("lost", [False, True], ids=["refused", "replica lost"])
def test_requests_that_fail_keep_nothing_in_memory(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """Their errors referred to the frames that held their images, which were counted as released."""
    parse, kept = ChatRequest.parse, list[weakref.ref[ChatRequest]]()

    def parsed(*values: Any, **options: Any) -> ChatRequest:
        request = parse(*values, **options)
        kept.append(weakref.ref(request))
        return request

    async def scenario() -> None:
        at_work = AtWork(0, **({} if lost else {"max_image_side": 10}))
        at_work.stand_ins.answers = [Pieces(RuntimeError("broken")) for _ in range(3)]
        for _ in range(3):
            assert (await at_work.asked(PICTURE)).status_code == (500 if lost else 400)
        await settled()

    monkeypatch.setattr(ChatRequest, "parse", parsed)
    asyncio.run(scenario())
    assert [one() for one in kept] == [None] * 3
