"""The application's deployments with handles for a test: an encoder that can be held up and broken, an ingress that
fails if an embedding comes its way, and a language model replica whose vLLM is a stand-in.

Everything else in them is the application's own. It must not know what is tested with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from configs.schema import AppConfig
from deployments import encoder as encoder_module
from deployments.encoder import EncoderReplica
from deployments.engine_stats import EngineStats
from deployments.incoming import Incoming
from deployments.lending import Lender
from deployments.llm import LLM
from deployments.llm_requests import Requests
from deployments.local_encoder import LocalEncoder
from deployments.media_keys import KeyStore, connector_class
from deployments.metrics import Counts
from deployments.packets import host_name
from deployments.prompt_work import PromptWork
from deployments.vllm_answers import VllmAnswers
from deployments.vllm_compat import AsgiApp, EmbeddingShape, first_token_clock
from deployments.wire import EncodedImage, ImageJob, ImageRefused, SharedEmbedding
from encoder.decoded import Decoded
from encoder.encoder import Encoder
from encoder.pipeline import Launched
from encoder.preprocess import Pixels
from tests.unit.deployments.watched import RecordedCounts

GATE_WAIT_S = 60
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
        encoder_module.Encoder = GatedEncoder  # type: ignore[misc]
        GatedEncoder.gate.set()
        super().__init__(config)
        self._counts: RecordedCounts = RecordedCounts()
        self._new_weights_always = False

    async def encode(self, job: ImageJob) -> EncodedImage | SharedEmbedding | ImageRefused:
        if self._new_weights_always:
            self.new_weights()
        return await super().encode(job)

    def hold(self) -> None:
        GatedEncoder.gate.clear()

    def release(self) -> None:
        GatedEncoder.gate.set()

    def fail_for_several(self, fail: bool = True) -> None:
        GatedEncoder.fails_for_several = fail

    def stop_lending(self) -> None:
        assert self._lender is not None
        self._lender.close()

    def lend_again(self) -> None:
        assert self._lender is not None
        self._lender = Lender(self._lender.shelf, unasked=self._read_unasked)

    def break_device(self, told: str) -> None:
        """As if CUDA had told so; every batch from now on fails with it."""
        GatedEncoder.fault = torch.AcceleratorError(told)

    def state(self) -> dict[str, int]:
        return {
            "pid": os.getpid(),
            "encoded": GatedEncoder.num_encoded,
            "queued_tokens": self._worker.queued_tokens,
            "flights": len(self._flights),
        }

    def counts(self) -> dict[str, int]:
        return self._counts.recorded

    def new_weights(self, always: bool = False) -> None:
        """As if the checkpoint had been exchanged. `always`: before each job from now on, until called again."""
        identity = self._worker.identity
        self._worker.identity = dataclasses.replace(identity, weights=identity.weights + "x")
        self._new_weights_always = always or self._new_weights_always

    def settle(self) -> None:
        self._new_weights_always = False

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


class SeenAnswers(VllmAnswers):
    """What it is asked with."""

    calls = 0
    came: Sequence[str] = ()
    writeable: Sequence[bool] = ()

    def checked(self, places: Any, embeddings: Any) -> Any:
        self.calls += 1
        images = embeddings.images
        self.came = [type(image).__name__ for image in images]
        self.writeable = [image.bits.flags.writeable for image in images if isinstance(image, EncodedImage)]
        return super().checked(places, embeddings)


class StandInLLM(LLM):
    """The application's replica around a stand-in for vLLM, which answers with what it was given."""

    def __init__(self, config: AppConfig, width: int, merge_size: int) -> None:
        self._engine = cast(Any, SimpleNamespace(shutdown=lambda: None))
        self._incoming = Incoming(Counts(), num_workers=0)
        self._stats = EngineStats()
        self._prompts = PromptWork(remembers=True)
        self._local = LocalEncoder(config, Counts()) if config.llm.fallback == "local" else None
        keys = KeyStore()
        self._answers = self.seen = SeenAnswers(stand_in(keys, self), keys, EmbeddingShape(width, merge_size))
        reads_on = None if config.transfer == "object_store" else host_name()
        self._requests = Requests(self._incoming, self._answers, reads_on=reads_on, local=self._local)
        self.disconnects = 0

    async def check_health(self) -> None:
        """The stand-in cannot die."""

    def state(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "calls": self.seen.calls,
            "disconnects": self.disconnects,
            "keys": len(self.seen.keys),
            "came": self.seen.came,
            "writeable": self.seen.writeable,
        }


def stand_in(store: KeyStore, replica: StandInLLM) -> AsgiApp:
    """`/v1/chat/completions`: the shapes and sums of the embeddings; `stream` in the body streams without end."""

    async def chat(request: Request) -> Response:
        body = await request.json()
        connector = connector_class(store)()
        found = []
        for message in body["messages"]:
            for part in message["content"] if isinstance(message["content"], list) else []:
                if part["type"] == "image_embeds":
                    tokens = connector.fetch_image_embedding(part["image_embeds"]["image_embeds"])
                    grid = connector.fetch_image_embedding(part["image_embeds"]["image_grid_thw"])
                    found.append(
                        {"shape": list(tokens.shape), "norm": float(tokens.norm()), "grid": grid.tolist()}
                        | {"uuid": part["uuid"], "dtype": str(tokens.dtype), "first": tokens[0, :4].tolist()}
                    )
        if clock := first_token_clock.get():
            clock.first_token_at_s = time.perf_counter()
        if body.get("stream"):
            return StreamingResponse(endless(request), media_type="text/event-stream")
        return JSONResponse({"images": found, "body": body, "traceparent": request.headers.get("traceparent")})

    async def endless(request: Request) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: " + json.dumps({"n": 1}).encode() + b"\n\n"
                await asyncio.sleep(EVENT_EVERY_S)
        finally:
            replica.disconnects += 1

    return cast(AsgiApp, Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])]))
