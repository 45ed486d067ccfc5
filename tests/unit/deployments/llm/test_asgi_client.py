"""Calling an application in process: what a server would do, streaming and disconnects included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Mount, Route

from deployments.common.messages import HttpRequest
from deployments.llm import asgi_client
from deployments.vllm.compat import AsgiApp, Message, Receive, Scope, Send

REQUEST = HttpRequest("POST", "/v1/echo", b"a=1&b=2", [(b"content-type", b"text/plain")], b"the body")


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Fails for anything that asyncio reports, such as an exception that nobody took, and for tasks left behind."""
    reported: list[str] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(str(context)))
        await scenario()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(watched())
    assert reported == []


async def answered(app: AsgiApp, request: HttpRequest = REQUEST) -> tuple[int, bytes]:
    messages = [message async for message in asgi_client.call(app, request)]
    assert messages[0]["type"] == "http.response.start"
    return messages[0]["status"], b"".join(message.get("body", b"") for message in messages[1:])


def test_the_request_arrives_as_it_was_given() -> None:
    async def echo(request: Request) -> JSONResponse:
        return JSONResponse(
            {
                "method": request.method,
                "path": request.url.path,
                "query": dict(request.query_params),
                "type": request.headers["content-type"],
                "body": (await request.body()).decode(),
                "client": request.client,
            }
        )

    async def scenario() -> None:
        app = cast(AsgiApp, Starlette(routes=[Route("/v1/echo", echo, methods=["POST"])]))
        status, body = await answered(app)
        assert status == 200
        assert body == (
            b'{"method":"POST","path":"/v1/echo","query":{"a":"1","b":"2"},"type":"text/plain",'
            b'"body":"the body","client":null}'
        )

    run(scenario)


def test_a_root_path_is_taken_off_by_the_application() -> None:
    async def path(request: Request) -> JSONResponse:
        return JSONResponse([request.scope["root_path"], str(request.url_for("inner"))])

    async def scenario() -> None:
        app = cast(AsgiApp, Starlette(routes=[Mount("/v1", routes=[Route("/echo", path, name="inner")])]))
        status, body = await answered(app, HttpRequest("GET", "/v1/echo", b"", [(b"host", b"h")], b"", "/prefix"))
        assert (status, body) == (200, b'["/prefix/v1","http://h/prefix/v1/echo"]')

    run(scenario)


def test_chunks_arrive_as_they_are_sent_and_not_at_the_end() -> None:
    async def scenario() -> None:
        go_on = asyncio.Event()

        async def slowly(_: Request) -> StreamingResponse:
            async def chunks() -> AsyncIterator[bytes]:
                yield b"one"
                await go_on.wait()
                yield b"two"

            return StreamingResponse(chunks())

        app = cast(AsgiApp, Starlette(routes=[Route("/v1/echo", slowly, methods=["POST"])]))
        messages = asgi_client.call(app, REQUEST)
        seen = [await asyncio.wait_for(anext(messages), 5) for _ in range(2)]
        assert [message["type"] for message in seen] == ["http.response.start", "http.response.body"]
        assert seen[1]["body"] == b"one", "the second chunk has not been made yet"
        go_on.set()
        assert b"".join([message.get("body", b"") async for message in messages]) == b"two"

    run(scenario)


def test_pieces_sent_while_the_reader_is_busy_come_as_one_in_order() -> None:
    async def eager(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(100):
            await send({"type": "http.response.body", "body": b"%d " % number, "more_body": True})
        await send({"type": "http.response.body"})

    async def scenario() -> None:
        messages = [message async for message in asgi_client.call(eager, REQUEST)]
        assert [message["type"] for message in messages] == ["http.response.start", "http.response.body"]
        assert messages[1]["body"] == b"".join(b"%d " % number for number in range(100))
        assert not messages[1]["more_body"]

    run(scenario)


def test_closing_early_is_a_disconnect_that_the_application_sees() -> None:
    async def scenario() -> None:
        received: list[Message] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            received.append(await receive())
            await send({"type": "http.response.start", "status": 200, "headers": []})
            received.append(await receive())
            await send({"type": "http.response.body", "body": b"late"})  # is dropped

        async with aclosing(asgi_client.call(app, REQUEST)) as messages:
            await anext(messages)
        assert received == [
            {"type": "http.request", "body": b"the body", "more_body": False},
            {"type": "http.disconnect"},
        ]

    run(scenario)


def test_an_application_that_does_not_listen_is_cancelled_after_a_grace_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi_client, "DISCONNECT_GRACE_S", 0.05)

    async def scenario() -> None:
        seen: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        async with aclosing(asgi_client.call(app, REQUEST)) as messages:
            await anext(messages)
        await asyncio.sleep(0.01)
        assert seen == ["cancelled"]

    run(scenario)


def test_an_application_that_cleans_up_within_the_grace_time_is_not_cancelled() -> None:
    async def scenario() -> None:
        seen: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await receive()
            assert (await receive())["type"] == "http.disconnect"
            await asyncio.sleep(0.02)
            seen.append("cleaned up")

        async with aclosing(asgi_client.call(app, REQUEST)) as messages:
            await anext(messages)
        assert seen == ["cleaned up"]

    run(scenario)


def test_cancelling_the_reader_is_a_disconnect_too() -> None:
    async def scenario() -> None:
        received: list[Message] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            received.append(await receive())

        async def read() -> None:
            async with aclosing(asgi_client.call(app, REQUEST)) as messages:
                async for _ in messages:
                    pass

        reader = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert received == [{"type": "http.disconnect"}]

    run(scenario)


def test_an_exception_after_a_complete_answer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Starlette answers an exception with status 500 and raises it again."""

    async def scenario() -> None:
        messages: list[Message] = [
            {"type": "http.response.start", "status": 500, "headers": []},
            {"type": "http.response.body", "body": b"failed", "more_body": False},
        ]

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            for message in messages:
                await send(message)
            raise LookupError("broken")

        assert [message async for message in asgi_client.call(app, REQUEST)] == messages

    run(scenario)
    assert "failed, and was answered" in caplog.text


@pytest.mark.parametrize("sent_before", [0, 1, 2])
def test_the_applications_exception_reaches_the_reader_after_what_it_sent(sent_before: int) -> None:
    async def scenario() -> None:
        messages: list[Message] = [
            {"type": "http.response.start", "status": 200, "headers": []},
            {"type": "http.response.body", "body": b"half", "more_body": True},
        ][:sent_before]

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            for message in messages:
                await send(message)
            raise LookupError("broken")

        answer = asgi_client.call(app, REQUEST)
        assert [await anext(answer) for _ in messages] == messages
        with pytest.raises(LookupError, match="broken"):
            await anext(answer)

    run(scenario)


@pytest.mark.parametrize("grace_s", [5.0, 0.01])
def test_an_exception_after_the_disconnect_is_nobodys(grace_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it comes within the grace time or as the answer to the cancellation, asyncio must not report it lost."""
    monkeypatch.setattr(asgi_client, "DISCONNECT_GRACE_S", grace_s)

    async def scenario() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            try:
                await asyncio.sleep(0.1)
            finally:
                raise LookupError("failed while it was cleaning up")

        async with aclosing(asgi_client.call(app, REQUEST)) as messages:
            await anext(messages)
        await asyncio.sleep(0.01)

    run(scenario)
