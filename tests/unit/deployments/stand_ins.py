"""The front door's replicas as stand-ins, and clients that ask it in process."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
from ray.serve._private.common import DeploymentID
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from configs.schema import AppConfig
from deployments.common.messages import Accepted, HttpRequest, ImageJob, ItemReference, ResponseHead
from deployments.common.ray_private import ResultReference
from deployments.ingress.deployment import Ingress
from deployments.ingress.failures import MAX_ATTEMPTS
from deployments.routing.affinity import Call
from deployments.routing.replica_identity import encoder_metadata
from encoder.images.generic_identity import Identity
from encoder.item_header import ItemHeader
from tests.unit.deployments.samples import IDENTITY, png

JSON_HEAD = ResponseHead(200, [(b"content-type", b"application/json")])
SSE_HEAD = ResponseHead(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
IMAGE = {
    "type": "image_url",
    "image_url": {"url": "data:image/png;base64," + base64.b64encode(png()).decode()},
}
RETRY_AFTER_S = 7
HOST = "this-host"
"""Of the language model that is chosen, and of the first replica."""
CHOSEN = "chosen"
"""The language model that is chosen for every request."""


class Pieces:
    """An answer in pieces, accepted right before its head; an exception is raised, an event is waited for."""

    def __init__(self, *pieces: object) -> None:
        self._pieces = list(pieces)
        heads = [place for place, piece in enumerate(pieces) if isinstance(piece, ResponseHead)]
        if heads and not any(isinstance(piece, Accepted) for piece in pieces):
            self._pieces.insert(heads[0], Accepted())
        self.cancelled = False
        self.taken: asyncio.Event | None = None
        """Set when a replica has taken the call; None: at once."""
        self.there: asyncio.Event | None = None
        """Likewise, when there is a result."""

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        if not self._pieces:
            raise StopAsyncIteration
        piece = self._pieces.pop(0)
        if isinstance(piece, asyncio.Event):
            await piece.wait()
            return await self.__anext__()
        if isinstance(piece, Exception):
            raise piece
        return piece

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Generator[Any, Any, object]:
        return self.__anext__().__await__()

    async def _ready(self) -> Pieces:
        if self.there is not None:
            await self.there.wait()
        return self

    async def _to_object_ref(self) -> Pieces:
        if self.taken is not None:
            await self.taken.wait()
        return self


def always(*pieces: object) -> list[Pieces]:
    """The same answer for as often as a request is tried."""
    return [Pieces(*pieces) for _ in range(MAX_ATTEMPTS)]


class Method:
    """One method of a handle; labels of its calls go to `labels`."""

    def __init__(self, called: Callable[..., Any], labels: list[str] | None = None) -> None:
        self.remote = called
        self._labels = labels

    def options(self, *, session_id: str) -> Method:
        assert self._labels is not None
        self._labels.append(session_id)
        return self

    @asynccontextmanager
    async def choose_replica(self, *, _reserve: bool) -> AsyncIterator[SimpleNamespace]:
        """The label of a choice is none of a call."""
        assert not _reserve
        assert self._labels is not None
        assert Call.from_session_id(self._labels.pop()).only_choose
        yield SimpleNamespace(replica_id=CHOSEN, replica_metadata={"host": HOST})


class StandIns:
    """Both deployments' handles. `answers` and `encodings` are given one after the other, then empty ones."""

    def __init__(self, *answers: Pieces, encodings: Sequence[Pieces] = ()) -> None:
        self.answers = list(answers)
        self._encodings = list(encodings)
        self.requests: list[HttpRequest] = []
        self.references: list[list[ItemReference]] = []
        self.headers: list[list[Any]] = []
        """An ItemHeader each, or None."""
        self.encodings: list[Pieces] = []
        self.given: list[list[object]] = []
        """To the language model, of each request: references, or where embeddings lie."""
        self.labels: dict[str, list[str]] = {"encode": [], "handle": [], "plan": []}
        self.reports: list[Pieces] = []
        """Calls to any encoder."""
        self.failed: list[str] = []
        """Replicas that get no more calls."""
        self.deployment_id = DeploymentID("Encoder", "app")
        self.run(IDENTITY, IDENTITY)

    def run(self, *encoders: Identity, available: bool = True) -> None:
        """The running replicas from now on, and whether there can be any."""
        replicas = {
            str(at): SimpleNamespace(replica_metadata=encoder_metadata(one, f"host-{at}" if at else HOST))
            for at, one in enumerate(encoders)
        }
        routers = SimpleNamespace(curr_replicas=replicas, exclude=self.failed.append)
        loop = SimpleNamespace(call_soon_threadsafe=lambda call, *arguments: call(*arguments))
        asyncio_router = SimpleNamespace(_request_router=routers, _deployment_available=available, _event_loop=loop)
        self._router = SimpleNamespace(_asyncio_router=asyncio_router)

    def _report(self) -> Pieces:
        self.reports.append(Pieces({}))
        return self.reports[-1]

    def _encode(self, job: object) -> Pieces:
        self.encodings.append(self._encodings.pop(0) if self._encodings else Pieces(job))
        return self.encodings[-1]

    def _plan(self, job: object, file: object) -> Pieces:
        raise AssertionError("there is no video")

    def options(self, *, method_name: str = "", session_id: str | None = None, **_: object) -> Any:
        if method_name == "encode":
            return Method(self._encode, self.labels["encode"])
        if method_name == "plan":
            return Method(self._plan, self.labels["plan"])
        if method_name == "report":
            return Method(self._report, [])
        return Method(self._handle, self.labels["handle"]) if method_name == "handle" else self

    def _handle(
        self,
        request: HttpRequest,
        references: list[ItemReference],
        headers: list[ItemHeader | None],
        given: list[object],
        call: Call,
    ) -> Pieces:
        self.requests.append(request)
        self.references.append(references)
        self.headers.append(headers)
        self.given.append([one.reference if isinstance(one, ResultReference) else one for one in given])
        assert call.to_session_id() == self.labels["handle"][-1], "the replica is told as what it comes"
        return self.answers.pop(0) if self.answers else Pieces(JSON_HEAD, b"{}")


class Accepting(StandIns):
    """Encoders whose jobs are kept, and language models that tell more as they accept."""

    def __init__(self, *answers: Pieces) -> None:
        super().__init__(*answers)
        self.jobs: list[ImageJob] = []

    def accepted(self) -> Accepted:
        """What the answer to the last of the requests begins with."""
        raise NotImplementedError

    def _encode(self, job: object) -> Pieces:
        assert isinstance(job, ImageJob)
        self.jobs.append(job)
        return super()._encode(job)

    def _handle(
        self,
        request: HttpRequest,
        references: list[ItemReference],
        headers: list[ItemHeader | None],
        given: list[object],
        call: Call,
    ) -> Pieces:
        answer = super()._handle(request, references, headers, given, call)
        if answer._pieces and isinstance(answer._pieces[0], Accepted):
            answer._pieces[0] = self.accepted()
        return answer


def ingress_of(stand_ins: StandIns, *, store: Any = None, **limits: Any) -> Ingress:
    """`store`: the handle of the store of responses."""
    auth = {"mode": "none", "management_routes": "open"}
    llm = limits.pop("llm", {})
    ingress = {"retry_after_s": RETRY_AFTER_S, "auth": auth, **limits}
    config = AppConfig.model_validate({"ingress": ingress, "llm": llm})
    handle = cast(DeploymentHandle[Any], stand_ins)
    return Ingress(config, handle, handle, store)


def asked(
    stand_ins: StandIns, method: str, path: str, *, limits: dict[str, Any] | None = None, **request: Any
) -> httpx.Response:
    async def ask() -> httpx.Response:
        ingress = ingress_of(stand_ins, **(limits or {}))

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope = {**scope, "root_path": "/prefix", "path": "/prefix" + scope["path"]}
            response = await ingress(Request(scope, receive))
            await response(scope, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://h") as client:
            return await client.request(method, path, **request)

    return asyncio.run(ask())


def chat(stand_ins: StandIns, *parts: object, limits: dict[str, Any] | None = None, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": list(parts)}], **fields}
    return asked(stand_ins, "POST", "/v1/chat/completions", json=body, limits=limits)


def told(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error
