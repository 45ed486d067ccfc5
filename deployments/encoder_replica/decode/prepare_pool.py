"""vLLM's processor in worker processes: it decodes files and prepares the inputs of vLLM's towers, and their headers.

The bounds on time and memory, and the fair queue, are those of `pool.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

from pydantic import JsonValue

from configs.schema import AppConfig
from deployments.common.model_path import generic_engine_args
from deployments.encoder_replica.decode.pool import Workers
from deployments.encoder_replica.decode.worker_process import Decoder, Receive, answer_tasks
from deployments.vllm.preparer import Preparer, VllmInputs, blank_image
from encoder.images.generic_identity import MEASURED_SIDES
from encoder.images.size import ImageError

START_TIMEOUT_S = 600.0
"""Timeout for a process to import vLLM and load its processor."""
NO_DIGEST = "0" * 64


def serve_items(
    connection: Connection, path: Path, engine_args: Mapping[str, JsonValue], max_pixels: int, memory_bytes: int
) -> None:
    """Answers tasks, a file each, until the parent's end of the pipe closes. Headers have NO_DIGEST."""
    import torch

    torch.set_num_threads(1)  # items are processed in parallel by processes, not by threads
    preparer = Preparer(path, engine_args, max_pixels_decoded=max_pixels)
    preparer.prepare(blank_image(64, 64), "image", NO_DIGEST)  # imports what the processor needs

    def prepare(data: bytes) -> tuple[bytes, bytes]:
        return preparer.prepare(data, "image", NO_DIGEST).to_parts()

    answer_tasks(connection, memory_bytes, prepare)


class PreparePool:
    """Worker processes that prepare images. For one event loop."""

    def __init__(self, path: Path, config: AppConfig) -> None:
        """Starts the workers, which import vLLM. `path`: the checkpoint's folder."""
        limits = config.encoder_replica
        self._timeout_s, self._memory_bytes = limits.decode_timeout_s, limits.decode_memory_bytes
        settings = (path, generic_engine_args(config), config.ingress.max_image_pixels, self._memory_bytes)
        workers = range(limits.decode_workers)
        self._workers = Workers([Decoder(serve_items, *settings, start_timeout_s=START_TIMEOUT_S) for _ in workers])

    async def prepare(self, data: bytes, digest: str, place: float = 0.0) -> VllmInputs:
        """Prepares an image file, as `Workers.run`. Raises ImageError and WorkerEndedError as `DecodePool.decode`."""
        return await self._workers.run(partial(self._prepare, data, digest), place)

    def count_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Returns `GenericIdentity.token_counts`. Takes seconds. A size that a limit or the model refuses gets the
        largest count.

        Raises WorkerEndedError if no process can be started.
        """

        def count(size: tuple[int, int]) -> int:
            try:
                return self._prepare(blank_image(*size), NO_DIGEST).num_tokens
            except ImageError:
                return 0

        counts = list(self._workers.threads.map(count, product(MEASURED_SIDES, MEASURED_SIDES)))
        rows = range(0, len(counts), len(MEASURED_SIDES))
        return tuple(tuple(one or max(counts) for one in counts[row : row + len(MEASURED_SIDES)]) for row in rows)

    def _prepare(self, data: bytes, digest: str) -> VllmInputs:
        def parse(header: bytes, receive: Receive) -> VllmInputs:
            return VllmInputs.from_parts(header, receive(self._memory_bytes))

        prepared = self._workers.run_task(data, parse, self._timeout_s)
        return replace(prepared, header=replace(prepared.header, digest=digest))  # a worker could name another one

    def stop(self) -> None:
        """As `Workers.stop`."""
        self._workers.stop()
