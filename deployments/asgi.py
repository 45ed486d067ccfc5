"""Calls an ASGI application in process, as a server would: the body streams, a caller that leaves is a disconnect.

An HTTP client with an in-process transport buffers the whole answer, hence this. It must not know what the application
is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from deployments.vllm_compat import AsgiApp, Message
from deployments.wire import HttpRequest

DISCONNECT_GRACE_S = 5.0
BODY = "http.response.body"


def scope_of(request: HttpRequest) -> dict[str, Any]:
    """ASGI's connection scope of an HTTP request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.root_path + request.path,
        "raw_path": (request.root_path + request.path).encode(),
        "root_path": request.root_path,
        "query_string": request.query_string,
        "headers": request.headers,
        "client": None,
        "server": None,
        "state": {},
    }


async def call(app: AsgiApp, request: HttpRequest) -> AsyncGenerator[Message, None]:
    """Yields the application's `http.response.start` and `http.response.body` messages as they are sent.

    Pieces of the body that were sent while the caller was busy come as one: each costs the caller a message to another
    process, and engines make tokens faster than those go.

    Closing the iterator early disconnects: the application sees `http.disconnect` and gets a grace time to clean up.

    Raises:
        whatever the application raises.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    disconnected = asyncio.Event()
    body = [request.body]

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if disconnected.is_set():
            # Dropped, and without giving way: the cancellation that follows must meet the application's generator where
            # it waits for tokens. An error or a cancellation here would leave it suspended, its request in the engine.
            return
        messages.put_nowait(message)

    async def run() -> None:
        try:
            await app(scope_of(request), receive, send)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    task.add_done_callback(_take_exception)
    try:
        while (message := await messages.get()) is not None:
            while message["type"] == BODY and not messages.empty():
                following = messages.get_nowait()
                if following is None:
                    messages.put_nowait(None)
                    break
                body_so_far = message.get("body", b"") + following.get("body", b"")
                message = {"type": BODY, "body": body_so_far, "more_body": following.get("more_body", False)}
            yield message
        await task
    finally:
        disconnected.set()
        if not task.done():
            _, pending = await asyncio.wait([task], timeout=DISCONNECT_GRACE_S)
            for leftover in pending:
                leftover.cancel()


def _take_exception(task: asyncio.Task[None]) -> None:
    """What fails after the caller has left is nobody's; asyncio would report it as never retrieved."""
    if not task.cancelled():
        task.exception()
