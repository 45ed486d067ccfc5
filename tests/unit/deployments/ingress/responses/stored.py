"""An ingress whose responses are stored, with language models that answer them, and clients of its tenants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
from ray.exceptions import RayActorError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from deployments.ingress.deployment import Ingress
from deployments.ingress.responses.store import ResponseStore
from tests.unit.deployments.stand_ins import JSON_HEAD, SSE_HEAD, Pieces, StandIns, ingress_of

RESPONSES = "/v1/responses"
MAX_BYTES, TTL_S = 10_000_000, 60.0
Asked = tuple[str, str, dict[str, Any]]
"""Method, path and what httpx takes beside them."""


class StoreHandle:
    """The handle of a store in this process, whose replica may be lost."""

    def __init__(self, store: ResponseStore | None = None) -> None:
        self.store = store or ResponseStore(MAX_BYTES, TTL_S)
        self.lost = False
        self.called: list[str] = []

    def options(self, **_: object) -> StoreHandle:
        return self

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *given, **options: self._call(method, *given, **options))

    async def _call(self, method: str, *given: object, **options: object) -> object:
        self.called.append(method)
        if self.lost:
            raise RayActorError
        return await getattr(self.store, method)(*given, **options)


def message(words: str) -> dict[str, Any]:
    """An item of an answer, as vLLM has it."""
    text: dict[str, Any] = {"type": "output_text", "text": words, "annotations": [], "logprobs": None}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}


def event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


class Responding(StandIns):
    """Language models that answer with `words`: whole, or as a stream in pieces of `piece_bytes`."""

    def __init__(self, words: str = "A cat.", *, piece_bytes: int = 10**9, status: str = "completed") -> None:
        super().__init__()
        self.words = words
        self.piece_bytes = piece_bytes
        self.status = status

    def _handle(self, *given: Any) -> Pieces:
        body = json.loads(given[0].body or "{}")
        self.answers = [Pieces(*self._pieces(body, str(body.get("request_id", "resp_vllm"))))]
        return super()._handle(*given)

    def _pieces(self, body: dict[str, Any], response_id: str) -> Sequence[object]:
        begun: dict[str, Any] = {"id": response_id, "object": "response", "output": [], "previous_response_id": None}
        ended = {**begun, "status": self.status, "output": [message(self.words)]}
        if not body.get("stream"):
            return JSON_HEAD, json.dumps(ended).encode()
        stream = event("response.created", response=begun) + event("response.output_text.delta", delta=self.words)
        stream += event(f"response.{self.status}", response=ended)
        cuts = range(0, len(stream), self.piece_bytes)
        return SSE_HEAD, *(stream[at : at + self.piece_bytes] for at in cuts)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """What vLLM was sent."""
        return [json.loads(request.body) for request in self.requests]


def post(body: dict[str, Any], **scope: object) -> Request:
    """A request of a client that stays, for an ingress that is called without a server."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    whole = {"type": "http", "method": "POST", "path": RESPONSES, "query_string": b"", "headers": [], **scope}
    return Request(whole, receive)


def app_of(ingress: Ingress) -> Callable[[Scope, Receive, Send], Any]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await ingress(Request(scope, receive)))(scope, receive, send)

    return app


def conversed(
    handle: StoreHandle | None,
    stand_ins: StandIns,
    *requests: Asked | Callable[[list[httpx.Response]], Asked],
    **limits: Any,
) -> list[httpx.Response]:
    """The answers to requests one after the other; one may depend on the answers before it."""

    async def ask() -> list[httpx.Response]:
        ingress = ingress_of(stand_ins, store=handle, **limits)
        answers: list[httpx.Response] = []
        transport = httpx.ASGITransport(app_of(ingress))
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
            for each in requests:
                method, path, options = each(answers) if callable(each) else each
                answers.append(await client.request(method, path, **options))
        await asyncio.gather(*ingress._responses._discarding)
        return answers

    return asyncio.run(ask())


def create(given: object, tenant: str = "", **fields: Any) -> Asked:
    headers = {"x-tenant": tenant} if tenant else {}
    return "POST", RESPONSES, {"json": {"input": given, **fields}, "headers": headers}


def id_of(response: httpx.Response) -> str:
    """Of a response, whole or streamed."""
    if response.headers["content-type"].startswith("text/event-stream"):
        return str(events(response)[-1]["response"]["id"])
    return str(response.json()["id"])


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.text.split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def then(given: object, tenant: str = "", *, after: int = -1, **fields: Any) -> Callable[[list[httpx.Response]], Asked]:
    """A request that continues an earlier one of the same test."""
    return lambda answers: create(given, tenant, previous_response_id=id_of(answers[after]), **fields)


def about(method: str, suffix: str = "", tenant: str = "", *, of: int = 0) -> Callable[[list[httpx.Response]], Asked]:
    """A request for a response of the same test."""
    headers = {"x-tenant": tenant} if tenant else {}
    return lambda answers: (method, f"{RESPONSES}/{id_of(answers[of])}{suffix}", {"headers": headers})
