"""The application's deployments with handles for a test: an encoder that can be held up and broken, an ingress that
fails if an embedding comes its way, and a language model replica whose vLLM is a stand-in.

Everything else in them is the application's own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from configs.schema import AppConfig
from deployments.common.model_path import local_model
from deployments.common.replica_status import max_ongoing_requests
from deployments.encoder_replica import deployment as encoder_module
from deployments.encoder_replica.deployment import EncoderReplica
from deployments.llm.deployment import LLM
from deployments.llm.embedding_receiver import EmbeddingReceiver
from deployments.llm.received import ReceivedEmbeddings
from deployments.llm.requests import Requests
from deployments.llm.vllm_frontend import VllmFrontend
from deployments.routing.prefill_load import PrefillLoad
from deployments.telemetry.metrics import Counters, Histograms
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.unix_socket import host_id
from deployments.vllm.compat import AsgiApp, first_token_clock
from deployments.vllm.connector.link import Loaded
from deployments.vllm.connector.scheduler_link import SchedulerLink
from deployments.vllm.connector.worker_link import WorkerLink
from deployments.vllm.connector.worker_memory import WorkerMemory
from deployments.vllm.references import References
from deployments.vllm.stats import EngineStats
from encoder.checkpoint.files import resolve_checkpoint
from encoder.encoder import Encoder
from encoder.images.decoded import Decoded
from encoder.pixels.preprocess import Pixels
from encoder.staging.pipeline import Launched
from encoder.towers.weights import tower_identity
from tests.cluster.watched import RecordedCounts

GATE_WAIT_S = 60
MAX_EARLY = 128
"""Where there is no Serve that bounds requests."""
LOOK_S = 0.001
BUFFER_BYTES = 2**28
EVENT_EVERY_S = 0.1
"""Of an answer without end; several with many events a second would keep a core busy."""


class GatedEncoder(Encoder):
    """Waits for a gate before it encodes, and counts. One a process."""

    gate = threading.Event()
    num_encoded = 0
    dies = fails_for_several = False
    fault: BaseException | None = None

    def launch_batches(self, pixels: Sequence[Pixels | Decoded]) -> Iterator[Launched]:
        GatedEncoder.gate.wait(GATE_WAIT_S)
        if GatedEncoder.dies:
            raise SystemExit(1)
        if GatedEncoder.fails_for_several and len(pixels) > 1:
            raise RuntimeError("out of memory")
        if GatedEncoder.fault is not None:
            raise GatedEncoder.fault
        GatedEncoder.num_encoded += len(pixels)
        return super().launch_batches(pixels)


class ControlledEncoder(EncoderReplica):
    def __init__(self, config: AppConfig) -> None:
        vars(encoder_module).update(Encoder=GatedEncoder)
        GatedEncoder.gate.set()
        super().__init__(config)
        self._counts: RecordedCounts = RecordedCounts()

    def hold(self) -> None:
        GatedEncoder.gate.clear()

    def release(self) -> None:
        GatedEncoder.gate.set()

    def fail_for_several(self, fail: bool = True) -> None:
        GatedEncoder.fails_for_several = fail

    def stop_lending(self) -> None:
        assert self._server is not None
        self._server.close()

    def lend_again(self) -> None:
        assert self._server is not None
        self._server = self._make_server(self._server.store)

    def break_device(self, told: str) -> None:
        """As if CUDA had told so; every batch from now on fails with it."""
        GatedEncoder.fault = torch.AcceleratorError(told)

    def state(self) -> dict[str, int]:
        return {
            "pid": os.getpid(),
            "encoded": GatedEncoder.num_encoded,
            "queued_tokens": self._worker.queued_tokens,
            "flights": len(self._single_flight),
        }

    def counts(self) -> dict[str, int]:
        return self._counts.recorded

    async def health(self) -> str:
        try:
            await self.check_health()
        except RuntimeError as error:
            return str(error)
        return "healthy"

    async def end_batching_task(self) -> str:
        """Returns what `health` says then."""
        task = self._hand_off._is_batching_task_alive.__self__.queue._handle_batch_task  # type: ignore[attr-defined]
        task.cancel()
        await asyncio.wait([task])
        return await self.health()

    async def end_gpu_thread(self) -> str:
        """Returns what `health` says then."""
        GatedEncoder.dies = True
        self._worker.submit(Pixels(np.zeros((3, 32, 32), np.uint8), (1, 2, 2)))
        await asyncio.to_thread(self._worker._thread.join, GATE_WAIT_S)
        return await self.health()


class SeenAnswers(VllmFrontend):
    """What it is asked with."""

    calls = 0
    received: ReceivedEmbeddings | None = None
    """Of the last request."""

    def answer(self, request: Any, references: Any, headers: Any, received: Any, timeline: Any) -> Any:
        self.calls += 1
        self.received = received
        return super().answer(request, references, headers, received, timeline)

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
        self._memory = WorkerMemory(torch.device("cpu"))
        self.scheduler = SchedulerLink(address)
        self._worker = WorkerLink(address, self._memory)
        self._names = itertools.count()

    async def load(self, digests: Sequence[str]) -> list[torch.Tensor]:
        """The embeddings, once all can be loaded."""
        name, table = f"request-{next(self._names)}-", self.scheduler.table
        if clock := first_token_clock.get():
            clock.engine_requests.add(name)
        try:
            while self.scheduler.reserve(name, digests) < len(digests):  # noqa: ASYNC110 - another thread grants
                await asyncio.sleep(LOOK_S)
            loaded = []
            for lease in map(table.plan_load, digests):
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
        buffer = ReceiveBuffer(None, BUFFER_BYTES)
        self._receiver = EmbeddingReceiver(Counters(), Histograms(), num_workers=1, receive_buffer=buffer)
        self._engine = self.engine = StandInEngine(self._receiver.link.address)  # type: ignore[assignment]
        assert self._receiver.link.wait_for_engine(timeout_s=GATE_WAIT_S)
        self._stats = EngineStats()
        self._tower = "" if config.model == "auto" else tower_identity(resolve_checkpoint(local_model(config.model)))
        self._prefill_load = PrefillLoad(has_prefix_cache=True)
        references = References()
        self._frontend = self.seen = SeenAnswers(stand_in(references, self), references, engine_died=self._engine_died)
        shm_host = None if config.transfer == "object_store" else host_id()
        max_early_requests = max_ongoing_requests() // 2 or MAX_EARLY
        self._requests = Requests(
            self._receiver,
            self._frontend,
            Counters(),
            width=width,
            shm_host=shm_host,
            max_early_requests=max_early_requests,
        )
        self.disconnects = 0

    def hold(self) -> None:
        self.engine.goes_on.clear()

    def release(self) -> None:
        self.engine.goes_on.set()

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
            "keys": len(self.seen.references),
            "paths": self.seen.paths,
        }


def stand_in(references: References, replica: StandInLLM) -> AsgiApp:
    """`/v1/chat/completions`: the shapes and sums of the embeddings; `stream` in the body streams without end, or
    `max_tokens` events that carry them, and `[DONE]`; `user`: the seconds between two events."""

    async def chat(request: Request) -> Response:
        body = await request.json()
        headers = [
            references.header(part["image_url"]["url"])
            for message in body["messages"]
            for part in (message["content"] if isinstance(message["content"], list) else [])
            if part["type"] == "image_url"
        ]
        embeddings = await replica.engine.load([header.digest for header in headers])
        found = [
            {"shape": list(tokens.shape), "norm": float(tokens.norm()), "grid": header.metadata}
            | {"uuid": header.digest, "dtype": str(tokens.dtype), "first": tokens[0, :4].tolist()}
            for header, tokens in zip(headers, embeddings, strict=True)
        ]
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
        return JSONResponse({"images": found, "body": body, "traceparent": request.headers.get("traceparent")})

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

    return cast(AsgiApp, Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])]))
