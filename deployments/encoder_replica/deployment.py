"""Serve deployment of the encoder: embedding cache, request coalescing, decoding, and the hand-off to the GPU thread.

`gpu/worker.py` owns the encoder, `decode/pool.py` the pixels.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from ray import serve
from torch import Tensor

from configs.schema import AppConfig
from deployments.common import names
from deployments.common.fair_queue import virtual_arrival_s
from deployments.common.messages import (
    EncodedImage,
    EncodeTimings,
    ImageJob,
    ImageRefused,
    PlannedVideo,
    SharedEmbedding,
)
from deployments.common.model_path import encoder_checkpoint, uses_own_tower
from deployments.common.ray_private import is_batching_task_alive, refuse_calls
from deployments.common.replica_errors import OtherIdentityError, QueueFullError, WorkerEndedError
from deployments.common.replica_status import Report, application_name, encoder_report, replica_name
from deployments.common.throughput import InFlightTokens
from deployments.encoder_replica.busy import is_too_busy
from deployments.encoder_replica.decode.pool import DecodePool
from deployments.encoder_replica.decode.prepare_pool import ItemFile, PreparePool
from deployments.encoder_replica.embedding_cache import EmbeddingCache
from deployments.encoder_replica.generic import load_generic_encoder
from deployments.encoder_replica.gpu.jobs import Encoded, Item, WorkerEvents
from deployments.encoder_replica.gpu.worker import GpuWorker
from deployments.encoder_replica.own_tower import load_own_encoder
from deployments.encoder_replica.single_flight import SingleFlight
from deployments.routing.affinity import Call
from deployments.routing.replica_identity import encoder_metadata, wait_for_rollout_turn
from deployments.scaling.encoder_scaler import (
    ARRIVING_TOKENS_PER_S,
    BACKLOG_TOKENS,
    CACHE_BYTES,
    RECEIVED_TOKENS,
    TOKENS_PER_IMAGE,
    TOKENS_PER_S,
)
from deployments.telemetry.log_buffers import preserve_log_buffers
from deployments.telemetry.metrics import (
    Counter,
    Counters,
    ErrorLogCounter,
    Gauge,
    Histogram,
    Histograms,
    RunMetrics,
    gauge_setter,
)
from deployments.telemetry.tracing import Stage, record_encode_spans, record_span
from deployments.transfer.header import HEADER_BYTES
from deployments.transfer.rdma_process import RdmaProcess
from deployments.transfer.remote_sender import RemoteSender
from deployments.transfer.same_host import ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.tcp import get_secret
from deployments.transfer.tcp_server import TcpServer
from deployments.transfer.unix_socket import host_id
from encoder.checkpoint.video_rules import VideoRules
from encoder.images.identity import EncoderIdentity
from encoder.images.size import ImageError
from encoder.item_header import ChunkHeader, ItemHeader
from encoder.staging.streams import pin_shared
from encoder.video.bounds import VideoBounds, VideoError

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger("ray.serve")

HAND_OFF_IMAGES = 32
HAND_OFF_CALLS = 16  # Serve warns if HAND_OFF_CALLS * HAND_OFF_IMAGES exceeds the replica's max_ongoing_requests
HAND_OFF_WAIT_S = 0.001


class EncoderReplica:
    """Encodes images on one GPU. Serve calls `encode` once for every image of every request."""

    @preserve_log_buffers()  # loading an attention kernel may import vLLM
    def __init__(self, config: AppConfig) -> None:
        path: Path = encoder_checkpoint(config)
        limits = config.encoder_replica
        self._max_tokens = config.ingress.max_visual_tokens_per_image
        self._video_bounds = VideoBounds.of(config.ingress.video)
        self._videos: VideoRules | None = None
        self._counts = Counters()
        ErrorLogCounter.install(self._counts)
        count_lost = partial(self._counts.add, Counter.DECODERS_LOST)
        prepare_pool = None if uses_own_tower(config) else PreparePool(path, config, count_lost)
        if prepare_pool is not None:
            self._decoders: DecodePool | PreparePool = prepare_pool
        self._cache: EmbeddingCache[EncodedImage] = EmbeddingCache(limits.cache_bytes)
        store = self._make_store(config)
        self._server = self._make_server(store)
        self._tcp = self._make_tcp_server(store, config)
        self._remote = None
        if config.transfer == "nixl":
            rdma = RdmaProcess(on_restarted=partial(self._counts.add, Counter.RDMA_RESTARTS))
            self._remote = RemoteSender(store, rdma)
        self._times = Histograms()
        self._run_metrics = RunMetrics(self._counts)
        self._worker = GpuWorker(
            lambda: (
                load_own_encoder(path, config)
                if prepare_pool is None
                else load_generic_encoder(path, config, prepare_pool)
            ),
            max_queued_tokens=limits.max_queued_tokens,
            allocate=partial(self._allocate, store),
            events=WorkerEvents(
                on_queued_tokens=gauge_setter(Gauge.ENCODER_QUEUED_TOKENS),
                on_retry=lambda batches: self._counts.add(Counter.BATCHES_RETRIED, batches),
                on_run=self._run_metrics,
                on_gpu_failure=lambda fault: self._counts.add(Counter.GPU_FAILURES, reason=fault.value),
            ),
        )
        arenas = [store.arena]
        if prepare_pool is None:
            assert isinstance(self._worker.identity, EncoderIdentity)
            self._videos = self._worker.identity.videos
            self._decoders = DecodePool(
                self._worker.identity.rules,
                workers=limits.decode_workers,
                max_pixels=config.ingress.max_image_pixels,
                timeout_s=limits.decode_timeout_s,
                shm_bytes=limits.pixel_shm_bytes,
                resize=not self._worker.resizes_on_device,
                on_piped=lambda: self._counts.add(Counter.PIXEL_SHM_FALLBACKS),
                memory_bytes=limits.decode_memory_bytes,
                on_lost=count_lost,
            )
            arenas.append(self._decoders.arena)
        if torch.cuda.is_available():
            for arena in arenas:
                try:
                    pin_shared(arena.address, arena.num_bytes)
                except RuntimeError as error:  # staging then copies through its own pinned memory
                    logger.warning(
                        "shared memory could not be pinned, so images or embeddings are copied once more: %s", error
                    )
        self._single_flight: SingleFlight[EncodedImage] = SingleFlight()
        self._in_flight = InFlightTokens()
        self._name = replica_name()
        self._has_batching_task = False  # Serve creates its batching task on the first call
        refuse_calls(self._is_too_busy)

    async def record_replica_metadata(self) -> dict[str, str]:
        """Returns identity and host, which Serve sends to routers and ingresses once. Waits for its turn in a
        rollout."""
        await wait_for_rollout_turn(names.ENCODER, self._worker.identity.tower)
        return encoder_metadata(self._worker.identity, host_id())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the load, which Serve passes to `deployments/scaling/policies.py` every few seconds."""
        return {
            BACKLOG_TOKENS: float(self._in_flight.tokens),
            ARRIVING_TOKENS_PER_S: self._in_flight.arriving_tokens_per_s(),
            RECEIVED_TOKENS: float(self._in_flight.received),
            TOKENS_PER_S: self._worker.tokens_per_s,
            TOKENS_PER_IMAGE: self._in_flight.tokens_per_job(),
            CACHE_BYTES: float(self._cache.num_bytes),
        }

    def report(self) -> Report:
        """Returns this replica's row in the dashboard's view of the cluster."""
        return encoder_report(
            self._name, self.record_autoscaling_stats(), self._run_metrics.last, cached=len(self._cache)
        )

    async def check_health(self) -> None:
        """Raises RuntimeError if the GPU failed, if the GPU thread, the batching task or a thread that serves
        embeddings died, or if no process can be started that decodes. Serve then replaces the replica.
        """
        if self._worker.fault is not None:
            raise RuntimeError(f"the GPU has failed: {self._worker.fault.value}")
        if not self._worker.is_alive:
            raise RuntimeError("the thread that owns the GPU has died")
        if self._has_batching_task and not await is_batching_task_alive(self._hand_off):
            raise RuntimeError("Serve's batching task has died")
        if not self._decoders.workers.can_start:
            raise RuntimeError("no process can be started that decodes files")
        if not self._server.is_alive:
            raise RuntimeError("the thread that serves embeddings to this host has died")
        self._server.store.expire_offers()
        if not self._tcp.is_alive or (self._remote is not None and not self._remote.is_alive):
            raise RuntimeError("the thread that serves embeddings to other hosts has died")

    async def encode(self, job: ImageJob) -> SharedEmbedding | ImageRefused:
        """Returns where language models find the image's embedding: from the cache, from an encoding in flight, or from
        a new one; ImageRefused if the image cannot be encoded.

        Raises:
            OtherIdentityError: the job's digest was made for an encoder with other weights or numerics.
            QueueFullError: the GPU queue is full, or the memory of unread embeddings.
            WorkerEndedError: the GPU thread ended, the GPU failed, or no decoder process can be started.
            DeviceMemoryError: the GPU has too little memory for this image.
        """
        image, store = await self._get_or_encode(job), self._server.store
        if isinstance(image, ImageRefused):
            return image
        remote = None if self._remote is None else self._remote.publish(image)
        if remote is None and not store.offer(image):
            raise QueueFullError("unread embeddings take all memory that embeddings may take")
        if store.offset_of(image) is not None:
            return image.to_shared(self._server.address, self._tcp.address, remote)
        self._counts.add(Counter.EMBEDDING_SHM_FALLBACKS)
        return image.to_shared(tcp=self._tcp.address)

    async def plan(self, job: ImageJob, file: Sequence[ObjectRef[bytes]]) -> PlannedVideo | ImageRefused:
        """Returns the header of the video, whose file `file` refers to, and its chunks. Raises as `encode`, but for a
        queue or a GPU."""
        self._check_identity(job)
        if self._videos is None or not isinstance(self._decoders, DecodePool):
            return ImageRefused("the model takes no videos here")
        try:
            plan = await self._decoders.plan_video(
                await file[0], job.sampling, self._videos, self._video_bounds, time.perf_counter()
            )
            if plan.num_tokens > self._max_tokens:
                raise VideoError(f"{plan.num_tokens} visual tokens, the limit is {self._max_tokens}")
            return PlannedVideo(plan.header(job.digest), plan.frames.indices, tuple(plan.chunks))
        except ImageError as error:
            self._counts.add(Counter.IMAGES_REFUSED, medium=job.modality)
            return ImageRefused(str(error))

    def _check_identity(self, job: ImageJob) -> None:
        if job.identity != self._worker.identity.fingerprint:
            raise OtherIdentityError("the encoder has other weights or numerics than the job's digest was made for")

    def _make_store(self, config: AppConfig) -> EmbeddingStore:
        return EmbeddingStore(
            config.encoder_replica.embedding_shm_bytes,
            offer_timeout_s=config.ingress.request_timeout_s,
            on_evicted=lambda number: self._counts.add(Counter.EMBEDDINGS_EVICTED_UNREAD, number),
        )

    def _make_server(self, store: EmbeddingStore) -> ShmServer:
        return ShmServer(store, on_direct_read=self._count_direct_read)

    def _make_tcp_server(self, store: EmbeddingStore, config: AppConfig) -> TcpServer:
        return TcpServer(
            store,
            get_secret(config.tcp, application_name()),
            config.tcp,
            on_direct_read=self._count_direct_read,
            on_tcp_error=lambda error: self._counts.add(Counter.TCP_ERRORS, reason=error.value),
        )

    def _allocate(self, store: EmbeddingStore, num_tokens: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Allocates shared memory for an embedding, evicting from the cache what takes some and has no reader; None if
        that cannot make room. Runs on the completion thread."""
        if HEADER_BYTES + num_tokens * width * dtype.itemsize > store.arena.num_bytes:
            return None

        def takes_room(image: EncodedImage) -> bool:
            return store.offset_of(image) is not None

        while (found := store.allocate(num_tokens, width, dtype)) is None and self._cache.evict_oldest(takes_room):
            pass
        return found

    def _count_direct_read(self, digest: str) -> None:
        """Counts a cache hit for an embedding that a language model reads without a call of `encode`, and marks it as
        recently used. Runs on the server's thread.
        """
        if self._cache.get(digest) is not None:
            self._counts.add(Counter.CACHE_HITS, tier="host")

    async def _get_or_encode(self, job: ImageJob) -> EncodedImage | ImageRefused:
        self._check_identity(job)
        cached = self._cache.get(job.digest) or self._find_in_shared_memory(job.digest)
        if cached is None:
            self._counts.add(Counter.CACHE_MISSES)
        else:
            self._counts.add(Counter.CACHE_HITS, tier="replica")
            record_span(Stage.CACHED, 0)
            return dataclasses.replace(
                cached, timings=dataclasses.replace(cached.timings, ready_at_s=time.time(), cached=True)
            )
        started, is_coalesced = time.perf_counter(), job.digest in self._single_flight
        try:
            encoded = await self._single_flight.run(job.digest, lambda: self._encode_counted(job))
            if is_coalesced:
                record_span(Stage.SHARED, time.perf_counter() - started)
            return encoded
        except ImageError as error:
            self._counts.add(Counter.IMAGES_REFUSED, medium=job.modality)
            return ImageRefused(str(error))

    def _find_in_shared_memory(self, digest: str) -> EncodedImage | None:
        """Returns an embedding that the cache evicted but shared memory still holds for a reader, and caches it."""
        image = self._server.store.find(digest)
        if image is not None:
            self._cache.put(digest, image, image.num_bytes)
        return image

    def _is_too_busy(self, session_id: str) -> bool:
        """Whether to refuse a call of `encode`. Runs on the replica's event loop."""
        call, speed = Call.from_session_id(session_id), self._worker.tokens_per_s
        if not call.refusable or call.key is None or call.key in self._cache or call.key in self._single_flight:
            return False
        return is_too_busy(call, self._in_flight, tokens_per_s=speed, now_s=time.perf_counter())

    async def _encode_counted(self, job: ImageJob) -> EncodedImage:
        started, speed = time.perf_counter(), self._worker.tokens_per_s
        place = virtual_arrival_s(started, tokens=job.num_tokens, tokens_before=job.tokens_before, tokens_per_s=speed)
        with self._in_flight.job(job.num_tokens, place):
            return await self._decode_and_encode(job, place, started)

    async def _decode_and_encode(self, job: ImageJob, place: float, started: float) -> EncodedImage:
        item, header = await self._prepare(job, place)
        preprocess_ms = (time.perf_counter() - started) * 1e3
        encoded: Encoded = await (await self._hand_off((item, place)))
        self._counts.add(Counter.IMAGES_ENCODED, medium=job.modality)
        self._times.observe(Histogram.PREPROCESS_SECONDS, preprocess_ms / 1e3)
        self._times.observe(Histogram.ENCODER_QUEUE_SECONDS, encoded.queue_ms / 1e3)
        self._times.observe(Histogram.ENCODE_SECONDS, encoded.encode_ms / 1e3)
        timings = EncodeTimings(
            *(preprocess_ms, encoded.queue_ms, encoded.encode_ms, time.time()),
            cached=False,
            replica=self._name,
            ran=encoded.ran,
            frames=None if job.chunk is None else job.chunk.part.frame_range,
        )
        record_encode_spans(timings, job.num_tokens)
        image = dataclasses.replace(EncodedImage.pack(encoded.tokens, job.digest, timings), header=header)
        self._server.store.publish(image)
        self._cache.put(job.digest, image, image.num_bytes)
        return image

    async def _prepare(self, job: ImageJob, place: float) -> tuple[Item, ItemHeader | ChunkHeader | None]:
        """Returns the encoder's input, and its header if the ingress cannot compute it. Raises ImageError."""
        if not isinstance(self._decoders, PreparePool):
            if (chunk := job.chunk) is not None:
                pixels = await self._decoders.decode_chunk(chunk, self._video_bounds, place)
                return pixels, ChunkHeader(job.digest, job.num_tokens)
            return await self._decoders.decode(job.data, job.bounds, job.size, place), None
        prepared = await self._decoders.prepare(ItemFile(job.data, job.modality, job.sampling), job.digest, place)
        if prepared.num_tokens > self._max_tokens:  # the ingress has estimated them
            raise ImageError(f"{prepared.num_tokens} visual tokens, the limit is {self._max_tokens}")
        return prepared, prepared.header

    @serve.batch(
        max_batch_size=HAND_OFF_IMAGES, batch_wait_timeout_s=HAND_OFF_WAIT_S, max_concurrent_batches=HAND_OFF_CALLS
    )
    async def _hand_off(self, images: list[tuple[Item, float]]) -> list[asyncio.Future[Encoded]]:
        """Queues the images, each with its place in the queue, and returns a future for each without waiting.

        Serve would form small batches while the GPU is busy; instead, the worker's queue fills and is packed as a whole
        when the GPU is free. An error is set on its image's future: raising here would fail every image of the call.
        """
        self._has_batching_task = True
        futures: list[asyncio.Future[Encoded]] = []
        for item, place in images:
            try:
                futures.append(asyncio.wrap_future(self._worker.submit(item, place)))
            except (QueueFullError, WorkerEndedError) as error:
                if isinstance(error, QueueFullError):
                    self._counts.add(Counter.ENCODER_REJECTIONS)
                failed_future: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
                failed_future.set_exception(error.with_traceback(None))  # which would keep all images of the call
                futures.append(failed_future)
        return futures

    def __del__(self) -> None:
        for name in ("_server", "_tcp", "_remote"):
            if (server := getattr(self, name, None)) is not None:
                server.close()
        if hasattr(self, "_decoders"):
            self._decoders.workers.stop()
        if hasattr(self, "_worker"):
            self._worker.stop()
