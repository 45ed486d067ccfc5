"""A small server of OpenAI's chat route for tests of clients; `say` decides what each request gets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

TEMPLATE_TOKENS = 5
TOKENS_PER_WORD = 2


class ChatServer:
    """Listens on loopback in a thread, until `close`. A word of text has two tokens, a picture none."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        """Those with more than one token to answer: not a client's probes."""
        self.keys: list[str | None] = []
        self.before: Callable[[int], Awaitable[None]] = _at_once
        """Awaited with the request's number before it is answered."""
        self.answers: dict[int, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {}
        """For single requests, by number."""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**28)
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/chat/completions", self._chat)])
        runner = web.AppRunner(app, shutdown_timeout=0)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self._port = runner.addresses[0][1]
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "small"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = -1
        if body["max_tokens"] > 4:
            number = len(self.bodies)
            self.bodies.append(body)
            self.keys.append(request.headers.get("authorization"))
            await self.before(number)
        if number in self.answers:
            return await self.answers[number](request)
        return await streamed(request, body)


async def _at_once(_: int) -> None: ...


async def streamed(request: web.Request, body: dict[str, Any], *, broken_off: bool = False) -> web.StreamResponse:
    """A token an event, the usage at the end."""
    text = body["messages"][0]["content"][-1]["text"]
    usage = {
        "prompt_tokens": TEMPLATE_TOKENS + TOKENS_PER_WORD * len(text.split()),
        "completion_tokens": body["max_tokens"],
    }
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    events += [{"choices": [{"delta": {"content": "word "}}]} for _ in range(body["max_tokens"])]
    events.append({"choices": [], "usage": usage})
    for event in events[:3] if broken_off else events:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    if not broken_off:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def refused(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "full"}}, status=503, headers={"Retry-After": "3"})
