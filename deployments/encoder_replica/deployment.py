"""Serve deployment of the encoder: embedding cache, request coalescing, decoding, and the hand-off to the GPU thread.

`gpu/worker.py` owns the encoder, `decode/pool.py` the pixels.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from functools import partial
from pathlib import Path

import torch
from ray import serve
from torch import Tensor

from configs.encoder_config import EncoderConfig
from configs.schema import AppConfig
from deployments.common.fair_queue import virtual_arrival_s
from deployments.common.messages import EncodedImage, EncodeTimings, ImageJob, ImageRefused, SharedEmbedding
from deployments.common.model_path import local_model
from deployments.common.ray_private import is_batching_task_alive
from deployments.common.replica_errors import OtherIdentityError, QueueFullError, WorkerEndedError
from deployments.common.replica_status import Report, encoder_report, replica_name
from deployments.common.throughput import InFlightTokens
from deployments.encoder_replica.decode.pool import DecodePool
from deployments.encoder_replica.embedding_cache import EmbeddingCache
from deployments.encoder_replica.gpu.jobs import Encoded, WorkerEvents
from deployments.encoder_replica.gpu.worker import GpuWorker
from deployments.encoder_replica.single_flight import SingleFlight
from deployments.routing.affinity import PUBLISHED_DIGESTS, concatenate_prefixes
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
    Gauge,
    Histogram,
    Histograms,
    RunMetrics,
    Tier,
    gauge_setter,
)
from deployments.telemetry.tracing import Stage, record_span
from deployments.transfer.rdma import NixlMemory
from deployments.transfer.remote_sender import RemoteSender
from deployments.transfer.same_host import ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.unix_socket import ListenerError, host_id
from encoder.checkpoint.files import resolve_checkpoint
from encoder.encoder import Encoder
from encoder.images.decoded import Decoded
from encoder.images.size import ImageError
from encoder.pixels.preprocess import Pixels
from encoder.staging.streams import pin_shared

logger = logging.getLogger("ray.serve")

HAND_OFF_IMAGES = 32
HAND_OFF_CALLS = 16  # Serve warns if HAND_OFF_CALLS * HAND_OFF_IMAGES exceeds the replica's max_ongoing_requests
HAND_OFF_WAIT_S = 0.001


def warm_encoder(path: Path, config: EncoderConfig) -> Encoder:
    """Loads an encoder and runs it once, so that the first image does not wait for kernels to load."""
    encoder = Encoder.from_checkpoint(path, config, progress=True)
    encoder.warm_up()
    return encoder


def _record_spans(timings: EncodeTimings, num_tokens: int) -> None:
    """Records a span for each stage of an encoding, back to back, ending when the embedding was ready."""
    ended_s = timings.ready_at_s
    for stage, ms in (
        (Stage.ENCODE, timings.encode_ms),
        (Stage.ENCODE_QUEUE, timings.queue_ms),
        (Stage.DECODE_IMAGE, timings.preprocess_ms),
    ):
        record_span(stage, ms / 1e3, ended_s=ended_s, attributes={"vitray.visual_tokens": num_tokens})
        ended_s -= ms / 1e3


class EncoderReplica:
    """Encodes images on one GPU. Serve calls `encode` once for every image of every request."""

    @preserve_log_buffers()  # loading an attention kernel may import vLLM
    def __init__(self, config: AppConfig) -> None:
        path: Path = resolve_checkpoint(local_model(config.model))
        limits = config.encoder_replica
        self._counts = Counters()
        self._cache: EmbeddingCache[EncodedImage] = EmbeddingCache(limits.cache_bytes)
        uses_shared_memory = config.transfer != "object_store"
        store = self._make_store(config) if uses_shared_memory else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server = None if store is None else self._make_server(store)
        self._remote = None
        if store is not None and config.transfer == "nixl":
            self._remote = RemoteSender(store, NixlMemory(), on_error=self._count_listener_error)
        self._host = host_id()
        self._times = Histograms()
        self._run_metrics = RunMetrics(self._counts)
        self._worker = GpuWorker(
            lambda: warm_encoder(path, config.encoder),
            max_queued_tokens=limits.max_queued_tokens,
            allocate=None if store is None else partial(self._allocate, store),
            events=WorkerEvents(
                on_queued_tokens=gauge_setter(Gauge.ENCODER_QUEUED_TOKENS),
                on_retry=lambda batches: self._counts.add(Counter.BATCHES_RETRIED, batches),
                on_run=self._run_metrics,
                on_gpu_failure=lambda fault: self._counts.add(Counter.GPU_FAILURES, reason=fault.value),
            ),
        )
        self._decoders = DecodePool(
            self._worker.identity.rules,
            workers=limits.decode_workers,
            max_pixels=config.ingress.max_image_pixels,
            timeout_s=limits.decode_timeout_s,
            shm_bytes=limits.pixel_shm_bytes,
            resize=not self._worker.resizes_on_device,
            on_piped=lambda: self._counts.add(Counter.PIXEL_SHM_FALLBACKS),
            memory_bytes=limits.decode_memory_bytes,
        )
        if self._worker.resizes_on_device:
            for arena in (self._decoders.arena, *([] if self._server is None else [self._server.store.arena])):
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

    async def record_replica_metadata(self) -> dict[str, str]:
        """Returns the identity, which Serve sends to routers and ingresses once. Waits for its turn in a rollout."""
        await wait_for_rollout_turn(self._worker.identity.tower)
        return encoder_metadata(self._worker.identity)

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

    def record_routing_stats(self) -> dict[str, bytes]:
        """Returns prefixes of the cached digests, which Serve sends to the routers every few seconds."""
        return {PUBLISHED_DIGESTS: concatenate_prefixes(self._cache.keys())}

    async def check_health(self) -> None:
        """Raises RuntimeError if the GPU failed, or if the GPU thread, the batching task or a thread that serves
        embeddings died. Serve then replaces the replica.
        """
        if self._worker.fault is not None:
            raise RuntimeError(f"the GPU has failed: {self._worker.fault.value}")
        if not self._worker.is_alive:
            raise RuntimeError("the thread that owns the GPU has died")
        if self._has_batching_task and not await is_batching_task_alive(self._hand_off):
            raise RuntimeError("Serve's batching task has died")
        if self._server is not None:
            if not self._server.is_alive:
                raise RuntimeError("the thread that serves embeddings to this host has died")
            self._server.store.expire_offers()
        if self._remote is not None and not self._remote.is_alive:
            raise RuntimeError("the thread that serves embeddings to other hosts has died")

    async def encode(self, job: ImageJob) -> EncodedImage | SharedEmbedding | ImageRefused:
        """Returns the image's embedding from the cache, from an encoding in flight, or from a new one.

        Returns a SharedEmbedding if the language models can read it from this replica's memory, and ImageRefused if
        the image cannot be encoded.

        Raises:
            OtherIdentityError: the job's digest was made for an encoder with other weights or numerics.
            QueueFullError: the GPU queue is full.
            WorkerEndedError: the GPU thread ended, the GPU failed, or no decoder process can be started.
            DeviceMemoryError: the GPU has too little memory for this image.
        """
        self._loop = asyncio.get_running_loop()
        image = await self._get_or_encode(job)
        if self._server is None or isinstance(image, ImageRefused):
            return image
        if self._remote is not None:
            if not job.remote_read:
                return image
            if (published := self._remote.publish(image)) is not None:
                return published
        elif job.reader_hosts != (self._host,):
            return image
        elif self._server.store.offer(image):
            return image.to_shared(self._server.address)
        self._counts.add(Counter.EMBEDDING_SHM_FALLBACKS)
        return image

    def _make_store(self, config: AppConfig) -> EmbeddingStore:
        return EmbeddingStore(
            config.encoder_replica.embedding_shm_bytes,
            offer_timeout_s=config.ingress.request_timeout_s,
            on_evicted=lambda number: self._counts.add(Counter.EMBEDDINGS_EVICTED_UNREAD, number),
        )

    def _make_server(self, store: EmbeddingStore) -> ShmServer:
        return ShmServer(store, on_direct_read=self._count_direct_read, on_error=self._count_listener_error)

    def _count_listener_error(self, failed: ListenerError) -> None:
        self._counts.add(Counter.LISTENER_ERRORS, operation=failed.value)

    def _allocate(self, store: EmbeddingStore, num_tokens: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Allocates shared memory for an embedding, evicting cached ones if needed. Runs on the completion thread."""
        while (found := store.allocate(num_tokens, width, dtype)) is None and self._cache.evict_oldest():
            pass
        return found

    def _count_direct_read(self, digest: str) -> None:
        """Counts a cache hit for an embedding that a language model reads without a call of `encode`, and marks it as
        recently used. Runs on the server's thread.
        """

        def count_hit() -> None:
            if self._cache.get(digest) is not None:
                self._counts.add(Counter.CACHE_HITS, tier=Tier.HOST.value)

        if self._loop is not None:  # no embedding can be read before the first call
            with contextlib.suppress(RuntimeError):  # the event loop is closed: the replica is shutting down
                self._loop.call_soon_threadsafe(count_hit)

    async def _get_or_encode(self, job: ImageJob) -> EncodedImage | ImageRefused:
        if job.identity != self._worker.identity.fingerprint:
            raise OtherIdentityError("the encoder has other weights or numerics than the job's digest was made for")
        cached = self._cache.get(job.digest) or self._find_in_shared_memory(job.digest)
        if cached is None:
            self._counts.add(Counter.CACHE_MISSES)
        else:
            self._counts.add(Counter.CACHE_HITS, tier=Tier.REPLICA.value)
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
            self._counts.add(Counter.IMAGES_REFUSED)
            return ImageRefused(str(error))

    def _find_in_shared_memory(self, digest: str) -> EncodedImage | None:
        """Returns an embedding that the cache evicted but shared memory still holds for a reader, and caches it."""
        image = None if self._server is None else self._server.store.find(digest)
        if image is not None:
            self._cache.put(digest, image, image.num_bytes)
        return image

    async def _encode_counted(self, job: ImageJob) -> EncodedImage:
        with self._in_flight.job(job.num_tokens):
            return await self._decode_and_encode(job)

    async def _decode_and_encode(self, job: ImageJob) -> EncodedImage:
        started = time.perf_counter()
        place = virtual_arrival_s(
            started,
            tokens=job.num_tokens,
            tokens_before=job.tokens_before,
            tokens_per_s=self._worker.tokens_per_s,
        )
        pixels = await self._decoders.decode(job.data, job.bounds, job.size, place)
        preprocess_ms = (time.perf_counter() - started) * 1e3
        encoded: Encoded = await (await self._hand_off((pixels, place)))
        self._counts.add(Counter.IMAGES_ENCODED)
        self._times.observe(Histogram.PREPROCESS_SECONDS, preprocess_ms / 1e3)
        self._times.observe(Histogram.ENCODER_QUEUE_SECONDS, encoded.queue_ms / 1e3)
        self._times.observe(Histogram.ENCODE_SECONDS, encoded.encode_ms / 1e3)
        timings = EncodeTimings(
            *(preprocess_ms, encoded.queue_ms, encoded.encode_ms, time.time()),
            cached=False,
            replica=self._name,
            ran=encoded.ran,
        )
        _record_spans(timings, job.num_tokens)
        image = EncodedImage.pack(encoded.tokens, job.digest, timings)
        if self._server is not None:
            self._server.store.publish(image)
        self._cache.put(job.digest, image, image.num_bytes)
        return image

    @serve.batch(
        max_batch_size=HAND_OFF_IMAGES, batch_wait_timeout_s=HAND_OFF_WAIT_S, max_concurrent_batches=HAND_OFF_CALLS
    )
    async def _hand_off(self, images: list[tuple[Pixels | Decoded, float]]) -> list[asyncio.Future[Encoded]]:
        """Queues the images, each with its place in the queue, and returns a future for each without waiting.

        Serve would form small batches while the GPU is busy; instead, the worker's queue fills and is packed as a whole
        when the GPU is free. An error is set on its image's future: raising here would fail every image of the call.
        """
        self._has_batching_task = True
        futures: list[asyncio.Future[Encoded]] = []
        for pixels, place in images:
            try:
                futures.append(asyncio.wrap_future(self._worker.submit(pixels, place)))
            except (QueueFullError, WorkerEndedError) as error:
                if isinstance(error, QueueFullError):
                    self._counts.add(Counter.ENCODER_REJECTIONS)
                failed_future: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
                failed_future.set_exception(error)
                futures.append(failed_future)
        return futures

    def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            server.close()
        remote = getattr(self, "_remote", None)
        if remote is not None:
            remote.close()
        if hasattr(self, "_decoders"):
            self._decoders.stop()
        if hasattr(self, "_worker"):
            self._worker.stop()
