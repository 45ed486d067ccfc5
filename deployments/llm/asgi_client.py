"""Calls an ASGI application in process, as a server would: streams the body, and disconnects if the caller leaves.

HTTP clients with an in-process transport buffer the whole answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from deployments.common.messages import HttpRequest
from deployments.vllm.compat import AsgiApp, Message

logger = logging.getLogger(__name__)

DISCONNECT_GRACE_S = 5.0
BODY = "http.response.body"


def make_scope(request: HttpRequest) -> dict[str, Any]:
    """Returns the ASGI connection scope of an HTTP request."""
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

    Chunks of the body that were sent while the caller was busy are merged: each costs the caller a message to another
    process, and engines generate tokens faster than these are sent.

    Closing the iterator early disconnects: the application receives `http.disconnect` and has DISCONNECT_GRACE_S to
    clean up, after which it is cancelled. Exceptions of the application are raised here, but those after a complete
    answer are logged: frameworks raise an exception again once they have answered it with status 500.
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
            # Dropped without suspending: the cancellation that follows must reach the application's generator where it
            # waits for tokens. An error or a cancellation here would leave it suspended, its request in the engine.
            return
        messages.put_nowait(message)

    async def run() -> None:
        try:
            await app(make_scope(request), receive, send)
        finally:
            messages.put_nowait(None)

    complete = False
    task = asyncio.create_task(run())
    # Retrieves the error of a call that its caller has left; asyncio would log it as never retrieved.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        while (message := await messages.get()) is not None:
            while message["type"] == BODY and not messages.empty():
                following = messages.get_nowait()
                if following is None:
                    messages.put_nowait(None)
                    break
                body_so_far = message.get("body", b"") + following.get("body", b"")
                message = {"type": BODY, "body": body_so_far, "more_body": following.get("more_body", False)}
            complete = message["type"] == BODY and not message.get("more_body", False)
            yield message
        try:
            await task
        except Exception:
            if not complete:
                raise
            logger.exception("%s failed, and was answered", request.path)
    finally:
        disconnected.set()
        if not task.done():
            _, pending = await asyncio.wait([task], timeout=DISCONNECT_GRACE_S)
            for leftover in pending:
                leftover.cancel()
        del task  # or its error, whose traceback has this frame, would refer to itself
