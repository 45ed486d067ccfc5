"""The application's encoder replica with handles for a test, by which it is held up, paced and broken.

Everything else in it is the application's own.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray
import torch

from configs.schema import AppConfig
from deployments.encoder_replica import deployment as encoder_module
from deployments.encoder_replica import own_tower
from deployments.encoder_replica.decode.pool import DecodePool
from deployments.encoder_replica.deployment import EncoderReplica
from deployments.llm import deployment as llm_module
from deployments.transfer import unix_socket
from encoder.encoder import Encoder
from encoder.images.decoded import Decoded
from encoder.pixels.preprocess import Pixels
from encoder.staging.pipeline import Launched
from tests.cluster.watched import RecordedCounts

GATE_WAIT_S = 60

HOST_ID = unix_socket.host_id()


def node_host() -> str:
    """As if each Ray node had a host of its own: those of a test are on one machine."""
    return f"{HOST_ID}-{ray.get_runtime_context().get_node_id()[:6]}" if ray.is_initialized() else HOST_ID


for module in (unix_socket, encoder_module, llm_module):
    vars(module).update(host_id=node_host)


class GatedEncoder(Encoder):
    """Waits for a gate before it encodes, and counts. One a process."""

    gate = threading.Event()
    num_encoded = 0
    pace_s = 0.0
    """Least time for an item."""
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
        ends_at = time.monotonic()
        for launched in super().launch_batches(pixels):
            ends_at += GatedEncoder.pace_s * len(launched.num_tokens)
            time.sleep(max(ends_at - time.monotonic(), 0.0))
            yield launched


class ControlledEncoder(EncoderReplica):
    def __init__(self, config: AppConfig) -> None:
        vars(own_tower).update(Encoder=GatedEncoder)
        GatedEncoder.gate.set()
        super().__init__(config)
        self._counts: RecordedCounts = RecordedCounts()
        self._refuses = True
        self.first_frames: list[int] = []

    def decoded(self) -> list[int]:
        """The place of the first frame of each chunk of a video, in the order in which they were decoded."""
        return self.first_frames

    def refuse(self, refuses: bool) -> None:
        """Whether it refuses images from now on that have too much work before them."""
        self._refuses = refuses

    def _is_too_busy(self, session_id: str) -> bool:
        return self._refuses and super()._is_too_busy(session_id)

    def hold(self) -> None:
        GatedEncoder.gate.clear()

    def release(self) -> None:
        GatedEncoder.gate.set()

    def pace(self, chunk_s: float) -> None:
        """From now on decoding and encoding a chunk of a video take at least so long each, and `decoded` grows."""
        GatedEncoder.pace_s = chunk_s
        pool = self._decoders
        assert isinstance(pool, DecodePool)

        def paced(*chunk: Any) -> Pixels:
            ends_at = time.monotonic() + chunk_s
            self.first_frames.append(chunk[1].part.first_frame)
            pixels = DecodePool._decode_chunk(pool, *chunk)
            time.sleep(max(ends_at - time.monotonic(), 0.0))
            return pixels

        vars(pool)["_decode_chunk"] = paced

    def fail_for_several(self, fail: bool = True) -> None:
        GatedEncoder.fails_for_several = fail

    def stop_lending(self) -> None:
        self._server.close()

    def lend_again(self) -> None:
        self._server = self._make_server(self._server.store)

    def break_device(self, told: str) -> None:
        """As if CUDA had told so; every batch from now on fails with it."""
        GatedEncoder.fault = torch.AcceleratorError(told)

    def state(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "encoded": GatedEncoder.num_encoded,
            "queued_tokens": self._worker._queued_tokens,
            "flights": len(self._single_flight),
            "host": node_host(),
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
