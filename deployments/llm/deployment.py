"""The LLM replica: vLLM with its own OpenAI application, which gets references in place of images.

Starts the engine, passes requests to `deployments/llm/requests.py`, and reports load and health to Serve.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from pydantic import JsonValue

from configs.schema import AppConfig
from deployments.common.messages import HttpRequest, ImageJob, ItemReference, Piece, ResponseHead, SharedEmbedding
from deployments.common.model_path import (
    encoder_checkpoint,
    expected_tower,
    generic_engine_args,
    local_model,
    uses_own_tower,
)
from deployments.common.ray_private import max_ongoing_requests
from deployments.common.replica_errors import EngineDeadError
from deployments.common.replica_status import Report, application_name, llm_report, replica_name
from deployments.llm.child_guard import guard_children, stop_looking
from deployments.llm.embedding_receiver import EmbeddingReceiver, Encoding
from deployments.llm.image_requests import ImageRequests
from deployments.llm.received import Image
from deployments.llm.requests import Requests
from deployments.llm.startup_requests import EngineLoadError, probe_engine_loads, warm_up
from deployments.llm.vllm_frontend import VllmFrontend
from deployments.routing.affinity import Call
from deployments.routing.prefill_load import PrefillLoad
from deployments.routing.replica_identity import encoder_metadata, llm_metadata
from deployments.scaling.llm_scaler import KV_CACHE_USE, RUNNING_REQUESTS, WAITING_REQUESTS, EngineLoad
from deployments.telemetry.log_buffers import preserve_log_buffers
from deployments.telemetry.metrics import Counter, Counters, ErrorLogCounter, Histograms
from deployments.transfer.rdma_process import RdmaProcess
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.remote_reader import RemoteReader
from deployments.transfer.tcp import get_secret
from deployments.transfer.unix_socket import host_id
from deployments.vllm import compat
from deployments.vllm.preparer import Preparer, count_tokens, sample_header
from deployments.vllm.references import DecodedImages, References
from deployments.vllm.stats import EngineStats
from encoder.checkpoint.fingerprint import checkpoint_fingerprint
from encoder.images.generic_identity import GenericIdentity
from encoder.item_header import ChunkHeader, ItemHeader

logger = logging.getLogger("ray.serve")

ANY_REPLICA = Call()
PROBE_TIMEOUT_S = 120.0
"""Timeout of the probe, the first request whose embedding the engine loads."""
PROBE_DIGEST = hashlib.sha256(b"probe").hexdigest()


class LLM:
    """One vLLM engine. Serve calls `handle` for every request that the ingress admits."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]  # Serve awaits it, on its event loop
        engine_args: dict[str, JsonValue] = {"served_model_name": [config.model], **config.llm.engine_args}
        own_tower = config.encoder.implementation == "none"
        unsupported_reason = None if own_tower else compat.engine_load_unsupported_reason(engine_args)
        if unsupported_reason:
            raise EngineLoadError(f"vLLM's engine cannot load embeddings: {unsupported_reason}")
        counts = Counters()
        ErrorLogCounter.install(counts)
        receive_buffer, remote_reader = ReceiveBuffer(config.llm.receive_buffer_bytes), None
        if config.transfer == "nixl":
            rdma = RdmaProcess(on_restarted=lambda: counts.add(Counter.RDMA_RESTARTS))
            remote_reader = RemoteReader(rdma, receive_buffer)
        self._receiver = EmbeddingReceiver(
            counts,
            Histograms(),
            num_workers=cast(int, engine_args.get("tensor_parallel_size", 1)),
            receive_buffer=receive_buffer,
            secret=get_secret(config.tcp, application_name()),
            remote_reader=remote_reader,
        )
        self._stats = EngineStats()
        self._guard = guard_children()
        with preserve_log_buffers():
            self._engine, args = compat.start_engine(
                local_model(config.model),
                engine_args,
                config.llm.server_args,
                cpu_kv_cache_gib=None if config.llm.num_gpus else config.llm.cpu_kv_cache_gib,
                link=None if own_tower else self._receiver.link.address,
                stats=self._stats,
                early_prefill_min_tokens=_early_prefill_min_tokens(config),
            )
            self._prefill_load = PrefillLoad(has_prefix_cache=compat.has_prefix_cache(self._engine))
            stop_looking(self._guard)
            references, width = References(), compat.embedding_width(self._engine)
            images: DecodedImages = {}
            app = await compat.build_application(self._engine, args, images if own_tower else references)
            self._frontend = VllmFrontend(app, references, engine_died=self._engine_died)
            self._requests = Requests(
                self._receiver,
                self._frontend,
                counts,
                width=width,
                audio_width=compat.audio_width(self._engine),
                max_early_requests=max_ongoing_requests() // 2,
            )
            self._image_requests = ImageRequests(self._frontend, images, config)
            self._lifespan = app.router.lifespan_context(app)  # type: ignore[attr-defined]
            await self._lifespan.__aenter__()
            await warm_up(app, args.model)  # the first served model name
        if own_tower:
            self._metadata = encoder_metadata(await asyncio.to_thread(_engine_identity, config), host_id())
            return
        self._metadata = llm_metadata(await asyncio.to_thread(expected_tower, config), host_id())
        if uses_own_tower(config):
            header = compat.one_token_header(self._engine, PROBE_DIGEST)
        else:
            model, shared_args = local_model(config.model), generic_engine_args(config)
            header = await asyncio.to_thread(sample_header, model, shared_args, PROBE_DIGEST)
        await probe_engine_loads(self._receiver, self._answer_probe, args.model, header, width)
        if refused := compat.early_prefill_refused_by_model(self._engine):
            logger.warning("early prefill is disabled: %s", refused)

    async def _answer_probe(
        self, request: HttpRequest, reference: ItemReference, header: ItemHeader, image: SharedEmbedding
    ) -> int:
        """Returns the status of the probe's answer; 504 if it takes longer than PROBE_TIMEOUT_S."""
        status = 500
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                async for piece in self.handle(request, [reference], [header], [_resolved(image)]):
                    if isinstance(piece, ResponseHead):
                        status = piece.status
        except TimeoutError:
            return 504
        return status

    async def check_health(self) -> None:
        """Raises if the engine is dead or embeddings cannot reach it; Serve then replaces the replica."""
        await self._engine.check_health()
        self._receiver.check()

    def _engine_died(self) -> bool:
        """Whether the engine or its link has failed: requests cannot be answered, and `check_health` will raise."""
        return self._engine.errored or self._receiver.link.lost() is not None

    def _raise_if_dead(self) -> None:
        if self._engine_died():
            raise EngineDeadError(replica_name(), had_request=False)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the load that Serve passes to its autoscaling policy (`deployments/scaling/policies.py`).

        It is 0 without requests in flight: an idle engine reports nothing, not even that its requests were aborted.
        """
        requests = self._requests
        in_flight = requests.num_in_flight + self._image_requests.num_in_flight
        load = self._stats.load(num_excluded=requests.num_early_prefills) if in_flight else EngineLoad()
        return {
            RUNNING_REQUESTS: float(load.running_requests),
            WAITING_REQUESTS: float(load.waiting_requests),
            KV_CACHE_USE: load.kv_cache_use,
        }

    def record_replica_metadata(self) -> dict[str, str]:
        """Returns the tower whose embeddings this replica takes, or its own, and its host, which Serve sends to routers
        and ingresses once."""
        return self._metadata

    def record_routing_stats(self) -> dict[str, Any]:
        """Returns the prefill load and the cached conversations. Routers ask before a long prompt, Serve's controller
        never (`NEVER_S` in `deployments/app.py`).

        Raises EngineDeadError if the engine has ended: without any load it would seem the best choice.
        """
        self._raise_if_dead()
        return self._prefill_load.routing_stats()

    def report(self) -> Report:
        """Returns this replica's status for the dashboard's view of the cluster."""
        return llm_report(replica_name(), self.record_autoscaling_stats())

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()
        if hasattr(self, "_receiver"):
            self._receiver.shut_down()

    async def handle(
        self,
        request: HttpRequest,
        references: Sequence[ItemReference] = (),
        headers: Sequence[ItemHeader | ChunkHeader | None] = (),
        encodings: Sequence[Encoding] | Sequence[ImageJob] = (),
        call: Call = ANY_REPLICA,
    ) -> AsyncIterator[Piece]:
        """Answers one request, as `Requests.answer` does, or with image files, as `ImageRequests.answer` does. `call`:
        its routing attributes.

        Raises EngineDeadError in place of any error if the engine has ended.
        """
        self._raise_if_dead()
        with self._prefill_load.track(call) as prompt:
            try:
                clock = compat.FirstTokenClock(on_first_token=partial(self._prefill_load.finish_prefill, prompt))
                files = [file for file in encodings if isinstance(file, ImageJob)]
                if not files:
                    sent = cast("Sequence[Encoding]", encodings)
                    answer = self._requests.answer(request, references, headers, sent, clock)
                else:
                    if isinstance(encodings, list):
                        encodings.clear()  # Serve keeps the arguments until the answer ends
                    answer = self._image_requests.answer(request, references, files, clock)
                async with aclosing(answer) as pieces:
                    async for piece in pieces:
                        yield piece
            except Exception as error:
                if self._engine_died():
                    raise EngineDeadError(replica_name(), had_request=True) from error
                raise


async def _resolved(image: Image) -> Image:
    return image


def _engine_identity(config: AppConfig) -> GenericIdentity:
    """Returns the identity of the engine's own tower. Takes seconds, for vLLM's processor counts tokens."""
    path = encoder_checkpoint(config)
    preparer = Preparer(path, generic_engine_args(config), max_pixels_decoded=config.ingress.max_image_pixels)
    counts = count_tokens(lambda file: preparer.prepare(file, "image", PROBE_DIGEST).num_tokens)
    return GenericIdentity(checkpoint_fingerprint(path), "", counts, in_engine=True)


def _early_prefill_min_tokens(config: AppConfig) -> int | None:
    """Returns None if early prefill is disabled or vLLM does not support it, or without encoders."""
    if config.llm.early_prefill_min_tokens is None or config.encoder.implementation == "none":
        return None
    if unsupported_reason := compat.early_prefill_unsupported_reason(config.llm.engine_args):
        logger.warning("early prefill is disabled: %s", unsupported_reason)
        return None
    return config.llm.early_prefill_min_tokens
