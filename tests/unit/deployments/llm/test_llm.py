"""The language model replica around a stand-in for vLLM: embeddings are checked before it, keys withdrawn after it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, cast
from unittest import mock

import pytest
from ray.exceptions import ActorUnavailableError, OwnerDiedError, RayActorError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deployments.common.messages import (
    Accepted,
    ImageRefused,
    ItemReference,
    NotEncoded,
    ResponseHead,
    SharedEmbedding,
    TooEarly,
)
from deployments.common.replica_errors import TransferFailedError
from deployments.llm import asgi_client
from deployments.llm.dropped_images import find_dropped_images
from deployments.vllm import compat
from deployments.vllm.compat import AsgiApp
from encoder.item_header import ItemHeader
from tests.cluster.stand_in_llm import StandInLLM
from tests.unit.deployments.llm.stand_in_replica import (
    HEADERS,
    WIDTH,
    answered,
    encoded,
    header,
    place,
    replica,
    request,
    run,
)
from tests.unit.deployments.samples import at_once


def test_embeddings_are_there_under_their_keys_and_gone_afterwards() -> None:
    llm, places = replica(), [place(1, "image 1 of 3"), place(0, "image 2 of 3"), place(1, "image 3 of 3")]
    head, body = answered(llm, places, [encoded(1.0), encoded(2.0)], [header(1.0), header(2.0, (1, 6, 4))])
    assert head.status == 200
    assert [image["norm"] for image in body["images"]] == [12.0, 6.0, 12.0]
    assert [image["grid"] for image in body["images"]] == [[1, 6, 4], [1, 4, 6], [1, 6, 4]]
    assert "encode;dur=3.0" in dict(head.headers)[b"server-timing"].decode()
    assert llm.state()["keys"] == 0


@pytest.mark.parametrize("image", [encoded(2.0, width=WIDTH - 1), encoded(2.0, rows=5), encoded(2.0, rows=7)])
def test_an_embedding_that_does_not_fit_never_reaches_the_engine(image: SharedEmbedding) -> None:
    """It would kill the engine. The client is told which image, and nothing of the inside."""
    llm = replica()
    granted: list[str] = []
    grant = llm.engine.scheduler.table.grant
    llm.engine.scheduler.table.grant = lambda lease: (granted.append(lease.header.digest), grant(lease))[1]  # type: ignore[method-assign,func-returns-value]
    head, body = answered(llm, [place(0), place(1, "image 2 of 2")], [encoded(), image])
    assert head.status == 500
    assert body["error"]["code"] == "embedding_mismatch"
    assert body["error"]["message"] == "image 2 of 2: its embedding does not fit the model"
    assert image.digest not in granted
    assert llm.state()["keys"] == 0


def test_a_refused_image_is_a_400_that_names_it() -> None:
    llm = replica()
    head, body = answered(llm, [place(0), place(1, "image 2 of 2")], [encoded(), ImageRefused("truncated")])
    assert (head.status, body["error"]["message"]) == (400, "image 2 of 2: truncated")
    assert body["error"]["type"] == "invalid_request_error"
    assert llm.state()["keys"] == 0


@pytest.mark.parametrize(("path", "param"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input")])
def test_a_refused_image_is_in_the_field_of_its_route(path: str, param: str) -> None:
    async def scenario() -> None:
        asked = dataclasses.replace(request(place(0)), path=path)
        pieces = replica().handle(asked, [place(0)], [header()], at_once(ImageRefused("truncated")))
        body = b"".join([piece async for piece in pieces if isinstance(piece, bytes)])
        assert json.loads(body)["error"]["param"] == param

    run(scenario())


@pytest.mark.parametrize("error", [RayActorError(), ActorUnavailableError("the node has gone", None)])
def test_where_an_encoder_failed_the_ingress_is_told_at_once_and_nothing_else(error: Exception) -> None:
    async def scenario() -> None:
        llm, places = replica(), [place(0), place(1)]
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        encodings: list[Awaitable[Any]] = [never, *at_once(error)]
        pieces = llm.handle(request(*places), places, [header(1.0), header(2.0)], encodings)
        assert [piece async for piece in pieces] == [NotEncoded((1,))]
        assert (never.cancelled(), llm.state()["keys"]) == (True, 0)

    run(scenario())


def test_requests_that_wait_for_encoders_leave_places_to_others() -> None:
    """Each ingress bounded its own: those of several could fill a language model, before text and encoded images."""

    async def scenario() -> None:
        llm, places = replica(), [place(0)]
        llm._requests._max_early_requests = 1
        early = dataclasses.replace(request(*places), early_prefill=True)
        coming: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waits = cast(AsyncGenerator[Any, None], llm.handle(early, places, HEADERS, [coming]))
        first = asyncio.ensure_future(anext(waits))
        await asyncio.sleep(0)
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        assert [piece async for piece in llm.handle(early, places, HEADERS, [never])] == [TooEarly()]
        others = [(request(), []), (request(*places), at_once(encoded()))]
        for other, encodings in others:
            pieces = cast(
                AsyncGenerator[Any, None],
                llm.handle(other, places[: len(encodings)], HEADERS[: len(encodings)], encodings),
            )
            assert isinstance(await anext(pieces), Accepted)
            await pieces.aclose()
        coming.set_result(encoded())
        assert isinstance(await first, Accepted)
        pieces = cast(AsyncGenerator[Any, None], llm.handle(early, places, HEADERS, at_once(encoded())))
        assert isinstance(await anext(pieces), Accepted), "the other one does not wait any more"
        await pieces.aclose()
        await waits.aclose()

    run(scenario())


def test_an_embedding_that_was_lost_on_the_way_is_told_from_one_that_was_not_made() -> None:
    with pytest.raises(TransferFailedError):
        answered(replica(), [place(0)], [OwnerDiedError("1" * 56, None, "")])


@pytest.mark.parametrize("roles", [["system"], ["user", "system", "user"], ["user", "user", "developer", "tool"]])
def test_an_image_that_the_template_drops_is_a_400_that_names_its_message(roles: list[str]) -> None:
    """vLLM finds fewer placeholders than images then, and fails with status 500 at the last image, whichever it was."""
    taken = ("user", "tool")
    llm = with_template(taken)
    places = [place(number) for number in range(len(roles))]
    head, body = answered(llm, places, [encoded(float(1 + n)) for n in range(len(roles))], roles=roles)
    first = next(number for number, role in enumerate(roles) if role not in taken)
    assert (head.status, body["error"]["type"]) == (400, "invalid_request_error")
    assert body["error"]["message"].startswith(f"messages[{first}]: ")
    assert repr(roles[first]) in body["error"]["message"]
    assert llm.state()["keys"] == 0


def test_another_failure_of_vllm_stays_what_it_is() -> None:
    head, body = answered(with_template(("user",), status=500), [place(0)], [encoded()])
    assert (head.status, body["error"]) == (500, "another")


def test_a_dropped_image_of_a_response_is_named_by_its_item() -> None:
    """Its body has no `messages`; looking for them was status 500."""
    llm = with_template(("user",))
    references = [place(number) for number in range(2)]
    images = [{"type": "input_image", "image_url": reference.key, "detail": "auto"} for reference in references]
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    words = {"type": "input_text", "text": "x"}
    output = {"type": "function_call_output", "call_id": "a", "output": [words, images[1]]}
    items = [{"role": "user", "content": [images[0]]}, call, output]
    sent = dataclasses.replace(request(), path="/v1/responses", body=json.dumps({"input": items}).encode())
    error = asyncio.run(find_dropped_images(with_references(llm, references), sent))
    assert error is not None
    assert (error.status, error.param) == (400, "input")
    assert error.message.startswith(
        "input[2]: the model's chat template takes no such media from messages of role 'tool'"
    )


def with_references(llm: StandInLLM, references: Sequence[ItemReference]) -> AsgiApp:
    """Its application, while these references are valid."""
    for reference in references:
        llm._frontend.references.add(HEADERS[0], reference.key)
    return llm._frontend.app


def with_template(taken: Sequence[str], status: int = 200) -> StandInLLM:
    """vLLM as far as it finds images in prompts: of messages of roles in `taken`. `status`: of its other answers."""
    llm = replica()

    async def tell(asked: Request) -> Response:
        missing = []
        for message in (await asked.json())["messages"]:
            for part in message["content"]:
                if isinstance(part, dict) and part["type"] == "image_url":
                    llm._frontend.references.header(part["image_url"]["url"])
                    missing += [part] * (message["role"] not in taken)
        if missing:
            return JSONResponse({"error": "Failed to apply prompt replacement"}, 500)
        return JSONResponse({"error": "another"}, status if asked.url.path.startswith("/v1") else 200)

    routes = [Route(path, tell, methods=["POST"]) for path in ("/v1/chat/completions", "/tokenize")]
    llm._frontend.app = cast(AsgiApp, Starlette(routes=routes))
    return llm


def test_keys_that_nobody_took_are_withdrawn() -> None:
    """vLLM may refuse the request before it looks at its images."""

    async def refuse(_: Request) -> Response:
        return JSONResponse({"error": "too long"}, 400)

    llm = replica()
    llm._frontend.app = cast(AsgiApp, Starlette(routes=[Route("/v1/chat/completions", refuse, methods=["POST"])]))
    head, _ = answered(llm, [place(0)], [encoded()])
    assert head.status == 400
    assert llm.state()["keys"] == 0


def test_keys_are_withdrawn_when_the_application_fails() -> None:
    async def fail(*_: object) -> None:
        raise LookupError("broken")

    llm = replica()
    llm._frontend.app = cast(AsgiApp, fail)
    with pytest.raises(LookupError, match="broken"):
        answered(llm, [place(0)], [encoded()])
    assert llm.state()["keys"] == 0


def test_closing_a_stream_disconnects_and_withdraws() -> None:
    async def scenario() -> None:
        llm, places = replica(), [place(0)]
        stream = llm.handle(request(*places, stream=True), places, HEADERS, at_once(encoded()))
        assert isinstance(await anext(stream), Accepted)
        assert isinstance(await anext(stream), ResponseHead)
        assert cast(bytes, await anext(stream)).startswith(b"data: ")
        await stream.aclose()  # type: ignore[attr-defined]
        assert (llm.state()["disconnects"], llm.state()["keys"]) == (1, 0)

    run(scenario())


def test_the_head_waits_for_the_first_chunk_and_tells_the_time_to_the_first_token() -> None:
    async def slow(scope: object, receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        clock = compat.first_token_clock.get()
        assert clock is not None
        clock.first_token_at_s = 1e9
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    async def scenario() -> None:
        llm = replica()
        llm._frontend.app = cast(AsgiApp, slow)
        _, head, *chunks = [piece async for piece in llm.handle(request(), [])]
        assert isinstance(head, ResponseHead)
        assert head.headers[0] == (b"x", b"y")
        assert b"first-token;dur=" in dict(head.headers)[b"server-timing"]
        assert head.body + b"".join(cast(list[bytes], chunks)) == b"onetwo"
        assert b"" not in chunks

    run(scenario())


def test_head_and_body_come_in_one_piece() -> None:
    """Each piece is a message to another process."""

    async def scenario() -> None:
        llm = replica()
        accepted, head = [piece async for piece in llm.handle(request(), [])]
        assert isinstance(accepted, Accepted)
        assert isinstance(head, ResponseHead)
        assert head.complete
        assert json.loads(head.body)["images"] == []

    run(scenario())


def test_a_stream_begins_with_its_head() -> None:
    async def scenario() -> None:
        llm = replica()
        stream = llm.handle(request(stream=True), [])
        _, head, following = await anext(stream), await anext(stream), await anext(stream)
        assert isinstance(head, ResponseHead)
        assert head.body.startswith(b"data: ")
        assert not head.complete
        assert cast(bytes, following).startswith(b"data: ")
        await stream.aclose()  # type: ignore[attr-defined]

    run(scenario())


def test_the_engine_has_the_request_while_it_is_told_that_it_is_there() -> None:
    async def scenario() -> None:
        begun = asyncio.Event()

        async def slow(scope: object, receive: object, send: object) -> None:
            begun.set()
            await asyncio.Event().wait()

        llm, places = replica(), [place(0)]
        llm._frontend.app = cast(AsgiApp, slow)
        stream = llm.handle(request(*places), places, HEADERS, at_once(encoded()))
        assert isinstance(await anext(stream), Accepted)
        await asyncio.wait_for(begun.wait(), 10)
        with mock.patch.object(asgi_client, "DISCONNECT_GRACE_S", 0.05):
            await stream.aclose()  # type: ignore[attr-defined]
        assert llm.state()["keys"] == 0
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario())


def test_requests_at_the_same_time_do_not_see_each_others_embeddings() -> None:
    async def scenario() -> None:
        llm = replica()

        async def ask(value: float) -> float:
            places = [place(0)]
            _, head = [
                piece async for piece in llm.handle(request(*places), places, [header(value)], at_once(encoded(value)))
            ]
            assert isinstance(head, ResponseHead)
            norm: float = json.loads(head.body)["images"][0]["norm"]
            return norm

        values = [float(number) for number in range(1, 20)]
        assert await asyncio.gather(*map(ask, values)) == [6 * value for value in values]
        assert llm.state()["keys"] == 0

    run(scenario())


def with_header(image: SharedEmbedding, sent: ItemHeader | None) -> SharedEmbedding:
    return dataclasses.replace(image, header=sent)


def test_a_header_that_comes_with_its_embedding_is_that_of_the_prompt() -> None:
    """Only an encoder with vLLM's processor knows it. Others of the request may be known before."""
    llm, places = replica(), [place(1, "image 1 of 2"), place(0, "image 2 of 2")]
    sent = with_header(encoded(1.0), header(1.0, (1, 2, 12)))
    head, body = answered(llm, places, [sent, encoded(2.0)], [None, header(2.0)])
    assert head.status == 200
    assert [image["grid"] for image in body["images"]] == [[1, 4, 6], [1, 2, 12]]
    assert llm.state()["keys"] == 0


def test_vllm_gets_a_request_once_all_headers_have_come() -> None:
    async def scenario() -> None:
        llm, coming = replica(), asyncio.get_running_loop().create_future()
        places = [place(0)]
        called = asyncio.Event()
        application = llm._frontend.app

        async def app(*scope: Any) -> None:
            called.set()
            await application(*scope)

        llm._frontend.app = cast(AsgiApp, app)
        pieces = cast(AsyncGenerator[Any, None], llm.handle(request(*places), places, [None], [coming]))
        accepted = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0.05)
        assert not called.is_set()
        coming.set_result(with_header(encoded(1.0), header(1.0)))
        assert isinstance(await accepted, Accepted)
        assert (await anext(pieces)).status == 200
        assert called.is_set()
        await pieces.aclose()

    run(scenario())


@pytest.mark.parametrize("image", [encoded(1.0), with_header(encoded(1.0, rows=5), header(1.0))], ids=["none", "rows"])
def test_an_embedding_without_its_header_is_not_taken(image: SharedEmbedding) -> None:
    llm = replica()
    head, body = answered(llm, [place(0)], [image], [None])
    assert (head.status, body["error"]["code"]) == (500, "embedding_mismatch")
    assert llm.state()["keys"] == 0


def test_an_image_without_a_header_that_is_refused_is_a_client_error() -> None:
    head, body = answered(replica(), [place(0)], [ImageRefused("truncated")], [None])
    assert (head.status, body["error"]["code"]) == (400, "invalid_image")
