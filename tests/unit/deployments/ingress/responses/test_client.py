"""Stored responses through the ingress: what vLLM is sent of a continued conversation, tenants, and a store that is
lost.

One file, since every test asks the same ingress (`stored.py`) and looks at what its store and vLLM were sent.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from ray.exceptions import RayActorError

from deployments.common.messages import ResponseHead
from deployments.ingress.responses.store import ResponseStore
from deployments.telemetry.metrics import Counter, Counters
from tests.unit.deployments.ingress.responses.stored import (
    RESPONSES,
    TTL_S,
    Responding,
    StoreHandle,
    about,
    conversed,
    create,
    event,
    events,
    id_of,
    message,
    post,
    then,
)
from tests.unit.deployments.ingress.test_image_routes import IN_A_RESPONSE, URL
from tests.unit.deployments.stand_ins import SSE_HEAD, Pieces, StandIns, ingress_of, told

TENANTS = {"auth": {"mode": "none", "tenant_header": "x-tenant"}}
WORDS = {"type": "input_text", "text": "What is it?"}
ASKED = {"type": "message", "role": "user", "content": [IN_A_RESPONSE, WORDS]}
AGAIN = {"type": "message", "role": "user", "content": "Are you sure?"}


def keyless(body: dict[str, Any]) -> str:
    """A body without what no two requests share."""
    assert body.pop("request_id", "resp_").startswith("resp_")
    return json.dumps({name: value for name, value in body.items() if value is not None}, sort_keys=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("again", ["Are you sure?", [AGAIN]])
def test_a_continued_conversation_is_sent_like_one_that_is_sent_whole(stream: bool, again: object) -> None:
    """Three turns; the body, the references and what is deferred are the same, and vLLM keeps nothing."""
    continued, whole = Responding(), Responding()
    answers = conversed(
        StoreHandle(), continued, create([ASKED], stream=stream), then(again, stream=stream), then([ASKED])
    )
    assert [answer.status_code for answer in answers] == [200] * 3
    items = [ASKED, message("A cat."), AGAIN, message("A cat."), ASKED]
    for first in (1, 3, 5):
        fields: dict[str, Any] = {"stream": stream} if first < 5 else {}
        conversed(None, whole, create(items[:first], **fields))
    for own, expected in zip(continued.references, whole.references, strict=True):
        assert [(one.item, one.label) for one in own] == [(one.item, one.label) for one in expected]
    assert continued.headers == whole.headers
    assert [list(map(type, given)) for given in continued.given] == [list(map(type, given)) for given in whole.given]
    for ours, theirs, keys, others in zip(
        continued.bodies, whole.bodies, continued.references, whole.references, strict=True
    ):
        assert ours["store"] is False
        text = keyless(ours)
        for one, other in zip(keys, others, strict=True):
            text = text.replace(one.key, other.key)
        assert text == keyless(theirs)


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 10**9])
def test_a_stream_is_the_same_in_pieces_and_is_stored(piece_bytes: int) -> None:
    words = "\n\nevent: response.completed\ndata: {}\n\n"
    made, found = conversed(
        StoreHandle(), Responding(words, piece_bytes=piece_bytes), create("x", stream=True), about("GET")
    )
    (passed,) = conversed(None, Responding(words), create("x", stream=True))
    assert [name for name in made.text.split("\n") if name.startswith("event: ")] == [
        *("event: response.created", "event: response.output_text.delta", "event: response.completed")
    ]
    assert json.dumps(events(made)).replace(id_of(made), "resp_vllm") == json.dumps(events(passed))
    assert found.json() == events(made)[-1]["response"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_names_its_response_everywhere(stream: bool) -> None:
    first, second, found = conversed(
        StoreHandle(), Responding(), create("x"), then("y", stream=stream), about("GET", of=1)
    )
    responses = [one["response"] for one in events(second) if "response" in one] if stream else [second.json()]
    assert len(responses) == (2 if stream else 1)
    assert {one["id"] for one in responses} == {found.json()["id"]}
    assert {one["previous_response_id"] for one in responses} == {id_of(first)}
    assert found.json() == responses[-1]


def test_an_answer_that_reached_its_limit_is_stored() -> None:
    _, found = conversed(
        StoreHandle(), Responding(status="incomplete"), create("x", stream=True, max_output_tokens=1), about("GET")
    )
    assert found.json()["status"] == "incomplete"


BEGUN = event("response.created", response={})
BROKEN = (BEGUN, RayActorError())
FAILED = (BEGUN + event("response.failed", response={"status": "failed"}),)


@pytest.mark.parametrize(("pieces", "is_read"), [(BROKEN, True), (FAILED, True), ((BEGUN, BEGUN), False)])
def test_nothing_of_a_stream_without_an_end_stays_stored(pieces: tuple[object, ...], is_read: bool) -> None:
    """Its input was kept until it expired, in an entry that could be neither found nor deleted. `is_read`: to its end;
    else the client leaves, which cancels the request."""
    handle = StoreHandle()

    async def called() -> list[str]:
        rest = () if is_read else (asyncio.Event(),)
        stand_ins = StandIns(Pieces(SSE_HEAD, *pieces, *rest))
        ingress = ingress_of(stand_ins, store=handle, request_timeout_s=5)
        answer: Any = await ingress(post({"input": "x", "stream": True}))

        async def read() -> None:
            async for _ in answer.body_iterator:
                pass
            await answer.body_iterator.aclose()

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        assert reading.done() is is_read
        reading.cancel()
        await asyncio.sleep(0.05)
        return handle.called

    assert asyncio.run(called()) == ["put", "discard"]
    assert handle.store.num_bytes == 0


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_whole_answer_that_failed_is_not_stored(status: str) -> None:
    handle = StoreHandle()
    (first,) = conversed(handle, Responding(), create("x"))
    held = handle.store.num_bytes
    again = create("y", previous_response_id=id_of(first))
    made, found = conversed(handle, Responding(status=status), again, about("GET"))
    assert (made.json()["status"], found.status_code) == (status, 404)
    assert made.json()["previous_response_id"] == id_of(first)
    assert handle.store.num_bytes == held


def test_a_client_that_leaves_while_its_whole_answer_is_stored_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = StoreHandle()

    async def slow(*_: object) -> bool:
        await asyncio.sleep(60)
        return True

    async def leave() -> None:
        monkeypatch.setattr(handle.store, "complete", slow)
        asking = asyncio.create_task(ingress_of(Responding(), store=handle)(post({"input": "x"})))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.sleep(0.05)

    asyncio.run(leave())
    assert handle.called == ["put", "complete", "discard"]
    assert handle.store.num_bytes == 0


def test_a_deadline_that_passes_before_a_stream_begins_ends_its_call() -> None:
    """Its input waited for the thread that parses another request's body."""
    pieces = Pieces(SSE_HEAD, BEGUN, asyncio.Event())

    class Busy(StandIns):
        def _handle(self, *given: Any) -> Pieces:
            ingress._off_loop._thread.submit(time.sleep, 2.0)
            return super()._handle(*given)

    ingress = ingress_of(Busy(pieces), store=StoreHandle(), request_timeout_s=600)
    asked = post({"input": "x" * 300_000, "stream": True}, headers=[(b"x-request-timeout-s", b"1")])

    async def status() -> int:
        return (await ingress(asked)).status_code

    assert asyncio.run(status()) == 504
    assert pieces.cancelled


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_stream_that_reaches_its_deadline_ends_with_an_error_event(is_stored: bool) -> None:
    """Starlette reads it in a task of its own, if the server is older than version 2.4 of ASGI."""
    pieces = Pieces(SSE_HEAD, BEGUN, asyncio.Event())
    ingress = ingress_of(StandIns(pieces), store=StoreHandle(), request_timeout_s=600)
    headers, asgi = [(b"x-request-timeout-s", b"0.5")], {"spec_version": "2.3"}
    asked = post({"input": "x", "stream": True, "store": is_stored}, headers=headers, asgi=asgi)

    async def sent() -> list[bytes]:
        bodies: list[bytes] = []

        async def send(message: Any) -> None:
            await asyncio.sleep(0)
            bodies.append(message.get("body", b""))

        answer = await ingress(asked)
        await answer(asked.scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
        return bodies

    *_, last, end = asyncio.run(sent())
    assert b"timeout" in last
    assert end == b""
    assert pieces.cancelled


def test_the_client_has_the_end_of_a_stream_after_the_store() -> None:
    """It continues the answer at once."""
    handle = StoreHandle()

    async def stored_by_then() -> list[tuple[bool, list[str]]]:
        ingress = ingress_of(Responding(piece_bytes=50), store=handle)
        answer: Any = await ingress(post({"input": "x", "stream": True}))
        return [(b"response.completed" in piece, [*handle.called]) async for piece in answer.body_iterator]

    seen = asyncio.run(stored_by_then())
    assert [called for is_end, called in seen if is_end] == [["put", "complete"]]
    assert "complete" not in seen[0][1]


def test_ids_cannot_be_guessed_and_not_chosen() -> None:
    stand_ins = Responding()
    answers = conversed(StoreHandle(), stand_ins, *[create("x", request_id="resp_mine") for _ in range(3)])
    ids = {id_of(answer) for answer in answers}
    assert len(ids) == 3
    assert all(len(one) == len("resp_") + 32 for one in ids)
    assert ids == {body["request_id"] for body in stand_ins.bodies}


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"store": False}, None),
        ({}, Pieces(ResponseHead(400, [(b"content-type", b"application/json")]), b"{}")),
        ({"stream": True}, Pieces(SSE_HEAD, event("response.created", response={}), RayActorError())),
    ],
)
def test_what_is_not_to_be_stored_or_has_no_end_is_not(fields: dict[str, Any], answer: Pieces | None) -> None:
    handle = StoreHandle()
    stand_ins = Responding() if answer is None else StandIns(answer)
    conversed(handle, stand_ins, create("x", **fields))
    (sent,) = stand_ins.requests
    response_id = json.loads(sent.body).get("request_id", "resp_vllm")
    (found,) = conversed(handle, StandIns(), ("GET", f"{RESPONSES}/{response_id}", {}))
    assert told(found, 404)["code"] == "response_not_found"
    assert json.loads(sent.body)["store"] is False


def test_a_store_that_is_no_flag_is_refused() -> None:
    (refused,) = conversed(StoreHandle(), StandIns(), create("x", store="yes"))
    assert told(refused, 400)["param"] == "store"


def without_id(response: httpx.Response, response_id: str) -> dict[str, Any]:
    return {**told(response, 404), "message": told(response, 404)["message"].replace(response_id, "ID")}


def test_another_tenants_response_is_like_an_unknown_one() -> None:
    unknown = "resp_" + "0" * 32
    answers = conversed(
        StoreHandle(),
        stand_ins := Responding(),
        create([ASKED], "one"),
        *(about(method, suffix, "other") for method, suffix in (("GET", ""), ("GET", "/input_items"), ("DELETE", ""))),
        then("y", "other", after=0),
        ("GET", f"{RESPONSES}/{unknown}", {}),
        ("GET", f"{RESPONSES}/{unknown}/input_items", {}),
        ("DELETE", f"{RESPONSES}/{unknown}", {}),
        create("y", "other", previous_response_id=unknown),
        about("GET"),
        about("GET", tenant="one"),
        **TENANTS,
    )
    mine = id_of(answers[0])
    for others, nobodys in zip(answers[1:5], answers[5:9], strict=True):
        assert without_id(others, mine) == without_id(nobodys, unknown)
    told(answers[9], 404)
    assert answers[10].json()["id"] == mine, "it was not deleted"
    assert len(stand_ins.requests) == 1


def test_a_deleted_response_is_gone_and_what_continues_it_stays() -> None:
    answers = conversed(
        StoreHandle(),
        stand_ins := Responding(),
        create([ASKED]),
        then(AGAIN["content"]),
        about("DELETE"),
        about("GET"),
        about("DELETE"),
        then("z", after=0),
        then("z", after=1),
    )
    assert answers[2].json() == {"id": id_of(answers[0]), "object": "response", "deleted": True}
    assert [answer.status_code for answer in answers[3:]] == [404, 404, 404, 200]
    assert len(stand_ins.bodies[-1]["input"]) == 5


def test_the_items_of_an_empty_input_are_none() -> None:
    _, listed = conversed(StoreHandle(), Responding(), create([]), about("GET", "/input_items"))
    assert (listed.status_code, listed.json()["data"]) == (200, [])


def test_an_item_whose_id_is_null_is_named_by_its_number() -> None:
    _, listed = conversed(StoreHandle(), Responding(), create([{**ASKED, "id": None}]), about("GET", "/input_items"))
    assert (listed.json()["first_id"], listed.json()["data"][0]["id"]) == ("item_0", "item_0")


@pytest.mark.parametrize(("query", "order"), [("", [2, 1, 0]), ("?order=desc", [2, 1, 0]), ("?order=asc", [0, 1, 2])])
def test_input_items_are_those_of_every_turn(query: str, order: list[int]) -> None:
    _, _, listed = conversed(
        StoreHandle(), Responding(), create([ASKED]), then([AGAIN]), about("GET", "/input_items" + query, of=1)
    )
    image = {**IN_A_RESPONSE, "image_url": URL.replace("image/png", "")}
    items = [{**ASKED, "content": [image, WORDS], "id": "item_0"}, message("A cat."), {**AGAIN, "id": "item_2"}]
    ids = ["item_0", "msg_1", "item_2"]
    assert listed.json() == {
        "object": "list",
        "data": [items[number] for number in order],
        "first_id": ids[order[0]],
        "last_id": ids[order[-1]],
        "has_more": False,
    }


def test_a_stored_image_by_url_stays_a_url_and_keeps_its_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.ingress.fetch.fetcher import MediaFetcher
    from tests.unit.deployments.samples import png

    async def fetch(*_: object, **__: object) -> bytes:
        return png()

    monkeypatch.setattr(MediaFetcher, "fetch", fetch)
    image = {"type": "input_image", "image_url": "https://a.example/x.png", "detail": "low"}
    _, listed = conversed(
        StoreHandle(), Responding(), create([{"role": "user", "content": [image]}]), about("GET", "/input_items")
    )
    assert listed.json()["data"][0]["content"] == [image]


def test_the_whole_conversation_is_within_the_limits_of_a_body() -> None:
    answers = conversed(
        StoreHandle(), Responding(), create("x" * 600), then("y" * 600), create("z" * 1200), max_body_bytes=1300
    )
    assert [answer.status_code for answer in answers] == [200, 413, 200]
    assert told(answers[1], 413)["param"] == "previous_response_id"
    assert "the limit is 1300" in told(answers[1], 413)["message"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"previous_response_id": 7, "input": "x"}, 400, "previous_response_id"),
        ({"previous_response_id": ["resp_1"], "input": "x"}, 400, "previous_response_id"),
        ({"previous_response_id": "", "input": "x"}, 404, "previous_response_id"),
        ({"previous_response_id": "x" * 100_000, "input": "x"}, 404, "previous_response_id"),
        ({"previous_response_id": "\ud800", "input": "x"}, 404, "previous_response_id"),
        ({"background": True, "input": "x"}, 400, "background"),
    ],
)
def test_hostile_ids(body: dict[str, Any], status: int, param: str) -> None:
    stand_ins = Responding()
    (refused,) = conversed(StoreHandle(), stand_ins, ("POST", RESPONSES, {"content": json.dumps(body)}))
    assert told(refused, status)["param"] == param
    assert len(refused.content) < 2000
    assert not stand_ins.requests


@pytest.mark.parametrize("own", [7, None, ["x"], [None], {"role": "user"}])
def test_an_input_that_cannot_continue_a_conversation_is_refused(own: object) -> None:
    _, refused = conversed(StoreHandle(), Responding(), create("x"), then(own))
    assert told(refused, 400)["param"] == "input"


@pytest.mark.parametrize("path", ["%00", "..", "resp_1%2F..", "x" * 2000, "%F0%9F%98%80", "input_items"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_hostile_paths(path: str, method: str) -> None:
    (refused,) = conversed(StoreHandle(), StandIns(), (method, f"{RESPONSES}/{path}", {}))
    assert refused.status_code in (404, 405)
    assert len(refused.content) < 2000


def test_a_stored_response_is_not_streamed_again() -> None:
    _, refused = conversed(StoreHandle(), Responding(), create("x"), about("GET", "?stream=true"))
    assert told(refused, 400)["param"] == "stream"


def test_without_a_store_the_reason_is_given() -> None:
    stand_ins = Responding()
    made, continued, found = conversed(None, stand_ins, create("x"), then("y"), about("GET"), stored_responses_bytes=0)
    assert (made.status_code, id_of(made)) == (200, "resp_vllm")
    assert "responses are not stored here" in told(continued, 400)["message"]
    assert "stored_responses_bytes is 0" in told(found, 404)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_store_fails_only_requests_that_name_a_response(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Counter] = []
    monkeypatch.setattr(Counters, "add", lambda _, counter, *__, **___: counted.append(counter))
    handle = StoreHandle()
    handle.lost = True
    answers = conversed(handle, Responding(), create("x", stream=stream), then("y"), about("GET"))
    assert answers[0].status_code == 200
    assert "A cat." in answers[0].text
    assert {told(answer, 503)["code"] for answer in answers[1:]} == {"unavailable"}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in answers[1:])
    assert counted.count(Counter.RESPONSE_STORE_FAILURES) == 4, "what was put is discarded, since it may come late"
    handle.lost = False
    (forgotten,) = conversed(handle, Responding(), create("z", previous_response_id=id_of(answers[0])))
    told(forgotten, 404)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late", ["put", "complete"])
def test_a_call_that_reaches_the_store_too_late_leaves_no_half_of_a_response(late: str, stream: bool) -> None:
    """The input of a response without an end was kept for a day, and nobody could read it."""

    class Late(StoreHandle):
        async def _call(self, method: str, *given: object, **options: object) -> object:
            if method == "complete" == late:
                raise RayActorError
            found = await super()._call(method, *given, **options)
            if method == late:
                raise RayActorError
            return found

    handle = Late()
    (answer,) = conversed(handle, Responding(), create("x", stream=stream))
    assert "A cat." in answer.text
    assert handle.store.num_bytes == 0


def test_an_answer_is_given_though_the_response_that_it_continues_was_evicted_meanwhile() -> None:
    handle = StoreHandle()

    class Forgetful(Responding):
        def _pieces(self, body: dict[str, Any], response_id: str) -> Any:
            if len(body["input"]) > 1:
                handle.store = ResponseStore(10**6, TTL_S)
            return super()._pieces(body, response_id)

    answers = conversed(handle, Forgetful(), create("x"), then("y"), about("GET", of=1))
    assert [answer.status_code for answer in answers] == [200, 200, 404]
