"""The encoder replica: cache, single flight, decoding, and the hand-off to the thread that owns the GPU.

It must not compute: `gpu_worker.py` owns the encoder, `decode.py` the pixels. It must not know of HTTP or vLLM.
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
from deployments.affinity import HELD, published
from deployments.checkpoint import local_model
from deployments.decode import DecodePool
from deployments.embedding_shelf import EmbeddingShelf
from deployments.fair_line import place_of
from deployments.gpu_jobs import Encoded, WorkerEvents
from deployments.gpu_worker import GpuWorker
from deployments.lending import Lender
from deployments.log_buffers import log_buffers_kept
from deployments.metrics import Count, Counts, Distribution, Distributions, Level, RunMetrics, Tier, gauge
from deployments.nixl_memory import NixlMemory
from deployments.pace import WorkUnderWay
from deployments.packets import host_name
from deployments.remote_lending import RemoteLending, TrialAnswer
from deployments.replica_errors import IdentityChangedError, QueueFullError, WorkerEndedError
from deployments.replica_report import Report, encoder_report, replica_name
from deployments.scaling_policy import (
    ARRIVING_TOKENS_PER_S,
    BACKLOG_TOKENS,
    CACHE_BYTES,
    GIVEN_TOKENS,
    TOKENS_PER_IMAGE,
    TOKENS_PER_S,
)
from deployments.single_flight import SingleFlight
from deployments.tracing import Stage, stage
from deployments.wire import EncodedImage, EncodeTimings, ImageJob, ImageRefused, SharedEmbedding
from encoder.cache import EmbeddingCache
from encoder.decoded import Decoded
from encoder.encoder import Encoder
from encoder.hub import resolve_checkpoint
from encoder.identity import EncoderIdentity
from encoder.image_size import ImageError
from encoder.lanes import pin_shared
from encoder.preprocess import Pixels

logger = logging.getLogger("ray.serve")

HAND_OFF_IMAGES = 32
HAND_OFF_CALLS = 16  # times the images no more than the replica takes at once, or Serve warns
HAND_OFF_WAIT_S = 0.001


async def batching_task_alive(batched: object) -> bool:
    """Whether the task behind a `@serve.batch` method runs; Serve tells only through a private attribute."""
    return bool(await batched._is_batching_task_alive())  # type: ignore[attr-defined]


def warm_encoder(path: Path, config: EncoderConfig) -> Encoder:
    """An encoder that has run once, so that the first image does not wait for kernels to load."""
    encoder = Encoder.from_checkpoint(path, config, progress=True)
    encoder.warm_up()
    return encoder


def _trace(timings: EncodeTimings, num_tokens: int) -> None:
    """The stages that led to an embedding, one after the other until it was ready."""
    ended_s = timings.ready_at_s
    for which, ms in (
        (Stage.ENCODE, timings.encode_ms),
        (Stage.ENCODE_QUEUE, timings.queue_ms),
        (Stage.DECODE_IMAGE, timings.preprocess_ms),
    ):
        stage(which, ms / 1e3, ended_s=ended_s, attributes={"vitray.visual_tokens": num_tokens})
        ended_s -= ms / 1e3


class EncoderReplica:
    """Encodes images, one GPU a replica. Serve calls `encode` once for every image of every request."""

    @log_buffers_kept()  # an attention kernel may come with vLLM
    def __init__(self, config: AppConfig) -> None:
        path: Path = resolve_checkpoint(local_model(config.model))
        limits = config.encoder_replica
        self._counts = Counts()
        self._cache: EmbeddingCache[EncodedImage] = EmbeddingCache(limits.cache_bytes)
        shares = config.transfer != "object_store"
        shelf = EmbeddingShelf(limits.shared_embedding_bytes) if shares else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lender = None if shelf is None else Lender(shelf, unasked=self._read_unasked)
        self._always_remote = config.transfer == "nixl"
        self._remote = RemoteLending(shelf, NixlMemory, at_once=self._always_remote) if shelf is not None else None
        self._host = host_name()
        self._times = Distributions()
        self._runs = RunMetrics(self._counts)
        self._worker = GpuWorker(
            lambda: warm_encoder(path, config.encoder),
            max_queued_tokens=limits.max_queued_tokens,
            room=None if shelf is None else partial(self._room, shelf),
            events=WorkerEvents(
                queued_tokens=gauge(Level.QUEUED_TOKENS),
                retried=lambda batches: self._counts.add(Count.BATCHES_RETRIED, batches),
                ran=self._runs,
                sick=lambda fault: self._counts.add(Count.DEVICES_SICK, reason=fault.value),
            ),
        )
        self._decoders = DecodePool(
            self._worker.identity.rules,
            workers=limits.decode_workers,
            max_pixels=config.ingress.max_image_pixels,
            timeout_s=limits.decode_timeout_s,
            shared_bytes=limits.shared_pixel_bytes,
            resize=not self._worker.resizes,
            piped=lambda: self._counts.add(Count.PIXELS_PIPED),
            memory_bytes=limits.decode_memory_bytes,
        )
        if self._worker.resizes:
            for arena in (self._decoders.arena, *([] if self._lender is None else [self._lender.shelf.arena])):
                try:
                    pin_shared(arena.address, arena.num_bytes)
                except RuntimeError as error:  # the staging copies through pinned memory of its own then
                    logger.warning("images or embeddings take one more copy on the host: %s", error)
        self._flights: SingleFlight[EncodedImage] = SingleFlight()
        self._work = WorkUnderWay()
        self._name = replica_name()
        self._handed_off = False  # Serve makes its batching task with the first call

    def identity(self) -> EncoderIdentity:
        """What the ingress needs for digests and for counting an image's cost."""
        return self._worker.identity

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve takes to its autoscaling policy, every few seconds (`deployments/scaling.py`)."""
        return {
            BACKLOG_TOKENS: float(self._work.tokens),
            ARRIVING_TOKENS_PER_S: self._work.arriving_per_s(),
            GIVEN_TOKENS: float(self._work.given),
            TOKENS_PER_S: self._worker.tokens_per_s,
            TOKENS_PER_IMAGE: self._work.tokens_per_job(),
            CACHE_BYTES: float(self._cache.counts.num_bytes),
        }

    def report(self) -> Report:
        """What the page's view of the cluster shows of this replica."""
        return encoder_report(self._name, self.record_autoscaling_stats(), self._runs.told, cached=len(self._cache))

    def record_routing_stats(self) -> dict[str, bytes]:
        """What Serve takes to those who choose among replicas, every few seconds (`deployments/affinity_router.py`)."""
        return {HELD: published(self._cache.keys())}

    async def check_health(self) -> None:
        """Raises where this replica can encode no more; Serve then replaces it.

        The thread that owns the GPU or the batching task has died, or the GPU has failed.
        """
        if self._worker.fault is not None:
            raise RuntimeError(f"the device has failed: {self._worker.fault.value}")
        if not self._worker.alive:
            raise RuntimeError("the thread that owns the GPU has died")
        if self._handed_off and not await batching_task_alive(self._hand_off):
            raise RuntimeError("Serve's batching task has died")
        if self._lender is not None:
            self._lender.shelf.prune()

    async def encode(self, job: ImageJob) -> EncodedImage | SharedEmbedding | ImageRefused:
        """The image's embedding, from the cache, from an encoding that is under way, or made now."""
        self._loop = asyncio.get_running_loop()
        image = await self._encoded(job)
        if self._lender is None or self._remote is None or isinstance(image, ImageRefused):
            return image
        if job.read_on == (self._host,) and not self._always_remote:
            if self._lender.shelf.offer(image):
                return image.lent_by(self._lender.address)
        elif not job.pulled:
            return image
        elif (lent := await self._remote.lent(image)) is not None:
            return lent
        self._counts.add(Count.EMBEDDINGS_UNSHARED)
        return image

    async def transfer_trial(self, lent: bool | None) -> TrialAnswer:
        """For language models that try how embeddings come to them (`deployments/remote_trial.py`)."""
        if self._remote is None:
            return TrialAnswer(self._host, why_not="transfer is object_store")
        return await self._remote.trial(self._host, lent)

    def _room(self, shelf: EmbeddingShelf, num_tokens: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Shared memory for an embedding that is awaited, which goes before what is cached; on the GPU's thread."""
        while (found := shelf.room(num_tokens, width, dtype)) is None and self._cache.drop_oldest():
            pass
        return found

    def _read_unasked(self, digest: str) -> None:
        """On the lender's thread: what a language model was told to be here is used, as if it had been asked for."""

        def used() -> None:
            if self._cache.get(digest) is not None:
                self._counts.add(Count.CACHE_HITS, tier=Tier.HOST)

        if self._loop is not None:  # nothing is here to be read before the first call
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the replica with it
                self._loop.call_soon_threadsafe(used)

    async def _encoded(self, job: ImageJob) -> EncodedImage | ImageRefused:
        if job.identity != self._worker.identity.fingerprint:
            raise IdentityChangedError("the encoder has other weights or numerics than the job's digest was made for")
        cached = self._cache.get(job.digest)
        if cached is None:
            self._counts.add(Count.CACHE_MISSES)
        else:
            self._counts.add(Count.CACHE_HITS, tier=Tier.REPLICA)
            stage(Stage.CACHED, 0)
            return dataclasses.replace(
                cached, timings=dataclasses.replace(cached.timings, ready_at_s=time.time(), cached=True)
            )
        asked, joins = time.perf_counter(), job.digest in self._flights
        try:
            encoded = await self._flights.run(job.digest, lambda: self._encode_now(job))
            if joins:
                stage(Stage.SHARED, time.perf_counter() - asked)
            return encoded
        except ImageError as error:
            self._counts.add(Count.IMAGES_REFUSED)
            return ImageRefused(str(error))

    async def _encode_now(self, job: ImageJob) -> EncodedImage:
        with self._work.job(job.num_tokens):
            return await self._decode_and_encode(job)

    async def _decode_and_encode(self, job: ImageJob) -> EncodedImage:
        started = time.perf_counter()
        place = place_of(
            started,
            tokens=job.num_tokens,
            tokens_before=job.tokens_before,
            tokens_per_s=self._worker.tokens_per_s,
        )
        pixels = await self._decoders.pixels(job.data, job.bounds, job.size, place)
        preprocess_ms = (time.perf_counter() - started) * 1e3
        encoded: Encoded = await (await self._hand_off((pixels, place)))
        self._counts.add(Count.IMAGES_ENCODED)
        self._times.add(Distribution.PREPROCESS_MS, preprocess_ms)
        self._times.add(Distribution.QUEUE_MS, encoded.queue_ms)
        self._times.add(Distribution.ENCODE_MS, encoded.encode_ms)
        timings = EncodeTimings(
            *(preprocess_ms, encoded.queue_ms, encoded.encode_ms, time.time()),
            cached=False,
            replica=self._name,
            ran=encoded.ran,
        )
        _trace(timings, job.num_tokens)
        image = EncodedImage.pack(encoded.tokens, pixels.grid_thw, job.digest, timings)
        self._cache.put(job.digest, image, image.num_bytes)
        return image

    @serve.batch(
        max_batch_size=HAND_OFF_IMAGES, batch_wait_timeout_s=HAND_OFF_WAIT_S, max_concurrent_batches=HAND_OFF_CALLS
    )
    async def _hand_off(self, images: list[tuple[Pixels | Decoded, float]]) -> list[asyncio.Future[Encoded]]:
        """Queues the images, each with its place in line, and returns at once with a future for each.

        While the GPU is busy Serve would close small batches; the queue behind this fills instead, and is packed whole
        when the GPU is free. An error is put into its own future: raising here would fail every image of the call.
        """
        self._handed_off = True
        futures: list[asyncio.Future[Encoded]] = []
        for pixels, place in images:
            try:
                futures.append(asyncio.wrap_future(self._worker.submit(pixels, place)))
            except (QueueFullError, WorkerEndedError) as error:
                if isinstance(error, QueueFullError):
                    self._counts.add(Count.QUEUE_FULL)
                refused: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
                refused.set_exception(error)
                futures.append(refused)
        return futures

    def __del__(self) -> None:
        lender = getattr(self, "_lender", None)
        if lender is not None:
            lender.close()
        remote = getattr(self, "_remote", None)
        if remote is not None:
            remote.close()
        if hasattr(self, "_decoders"):
            self._decoders.stop()
        if hasattr(self, "_worker"):
            self._worker.stop()
