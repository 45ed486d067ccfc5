"""The vision tower beside a language model, for images while no encoder is there: loaded for the first, then kept.

It computes as encoder replicas do (the same settings, the same preprocessing, the same digests), without graphs and one
image at a time, so that answers under way go on. On a GPU it takes no more than what vLLM leaves. It must not know of
HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from configs.schema import MIB, AppConfig
from deployments import vllm_compat
from deployments.admission import Shed
from deployments.checkpoint import local_model
from deployments.decode import DecodePool
from deployments.encoder import warm_encoder
from deployments.errors import ApiError
from deployments.gpu_worker import GpuWorker
from deployments.log_buffers import log_buffers_kept
from deployments.metrics import Count, Counts, Tier
from deployments.replica_errors import DeviceMemoryError, IdentityChangedError, WorkerEndedError
from deployments.replica_report import replica_name
from deployments.wire import EncodedImage, EncodeTimings, ImageJob, ImageRefused
from encoder.cache import EmbeddingCache
from encoder.hub import resolve_checkpoint
from encoder.identity import EncoderIdentity
from encoder.image_size import ImageError

logger = logging.getLogger("ray.serve")

MAX_CACHE_BYTES = 256 * MIB
"""Of embeddings that are kept: turns of a conversation bring their images again."""
LOAD_AGAIN_S = 30.0
"""After the tower could not be loaded."""

LocalEncoding = Coroutine[Any, Any, EncodedImage | ImageRefused]


@dataclasses.dataclass(frozen=True)
class Tower:
    """What encodes: the thread that owns the encoder, and the process that decodes for it."""

    worker: GpuWorker
    decoders: DecodePool

    def stop(self) -> None:
        self.decoders.stop()
        self.worker.stop()


def load_tower(config: AppConfig) -> Tower:
    """On the device of this process. Blocks for as long as an encoder takes to start without capturing graphs."""
    path = resolve_checkpoint(local_model(config.model))
    # What encoders have learnt from their traffic is not this one's to write.
    settings = dataclasses.replace(config.encoder, cudagraph_mm_encoder=False, warm_grids=(), state_folder=None)
    limits = config.encoder_replica
    if torch.cuda.is_available():
        # What the engine has set aside and not taken yet must be there when it wants it, or it dies.
        torch.cuda.set_per_process_memory_fraction(vllm_compat.memory_share_left(config.llm.engine_args))
    started, before = time.perf_counter(), _memory_bytes()
    with log_buffers_kept():  # an attention kernel may come with vLLM
        worker = GpuWorker(lambda: warm_encoder(path, settings), max_queued_tokens=limits.max_queued_tokens)
    decoders = DecodePool(
        worker.identity.rules,
        workers=1,
        max_pixels=config.ingress.max_image_pixels,
        timeout_s=limits.decode_timeout_s,
        shared_bytes=limits.shared_pixel_bytes,
        resize=not worker.resizes,
        memory_bytes=limits.decode_memory_bytes,
    )
    logger.warning(
        "no encoder is there: the vision tower was loaded beside the language model in %.1f s, and takes %d MiB of the "
        "%s memory",
        time.perf_counter() - started,
        (_memory_bytes() - before) // MIB,
        "GPU's" if worker.resizes else "host's",
    )
    return Tower(worker, decoders)


def _memory_bytes() -> int:
    """What this process holds, of the GPU where it has one."""
    if torch.cuda.is_available():
        return int(torch.cuda.memory_reserved())
    return int(psutil.Process().memory_info().rss)


class LocalEncoder:
    """One for each language model replica, used on its event loop. It takes nothing until it is asked."""

    def __init__(self, config: AppConfig, counts: Counts, load: Callable[[AppConfig], Tower] = load_tower) -> None:
        """`load` is called on a thread."""
        self._config = config
        self._counts = counts
        self._load = load
        self._tower: asyncio.Task[Tower] | None = None
        self._load_at = float("-inf")
        """When it may be loaded, by `time.monotonic`."""
        self._turn = asyncio.Lock()
        self._images = self._tokens = 0  # that wait or are being encoded
        self._cache: EmbeddingCache[EncodedImage] = EmbeddingCache(
            min(config.encoder_replica.cache_bytes, MAX_CACHE_BYTES)
        )

    async def identity(self) -> EncoderIdentity | None:
        """What digests of its embeddings are made with; None where the tower cannot be had now."""
        try:
            return (await self._loaded()).worker.identity
        except ApiError:
            return None

    @contextmanager
    def encodings(self, jobs: Sequence[ImageJob]) -> Iterator[list[LocalEncoding]]:
        """One for each job, to be awaited within.

        Raises:
            ApiError: 503 where too many images wait, and, when awaited, where the tower cannot be had. When awaited
                IdentityChangedError too, for a job whose digest was made for another encoder.
        """
        limit = self._config.llm.fallback_max_images
        if self._images and self._images + len(jobs) > limit:
            self._counts.add(Count.SHED_REQUESTS, reason=Shed.REPLICA_QUEUE.value)
            waiting = (
                f"{self._images} images wait for the language model to encode them, the limit is {limit}; try again"
            )
            raise self._busy(waiting)
        tokens = sum(job.num_tokens for job in jobs)
        self._images += len(jobs)
        self._tokens += tokens
        encodings = [self._in_turn(job) for job in jobs]
        try:
            yield encodings
        finally:
            self._images -= len(jobs)
            self._tokens -= tokens
            for encoding in encodings:
                encoding.close()  # of those that nobody came to await

    def stop(self) -> None:
        """Ends its thread and its process."""
        if (tower := self._there()) is not None:
            tower.stop()
        self._tower = None

    def _there(self) -> Tower | None:
        """None before it is loaded, and where that has failed."""
        task = self._tower
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def _in_turn(self, job: ImageJob) -> EncodedImage | ImageRefused:
        async with self._turn:
            tower = await self._loaded()
            if job.identity != tower.worker.identity.fingerprint:
                raise IdentityChangedError("the tower here computes otherwise than what the job's digest was made for")
            if (cached := self._cache.get(job.digest)) is not None:
                self._counts.add(Count.CACHE_HITS, tier=Tier.REPLICA)
                timings = dataclasses.replace(cached.timings, ready_at_s=time.time(), cached=True)
                return dataclasses.replace(cached, timings=timings)
            self._counts.add(Count.CACHE_MISSES)
            try:
                return await self._encode(job, tower)
            except ImageError as error:
                self._counts.add(Count.IMAGES_REFUSED)
                return ImageRefused(str(error))
            except DeviceMemoryError as error:
                raise self._busy("the language model had no memory left to encode this; try again") from error
            except WorkerEndedError as error:
                self.stop()
                self._load_at = time.monotonic() + LOAD_AGAIN_S
                logger.exception("the vision tower beside the language model has failed")
                raise self._not_up() from error

    async def _encode(self, job: ImageJob, tower: Tower) -> EncodedImage:
        started = time.perf_counter()
        pixels = await tower.decoders.pixels(job.data, job.bounds, job.size)
        preprocess_ms = (time.perf_counter() - started) * 1e3
        encoded = await asyncio.wrap_future(tower.worker.submit(pixels))
        self._counts.add(Count.IMAGES_ENCODED_LOCALLY)
        timings = EncodeTimings(
            *(preprocess_ms, encoded.queue_ms, encoded.encode_ms, time.time()),
            cached=False,
            replica=replica_name(),
            ran=encoded.ran,
            local=True,
        )
        image = EncodedImage.pack(encoded.tokens, pixels.grid_thw, job.digest, timings)
        self._cache.put(job.digest, image, image.num_bytes)
        return image

    async def _loaded(self) -> Tower:
        if self._tower is None:
            if time.monotonic() < self._load_at:
                raise self._not_up()
            self._tower = asyncio.create_task(asyncio.to_thread(self._load, self._config))
        tower = self._tower
        try:
            return await asyncio.shield(tower)  # who leaves does not stop what others will want
        except Exception as error:
            if self._tower is tower:
                self._tower = None
                self._load_at = time.monotonic() + LOAD_AGAIN_S
                logger.exception("the vision tower cannot be loaded beside the language model")
            raise self._not_up() from error

    def _busy(self, told: str) -> ApiError:
        return ApiError(503, told, code="overloaded", retry_after_s=self._retry_after_s())

    def _not_up(self) -> ApiError:
        retry = max(self._config.ingress.retry_after_s, math.ceil(self._load_at - time.monotonic()))
        return ApiError(
            503,
            "no encoder is up, and the language model cannot encode by itself; try again",
            code="unavailable",
            retry_after_s=retry,
        )

    def _retry_after_s(self) -> int:
        """When what waits is done, at the speed measured so far, within the operator's bounds."""
        limits = self._config.ingress
        tower = self._there()
        speed = 0.0 if tower is None else tower.worker.tokens_per_s
        wait_s = math.ceil(self._tokens / speed) if speed > 0 else 0
        return min(max(limits.retry_after_s, wait_s), limits.max_retry_after_s)
