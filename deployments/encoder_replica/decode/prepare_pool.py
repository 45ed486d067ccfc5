"""vLLM's processor in worker processes: it decodes files and prepares the inputs of vLLM's towers, and their headers.

The bounds on time and memory, and the fair queue, are those of `pool.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from pydantic import JsonValue

from configs.schema import AppConfig, AudioConfig, VideoConfig
from deployments.common.messages import MODEL_SAMPLING, VideoSampling
from deployments.common.model_path import generic_engine_args
from deployments.encoder_replica.decode.pool import Workers, ignore
from deployments.encoder_replica.decode.worker_process import Decoder, Receive, answer_tasks
from deployments.vllm.preparer import (
    Preparer,
    VllmInputs,
    count_audio_tokens,
    count_tokens,
    count_video_tokens,
    sample,
)
from encoder.images.size import ImageError
from encoder.item_header import MAX_HEADER_BYTES

logger = logging.getLogger("ray.serve")

START_TIMEOUT_S = 600.0
"""Timeout for a process to import vLLM and load its processor."""
NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class ItemFile:
    """One file to prepare."""

    data: bytes
    modality: str = "image"
    sampling: VideoSampling = MODEL_SAMPLING


def serve_items(
    connection: Connection,
    path: Path,
    engine_args: Mapping[str, JsonValue],
    max_pixels: int,
    audio: AudioConfig,
    video: VideoConfig,
    memory_bytes: int,
) -> None:
    """Answers tasks, an ItemFile each, until the parent's end of the pipe closes. Headers have NO_DIGEST."""
    import torch

    torch.set_num_threads(1)  # items are processed in parallel by processes, not by threads
    preparer = Preparer(path, engine_args, max_pixels_decoded=max_pixels, audio=audio, video=video)
    for modality in preparer.modalities:
        try:
            preparer.prepare(sample(modality), modality, NO_DIGEST)  # imports what the processor needs
        except (ImageError, ImportError) as error:
            logger.warning("items of modality %s cannot be processed: %s", modality, error)

    def prepare(item: ItemFile) -> tuple[bytes, bytes]:
        return preparer.prepare(item.data, item.modality, NO_DIGEST, item.sampling).to_parts()

    answer_tasks(connection, memory_bytes, prepare)


class PreparePool:
    """Worker processes that prepare images, sounds and videos. For one event loop."""

    def __init__(self, path: Path, config: AppConfig, on_lost: Callable[[], None] = ignore) -> None:
        """Starts the workers, which import vLLM. `path`: the checkpoint's folder; `on_lost`: as in Workers."""
        limits = config.encoder_replica
        self._timeout_s, self._memory_bytes = limits.decode_timeout_s, limits.decode_memory_bytes
        ingress = config.ingress
        bounds = (ingress.max_image_pixels, ingress.audio, ingress.video, self._memory_bytes)
        settings = (path, generic_engine_args(config), *bounds)
        workers = range(limits.decode_workers)
        start = partial(Decoder, start_timeout_s=START_TIMEOUT_S, max_answer_bytes=2 * MAX_HEADER_BYTES)  # as JSON
        decoders = [start(serve_items, *settings) for _ in workers]
        self.workers = Workers(decoders, on_lost)

    async def prepare(self, item: ItemFile, digest: str, place: float = 0.0) -> VllmInputs:
        """Prepares a file, as `Workers.run`. Raises ImageError and WorkerEndedError as `DecodePool.decode`."""
        return await self.workers.run(partial(self._prepare, item, digest), place)

    def count_tokens(self) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...], int]:
        """Returns the counts of images, sounds and videos for GenericIdentity, empty or 0 if none are taken. Raises
        WorkerEndedError if no process can be started."""

        def count(file: bytes, modality: str = "image") -> int:
            return self.prepare_at_start(file, modality).num_tokens

        sounds, videos = (partial(count, modality=modality) for modality in ("audio", "video"))
        return count_tokens(count, self.workers.threads.map), count_audio_tokens(sounds), count_video_tokens(videos)

    def prepare_at_start(self, file: bytes, modality: str) -> VllmInputs:
        """Prepares a sample file, which no request has sent. Raises ImageError and WorkerEndedError as `prepare`."""
        return self._prepare(ItemFile(file, modality), NO_DIGEST, START_TIMEOUT_S)

    def _prepare(self, item: ItemFile, digest: str, timeout_s: float | None = None) -> VllmInputs:
        def parse(header: bytes, receive: Receive) -> VllmInputs:
            return VllmInputs.from_parts(header, receive(self._memory_bytes))

        prepared = self.workers.run_task(item, parse, timeout_s or self._timeout_s)
        return replace(prepared, header=replace(prepared.header, digest=digest))  # a worker could name another one
