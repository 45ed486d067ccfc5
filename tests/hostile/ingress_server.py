"""An ingress with stand-ins for the replicas behind a real HTTP server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from ray.serve.config import HTTPOptions
from starlette.requests import Request

from configs.schema import AppConfig
from deployments.ingress import deployment as ingress_module
from deployments.ingress.deployment import Ingress
from tests.unit.deployments.stand_ins import IMAGE, StandIns

CHAT = "/v1/chat/completions"
TEXT = {"messages": [{"role": "user", "content": "x"}]}
# uvicorn's own 5 s are over when a busy machine stops for as long between two requests of a test.
SERVE_KEEP_ALIVE_S = HTTPOptions().keep_alive_timeout_s
KEY, OTHER_KEY = "alice-has-a-key-of-her-own", "bob-has-another-key-of-his"
PICTURE = {"messages": [{"role": "user", "content": [IMAGE]}]}


def started(
    monkeypatch: pytest.MonkeyPatch, stand_ins: StandIns, *, host: str | None = "0.0.0.0", **auth: Any
) -> Ingress:
    """An ingress as Serve starts it where it listens on `host`. `ingress`: settings beside those of `auth`."""
    monkeypatch.setattr(ingress_module, "serve_host", lambda: host)
    handle: Any = stand_ins
    return Ingress(AppConfig.model_validate({"ingress": {**auth.pop("ingress", {}), "auth": auth}}), handle, handle)


@asynccontextmanager
async def serving(ingress: Ingress) -> AsyncIterator[httpx.AsyncClient]:
    async def app(
        scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        await (await ingress(Request(scope, receive)))(scope, receive, send)

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_keep_alive=SERVE_KEEP_ALIVE_S)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:  # noqa: ASYNC110 - uvicorn tells it by this alone
            await asyncio.sleep(0.01)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                yield client
        finally:
            server.should_exit = True
            await task


def asked(ingress: Ingress, *requests: dict[str, Any]) -> list[httpx.Response]:
    """The answers, one after the other."""

    async def ask() -> list[httpx.Response]:
        async with serving(ingress) as client:
            return [await client.request(**{"method": "POST", "url": CHAT, **request}) for request in requests]

    return asyncio.run(ask())


def statuses(responses: list[httpx.Response]) -> list[int]:
    return [response.status_code for response in responses]


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}
