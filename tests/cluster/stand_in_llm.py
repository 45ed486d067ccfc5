"""The application's language model replica around a stand-in for vLLM, with handles for a test.

Everything else in it is the application's own.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from configs.schema import AppConfig
from deployments.common.model_path import local_model
from deployments.common.ray_private import max_ongoing_requests
from deployments.common.replica_status import application_name, replica_name
from deployments.llm.deployment import LLM
from deployments.llm.embedding_receiver import EmbeddingReceiver
from deployments.llm.image_requests import ImageRequests
from deployments.llm.received import ReceivedEmbeddings
from deployments.llm.requests import Requests
from deployments.llm.vllm_frontend import VllmFrontend
from deployments.routing.affinity import Call
from deployments.routing.prefill_load import PrefillLoad
from deployments.routing.replica_identity import llm_metadata
from deployments.telemetry.metrics import Counter, Counters, Histograms
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.tcp import get_secret
from deployments.vllm.compat import AsgiApp, first_token_clock
from deployments.vllm.connector.link import Loaded
from deployments.vllm.connector.scheduler_link import SchedulerLink
from deployments.vllm.connector.worker_link import WorkerLink
from deployments.vllm.connector.worker_memory import WorkerMemory
from deployments.vllm.references import References
from deployments.vllm.stats import EngineStats
from encoder.checkpoint.files import resolve_checkpoint
from encoder.item_header import VideoFields
from encoder.towers.weights import tower_identity
from tests.cluster.controlled import GATE_WAIT_S, node_host

MAX_EARLY = 128
"""Where there is no Serve that bounds requests."""
LOOK_S = 0.001
BUFFER_BYTES = 2**28
EVENT_EVERY_S = 0.1
"""Of an answer without end; several with many events a second would keep a core busy."""


class PathCounts(Counters):
    """Counts as ever, and remembers on which paths embeddings came."""

    def __init__(self) -> None:
        super().__init__()
        self.received: collections.Counter[str] = collections.Counter()

    def add(self, counter: Counter, number: int = 1, **labels: str) -> None:
        super().add(counter, number, **labels)
        if counter is Counter.EMBEDDINGS_RECEIVED:
            self.received[labels["path"]] += number


class SeenCalls(PrefillLoad):
    """Counts the calls for which this replica had been chosen."""

    num_as_chosen = 0

    def track(self, call: Call) -> Any:
        self.num_as_chosen += call.replica == replica_name()
        return super().track(call)


class SeenAnswers(VllmFrontend):
    """What it is asked with."""

    calls = 0
    received: ReceivedEmbeddings | None = None
    """Of the last request."""

    def answer(self, request: Any, references: Any, headers: Any, received: Any) -> Any:
        self.calls += 1
        self.received = received
        return super().answer(request, references, headers, received)

    @property
    def paths(self) -> list[str]:
        """How the last request's embeddings came."""
        return [] if self.received is None else [path.value for _, path in self.received.list_transfers()]


class StandInEngine:
    """Loads embeddings as an engine with one worker does, in this process; the answers are those of `stand_in`."""

    errored = False

    def __init__(self, address: str) -> None:
        """`address`: of the replica's link."""
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.pace_s = 0.0
        self._memory = WorkerMemory(torch.device("cpu"))
        self.scheduler = SchedulerLink(address)
        self._worker = WorkerLink(address, self._memory)
        self._names = itertools.count()

    async def load(self, digests: Sequence[str]) -> list[torch.Tensor]:
        """The embeddings, once all can be loaded, and each has been read in its turn: for `pace_s`."""
        clock, table = first_token_clock.get(), self.scheduler.table
        name = f"request-{next(self._names)}-{clock.token if clock else ''}"
        try:
            num_read = 0
            while num_read < len(digests):
                can_read = self.scheduler.reserve(name, digests) > num_read  # another thread grants
                num_read += can_read
                await asyncio.sleep(self.pace_s if can_read else LOOK_S)
            loaded = []
            for lease in filter(None, map(table.plan_load, digests)):
                loaded.append(self._memory.load(lease, getattr(torch, lease.header.dtype)))
                self._worker.report_loaded(Loaded(lease.name, loaded[-1].nbytes, 0.0))
            return loaded
        finally:
            self.scheduler.finish_request(name)

    async def check_health(self) -> None:
        if self.errored:
            raise RuntimeError("the engine has ended")

    def shutdown(self) -> None: ...


class StandInLLM(LLM):
    """The application's replica around a stand-in for vLLM, which answers with what it was given."""

    def __init__(self, config: AppConfig, width: int) -> None:
        buffer = ReceiveBuffer(BUFFER_BYTES)
        self.counts = PathCounts()
        secret = get_secret(config.tcp, application_name())
        self._receiver = EmbeddingReceiver(
            self.counts, Histograms(), num_workers=1, receive_buffer=buffer, secret=secret
        )
        self._engine = self.engine = StandInEngine(self._receiver.link.address)  # type: ignore[assignment]
        assert self._receiver.link.wait_for_engine(timeout_s=GATE_WAIT_S)
        self._stats = EngineStats()
        known = config.model != "auto"
        tower = tower_identity(resolve_checkpoint(local_model(config.model))) if known else ""
        self._metadata = llm_metadata(tower, node_host())
        self._prefill_load = self.seen_calls = SeenCalls(has_prefix_cache=True)
        references = References()
        self._frontend = self.seen = SeenAnswers(stand_in(references, self), references, engine_died=self._engine_died)
        max_early_requests = max_ongoing_requests() // 2 or MAX_EARLY
        self._requests = Requests(
            self._receiver,
            self._frontend,
            Counters(),
            width=width,
            max_early_requests=max_early_requests,
        )
        self._image_requests = ImageRequests(self._frontend, {}, config)
        self.disconnects = 0

    def hold(self) -> None:
        self.engine.goes_on.clear()

    def release(self) -> None:
        self.engine.goes_on.set()

    def pace(self, chunk_s: float) -> None:
        self.engine.pace_s = chunk_s

    def end_engine(self) -> int:
        """Returns the process id."""
        self.engine.errored = True
        self.release()
        return os.getpid()

    def state(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "calls": self.seen.calls,
            "disconnects": self.disconnects,
            "keys": len(self.seen.references._digests),
            "paths": self.seen.paths,
            "received": dict(self.counts.received),
            "called_as_chosen": self.seen_calls.num_as_chosen,
            "host": node_host(),
        }


async def until_left(request: Request) -> None:
    """Returns when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def stand_in(references: References, replica: StandInLLM) -> AsgiApp:
    """`/v1/chat/completions`: the shapes and sums of the embeddings, and `top_logprobs` times 2 ** 18 characters;
    `stream` in the body streams without end, or `max_tokens` events that carry them, and `[DONE]`; `user`: the seconds
    between two events. `/v1/responses`: the digests of the images, the number of items, and this process."""

    async def chat(request: Request) -> Response:
        body = await request.json()
        headers = [
            references.header(part[part["type"]]["url"])
            for message in body["messages"]
            for part in (message["content"] if isinstance(message["content"], list) else [])
            if part["type"] in ("image_url", "video_url")
        ]
        loading = asyncio.ensure_future(
            replica.engine.load([one.digest for header in headers for one in header.embeddings])
        )
        leaving = asyncio.ensure_future(until_left(request))
        await asyncio.wait([loading, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not loading.done():  # as vLLM's application does
            loading.cancel()
            return Response(status_code=499)
        parts = iter(await loading)
        found = []
        for header in headers:
            tokens = torch.cat([next(parts) for _ in header.embeddings])
            video = header.metadata if isinstance(header.metadata, VideoFields) else None
            found.append(
                {"shape": list(tokens.shape), "norm": float(tokens.norm()), "dtype": str(tokens.dtype)}
                | {"grid": video.grid if video else header.metadata, "uuid": header.digest}
                | {"first": (tokens[:, 0] if video else tokens[0, :4]).tolist()}
            )
        await replica.engine.goes_on.wait()
        if replica.engine.errored:  # as vLLM's application says it
            return JSONResponse({"error": {"message": "EngineCore encountered an issue.", "code": 500}}, 500)
        if clock := first_token_clock.get():
            clock.tick()
        if body.get("stream"):
            return StreamingResponse(
                events(body.get("max_tokens"), found, float(body.get("user", EVENT_EVERY_S))),
                media_type="text/event-stream",
            )
        answer = {"images": found, "body": body, "traceparent": request.headers.get("traceparent")}
        return JSONResponse(answer | {"more": "x" * (body.get("top_logprobs", 0) << 18)})

    async def events(count: int | None, found: list[dict[str, Any]], every_s: float) -> AsyncIterator[bytes]:
        complete = False
        try:
            for _ in itertools.count() if count is None else range(count):
                yield b"data: " + json.dumps({"n": 1} if count is None else {"images": found}).encode() + b"\n\n"
                await asyncio.sleep(every_s)
            yield b"data: [DONE]\n\n"
            complete = True
        finally:
            replica.disconnects += not complete

    async def responses(request: Request) -> Response:
        body = await request.json()
        parts = [part for item in body["input"] if isinstance(item["content"], list) for part in item["content"]]
        digests = [references.header(part["image_url"]).digest for part in parts if part["type"] == "input_image"]
        seen = json.dumps({"digests": digests, "items": len(body["input"]), "replica": os.getpid()})
        text = {"type": "output_text", "text": seen, "annotations": []}
        output = [{"type": "message", "role": "assistant", "id": "msg", "status": "completed", "content": [text]}]
        return JSONResponse({"id": body["request_id"], "object": "response", "status": "completed", "output": output})

    routes = {"/v1/chat/completions": chat, "/v1/responses": responses}
    return cast(AsgiApp, Starlette(routes=[Route(path, told, methods=["POST"]) for path, told in routes.items()]))
