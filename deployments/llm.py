"""The language model replica: vLLM with vLLM's own OpenAI application, fed with embeddings instead of images.

It starts the engine, has requests answered (`deployments/llm_requests.py`) and tells what it has to do. It must not
know how images are fetched, decoded or encoded, nor how embeddings come.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

from pydantic import JsonValue

from configs.schema import AppConfig
from deployments import asgi, vllm_compat
from deployments.affinity import Call
from deployments.arrived import Image
from deployments.checkpoint import local_model
from deployments.early import Early
from deployments.engine_stats import EngineStats
from deployments.incoming import Encoding, Incoming
from deployments.llm_requests import Requests
from deployments.llm_scaling import KV_CACHE_USE, RUNNING_REQUESTS, WAITING_REQUESTS, EngineLoad
from deployments.local_encoder import LocalEncoder
from deployments.log_buffers import log_buffers_kept
from deployments.media_keys import KeyStore
from deployments.metrics import Counts
from deployments.nixl_memory import NixlMemory
from deployments.orphans import guard_children
from deployments.packets import host_name
from deployments.prompt_work import PromptWork
from deployments.remote_trial import RemoteWay
from deployments.replica_report import Report, llm_report, replica_name
from deployments.transfer_trial import loads_by_itself
from deployments.vllm_answers import VllmAnswers
from deployments.wire import (
    HttpRequest,
    ImageJob,
    ImagePlace,
    Piece,
    ResponseHead,
    SharedEmbedding,
)
from encoder.identity import EncoderIdentity

logger = logging.getLogger("ray.serve")

ANY_REPLICA = Call()
TRIAL_S = 120.0
"""For the first request that the engine loads an embedding for."""


class LLM:
    """One vLLM engine. Serve calls `handle` for every request that the ingress lets through."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]  # Serve awaits it, on its event loop
        engine_args: dict[str, JsonValue] = {"served_model_name": [config.model], **config.llm.engine_args}
        counts = Counts()
        remote = None if config.transfer in ("object_store", "shared_memory") else _remote_way(config, counts)
        workers = cast(int, engine_args.get("tensor_parallel_size", 1))
        self._incoming = Incoming(counts, num_workers=workers, remote=remote)
        self._local = LocalEncoder(config, Counts()) if config.llm.fallback == "local" else None
        why_not = _why_not_loading(config)
        begin_from_tokens = None if why_not else _begin_from_tokens(config)
        self._stats = EngineStats()
        with log_buffers_kept():
            self._engine, args = vllm_compat.start_engine(
                local_model(config.model),
                engine_args,
                config.llm.server_args,
                cpu_kv_cache_gib=None if config.llm.num_gpus else config.llm.cpu_kv_cache_gib,
                link=self._incoming.link.address if why_not is None else None,
                stats=self._stats,
                begin_from_tokens=begin_from_tokens,
            )
            caches_prefixes = vllm_compat.caches_prefixes(self._engine)
            self._prompts = PromptWork(remembers=caches_prefixes)
            self._guard = guard_children()
            keys, shape = KeyStore(), vllm_compat.embedding_shape(self._engine)
            app = await vllm_compat.build_application(self._engine, args, keys)
            self._answers = VllmAnswers(app, keys, shape)
            reads_on = None if config.transfer == "object_store" else host_name()
            self._requests = Requests(self._incoming, self._answers, reads_on=reads_on, local=self._local)
            self._lifespan = app.router.lifespan_context(app)  # type: ignore[attr-defined]
            await self._lifespan.__aenter__()
            await self._warm_up(args.model)  # the first name that it serves under
        if why_not is None:
            why_not = await loads_by_itself(self._incoming, self._answer_trial, args.model, shape)
        self._incoming.prefix_cached = why_not is None and caches_prefixes
        if why_not is None and begin_from_tokens is not None:
            self._requests.early = Early(self._incoming, self._answers, counts)
        if why_not is not None and config.transfer != "object_store":
            if config.transfer == "shared_memory":
                raise RuntimeError(f"transfer: shared_memory is not possible: {why_not}")
            logger.warning("embeddings go to the engine with the requests: %s", why_not)

    async def _warm_up(self, model: str) -> None:
        """Answers a request, so that the first client does not wait for what vLLM does at its first one."""
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        headers = [(b"content-type", b"application/json")]
        request = HttpRequest("POST", "/v1/chat/completions", b"", headers, json.dumps(body).encode())
        async for _ in asgi.call(self._answers.app, request):
            pass

    async def _answer_trial(self, request: HttpRequest, place: ImagePlace, image: SharedEmbedding) -> int:
        """The status of the answer. A trial that takes longer than TRIAL_S has failed: 504."""
        status = 500
        try:
            async with asyncio.timeout(TRIAL_S):
                async for piece in self.handle(request, [place], [_at_once(image)]):
                    if isinstance(piece, ResponseHead):
                        status = piece.status
        except TimeoutError:
            return 504
        return status

    async def check_health(self) -> None:
        """Raises when the engine is dead; Serve then replaces the replica."""
        await self._engine.check_health()
        self._incoming.forget_the_lost()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve takes to its autoscaling policy, every few seconds (`deployments/scaling.py`).

        An engine that is given nothing more says nothing more, not even that what it had was given up.
        """
        requests = self._requests
        load = self._stats.load(besides=requests.num_begun) if requests.num_under_way else EngineLoad()
        return {
            RUNNING_REQUESTS: float(load.running),
            WAITING_REQUESTS: float(load.waiting),
            KV_CACHE_USE: load.kv_cache_use,
        }

    def record_routing_stats(self) -> dict[str, Any]:
        """What routers ask before a long prompt, and Serve every few seconds (`deployments/affinity_router.py`)."""
        return self._prompts.told()

    def report(self) -> Report:
        """What the page's view of the cluster shows of this replica."""
        return llm_report(replica_name(), self.record_autoscaling_stats())

    async def encoder_identity(self) -> EncoderIdentity | None:
        """Of what it encodes with where no encoder is there; None where it cannot, or not now."""
        return None if self._local is None else await self._local.identity()

    def __del__(self) -> None:
        local: LocalEncoder | None = getattr(self, "_local", None)
        if local is not None:
            local.stop()
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()
        if hasattr(self, "_incoming"):
            self._incoming.shut_down()

    async def handle(
        self,
        request: HttpRequest,
        places: Sequence[ImagePlace],
        encodings: Sequence[Encoding | ImageJob] = (),
        call: Call = ANY_REPLICA,
    ) -> AsyncIterator[Piece]:
        """Answers one request, as `Requests.answer` does. `call`: as which it came here."""
        with self._prompts.taken(call) as prompt:
            async with aclosing(self._requests.answer(request, places, encodings)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, ResponseHead) and piece.status == 200:
                        self._prompts.read(prompt)
                    yield piece


async def _at_once(image: Image) -> Image:
    return image


def _remote_way(config: AppConfig, counts: Counts) -> RemoteWay:
    """Raises NotInstalledError where NIXL is asked for and cannot be used."""
    return RemoteWay(
        counts,
        NixlMemory,
        num_bytes=config.llm.landing_bytes,
        always=config.transfer == "nixl",
        host=host_name(),
    )


def _begin_from_tokens(config: AppConfig) -> int | None:
    """None where prompts are not to be read, or cannot be, before all of their embeddings are there."""
    if config.llm.begin_from_tokens is None:
        return None
    if why_not := vllm_compat.why_not_beginning(config.llm.engine_args):
        logger.warning("vLLM is given requests once all of their images are encoded: %s", why_not)
        return None
    return config.llm.begin_from_tokens


def _why_not_loading(config: AppConfig) -> str | None:
    if config.transfer == "object_store":
        return "transfer is object_store"
    return vllm_compat.why_not_loading(config.llm.engine_args)
