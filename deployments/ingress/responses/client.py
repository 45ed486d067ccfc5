"""The ingress's client of the ResponseStore: continues, stores, returns and deletes responses of `/v1/responses`."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from configs.schema import IngressConfig
from deployments.common.api_error import RESPONSES_PATH, ApiError
from deployments.common.messages import ResponseHead
from deployments.common.ray_private import start_detached
from deployments.ingress.attempt import http_response
from deployments.ingress.http.chat_request import body_to_json, input_items
from deployments.ingress.http.held_bytes import Held
from deployments.ingress.http.request_body import Body, OffLoop, json_object
from deployments.telemetry.metrics import Counter, Counters

CALL_TIMEOUT_S = 3.0
"""Time for a call to the store, which takes milliseconds: an answer waits so long for a store that was lost."""
PREVIOUS = "previous_response_id"
_LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete")
_EVENTS = (b"event: response.created", b"event: response.in_progress", *_LAST_EVENTS)
"""Beginnings of the events that carry the response."""
_STORED = ("completed", "incomplete")
"""Status of responses that are stored."""


@dataclass(frozen=True)
class Turn:
    """A request on the Responses route."""

    tenant: str
    previous_id: str | None = None
    """The response that it continues."""
    num_earlier: int = 0
    """Items of `input` that are stored already."""
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(16)}")
    """Id of its response, which cannot be guessed."""


class StoredResponses:
    """Stored responses, as one ingress replica uses them. Every id is looked up within the client's tenant only.

    turn = await responses.start(chunks, tenant, held)      # chunks may become the whole conversation
    response = await responses.keep(turn, items, num_bytes, response)
    """

    def __init__(self, store: DeploymentHandle[Any] | None, limits: IngressConfig, off_loop: OffLoop) -> None:
        """`store`: None if responses are not stored."""
        self._store = None if store is None else store.options(_by_reference=True)
        self._limits = limits
        self._off_loop = off_loop
        self._counts = Counters()
        self._discarding: set[asyncio.Task[None]] = set()

    async def start(self, chunks: list[bytes], tenant: str | None, held: Held) -> Turn | None:
        """Returns the turn of a request, None if responses are not stored. A body that names the previous response is
        replaced by one with the whole conversation: it is parsed, checked and charged like one that is sent whole.

        Raises:
            ApiError: 400 for an invalid body, 404 if the response is not found, 413 if the conversation is larger than
                a body may be, 503 if the store cannot be reached.
        """
        if self._store is None:
            return None
        turn, data = Turn(tenant or ""), b"".join(chunks)
        chunks[:] = [data]
        if PREVIOUS.encode() not in data:
            return turn
        body = await self._off_loop.run(len(data), partial(json_object, data))
        if (previous_id := body.get(PREVIOUS)) is None:
            return turn
        if not isinstance(previous_id, str):
            raise ApiError(400, f"{PREVIOUS} must be a text", param=PREVIOUS)
        earlier = await self._find("conversation", turn.tenant, previous_id, param=PREVIOUS)
        num_bytes, limit = len(data) + sum(map(len, earlier)), self._limits.max_body_bytes
        if num_bytes > limit:
            message = f"with the items of {PREVIOUS} the request has {num_bytes} bytes, the limit is {limit}"
            raise ApiError(413, message, param=PREVIOUS, code="body_too_large")
        held.add(num_bytes - len(data))
        chunks[:] = [await self._off_loop.run(num_bytes, partial(_insert, body, earlier))]
        return Turn(turn.tenant, previous_id, len(earlier))

    async def keep(self, turn: Turn, items: Callable[[], list[bytes]], num_bytes: int, response: Response) -> Response:
        """Stores the request's own `items`, of `num_bytes`, and its answer, once that has ended. An answer that cannot
        be stored, which is counted, is given nevertheless. Nothing of an answer that fails or breaks off stays stored.

        The end of an answer is not sent before it is stored, since the client may continue it at once.
        """
        if response.status_code != 200:
            return response
        if isinstance(response, StreamingResponse):
            pieces: Any = response.body_iterator
            first = await anext(pieces, None)  # closing a stream that has not begun would cancel nothing
            try:
                own = await self._off_loop.run(num_bytes, items)
            except BaseException:  # the client disconnected, or the deadline has passed
                await pieces.aclose()
                raise
            response.body_iterator = self._keep_stream(turn, own, first, pieces)
            return response
        own = await self._off_loop.run(num_bytes, items)
        made = json.loads(bytes(response.body))
        if made["status"] not in _STORED:
            made[PREVIOUS] = turn.previous_id
            return http_response(ResponseHead(200, response.raw_headers), json.dumps(made).encode())
        put = self._put(turn, own)
        try:
            body = await self._complete(turn, put, made)
        except BaseException:  # the client disconnected, or the deadline has passed
            self._discard(turn, put)
            raise
        return http_response(ResponseHead(200, response.raw_headers), body)

    async def _keep_stream(
        self,
        turn: Turn,
        own: list[bytes],
        piece: bytes | None,
        pieces: Any,  # noqa: ANN401 - Starlette's iterator
    ) -> AsyncGenerator[bytes, None]:
        """`piece`: the first one; `pieces`: the others."""
        put, is_complete, rest = self._put(turn, own), False, b""
        del own  # megabytes of images, which need not be held while the answer streams
        try:
            async with aclosing(pieces):
                while piece is not None:
                    *events, rest = (rest + piece).split(b"\n\n")
                    for event in events:
                        sent = await self._keep_event(turn, put, event)
                        is_complete = is_complete or event.startswith(_LAST_EVENTS)
                        yield sent + b"\n\n"
                    piece = await anext(pieces, None)
            if rest:
                yield rest
        finally:
            if not is_complete:
                self._discard(turn, put)

    def _put(self, turn: Turn, own: list[bytes]) -> asyncio.Task[bool]:
        """Starts to store the input of a response."""
        return asyncio.create_task(self._try_call("put", turn.tenant, turn.id, turn.previous_id, own))

    def _discard(self, turn: Turn, put: asyncio.Task[bool]) -> None:
        """Removes a response that will not be complete from the store, in a task: its request may be cancelled. Also if
        `put` failed here, since its call may reach the store later."""

        async def discard() -> None:
            await asyncio.wait([put])
            await self._try_call("discard", turn.tenant, turn.id)

        task = start_detached(lambda: asyncio.create_task(discard()))
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)

    async def _keep_event(self, turn: Turn, put: asyncio.Task[bool], event: bytes) -> bytes:
        """Returns the event to be sent in place of `event`. The last one stores the response."""
        if not event.startswith(_EVENTS):
            return event
        name, _, data = event.partition(b"\ndata: ")
        carried = json.loads(data)
        carried["response"][PREVIOUS] = turn.previous_id  # vLLM does not know it
        if event.startswith(_LAST_EVENTS):
            await self._complete(turn, put, carried["response"])
        return name + b"\ndata: " + json.dumps(carried).encode()

    async def _complete(self, turn: Turn, put: asyncio.Task[bool], response: Body) -> bytes:
        """Stores a response that has ended, and returns it as JSON."""
        response[PREVIOUS] = turn.previous_id
        made = json.dumps(response).encode()
        output = [json.dumps(item).encode() for item in response["output"]]
        is_put = await asyncio.shield(put)  # `_discard` waits for it even if this is cancelled
        if not (is_put and await self._try_call("complete", turn.tenant, turn.id, made, output)):
            self._discard(turn, put)
        return made

    async def answer(self, request: Request, path: str, tenant: str | None) -> Response:
        """Answers a request for `/v1/responses/{id}` or its `input_items`. Raises ApiError 404 if it is not found, 400
        for a stream, 503 if the store cannot be reached."""
        response_id, _, items = path.removeprefix(RESPONSES_PATH + "/").partition("/")
        if self._store is None:
            raise ApiError(404, "responses are not stored: ingress.stored_responses_bytes is 0", code="not_found")
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise ApiError(400, "stream: a stored response is given whole", param="stream", code="unsupported_field")
        found = await self._find("delete" if request.method == "DELETE" else items or "get", tenant or "", response_id)
        if found is True:
            found = json.dumps({"id": response_id, "object": "response", "deleted": True}).encode()
        elif items:
            newest_first = request.query_params.get("order", "desc") != "asc"
            found = json.dumps(_item_list(found, newest_first=newest_first)).encode()
        return http_response(ResponseHead(200, [(b"content-type", b"application/json")]), found)

    async def _find(self, method: str, tenant: str, response_id: str, *, param: str | None = None) -> Any:  # noqa: ANN401
        """Returns the result of a call. Raises ApiError 404 for an unknown id and alike for another tenant's, 503."""
        if (found := await self._call(method, tenant, response_id)) in (None, False):
            message = f"response {response_id!r} is not stored, or no longer"
            raise ApiError(404, message, param=param, code="response_not_found")
        return found

    async def _try_call(self, method: str, *arguments: object) -> bool:
        """Returns the result of a call, False if the store cannot be reached."""
        try:
            return bool(await self._call(method, *arguments))
        except ApiError:
            return False

    async def _call(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 - typed by the store's methods
        """Raises ApiError 503 if the store cannot be reached, which is counted."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await getattr(self._store, method).remote(*arguments)
        except (RayError, RayServeException, TimeoutError) as error:
            self._counts.add(Counter.RESPONSE_STORE_FAILURES)
            lost = "stored responses cannot be reached; try again"
            raise ApiError(503, lost, code="unavailable", retry_after_s=self._limits.retry_after_s) from error


def _insert(body: Body, earlier: Sequence[bytes]) -> bytes:
    """Returns `body` as JSON with the `earlier` items, which are JSON, before its own. Raises ApiError 400."""
    own = input_items(body.pop("input", None))
    if own is None:
        raise ApiError(400, "input must be a text or a list of items", param="input")
    items = b", ".join([*earlier, *map(body_to_json, own)])
    return body_to_json({**body, PREVIOUS: None})[:-1] + b', "input": [' + items + b"]}"


def _item_list(items: Sequence[bytes], *, newest_first: bool) -> Body:
    """Returns all items in OpenAI's format of a list. Those without an id are named by their number."""
    parsed = [json.loads(item) for item in items]
    listed = [{**item, "id": item.get("id") or f"item_{number}"} for number, item in enumerate(parsed)]
    listed = listed[::-1] if newest_first else listed
    ids = [item["id"] for item in listed] or [None]
    return {"object": "list", "data": listed, "first_id": ids[0], "last_id": ids[-1], "has_more": False}
