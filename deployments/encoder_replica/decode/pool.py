"""Image decoding in worker processes, so that a decoder crash or a slow file costs one request.

Workers decode, and also resize if the device does not. Pixels are passed through shared memory; if it is full, they are
resized and sent through a pipe, which is counted. Images wait for a worker in a fair queue.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from deployments.common.fair_queue import FairQueue
from deployments.encoder_replica.decode.worker_process import Decoder, Task
from deployments.transfer.shared_memory import Arena
from encoder.images.decoded import Decoded
from encoder.images.size import ImageRules, PixelBounds, image_grid, resized_size
from encoder.pixels.preprocess import Pixels


def _ignore() -> None: ...


class FairSemaphore:
    """Semaphore of `num_permits` permits whose waiters form a fair queue. For one event loop."""

    def __init__(self, num_permits: int) -> None:
        self._num_free = num_permits
        self._waiters: FairQueue[asyncio.Future[None]] = FairQueue()

    async def acquire(self, place: float) -> None:
        """Acquires a permit, which `release` releases. A cancelled caller leaves the queue."""
        if self._num_free:
            self._num_free -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(place, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._waiters.discard(waiter)
            else:
                self.release()  # the permit was granted while the caller was cancelled
            raise

    def release(self) -> None:
        while self._waiters:
            waiter = self._waiters.pop()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._num_free += 1


class DecodePool:
    """Worker processes that decode image files into pixels. For one event loop."""

    def __init__(
        self,
        rules: ImageRules,
        *,
        workers: int,
        max_pixels: int,
        timeout_s: float,
        shm_bytes: int,
        resize: bool,
        on_piped: Callable[[], None] = _ignore,
        memory_bytes: int = 2 * 1024**3,
    ) -> None:
        """Starts the workers.

        Args:
            max_pixels: limit of width times height as a file's header states them.
            shm_bytes: size of the shared memory for pixels.
            resize: whether the workers resize, for a device that does not.
            on_piped: called, on any thread, for each image that did not fit in shared memory.
            memory_bytes: limit of the memory that one image may take in its worker.
        """
        self._rules = rules
        self._timeout_s = timeout_s
        self._resize = resize
        self._on_piped = on_piped
        self.arena = Arena(shm_bytes)
        self._decoders = [
            Decoder(rules, max_pixels, memory_bytes, self.arena.handle(), resizes=resize) for _ in range(workers)
        ]
        self._idle: queue.SimpleQueue[Decoder] = queue.SimpleQueue()
        for decoder in self._decoders:
            self._idle.put(decoder)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        # Further jobs wait in the fair queue, where cancelling is free. The extra job keeps the workers busy.
        self._permits = FairSemaphore(workers + 1)

    async def decode(
        self, data: bytes, bounds: PixelBounds | None, size: tuple[int, int], place: float = 0.0
    ) -> Pixels | Decoded:
        """Decodes an image.

        A cancelled caller leaves the queue. A decoding in flight runs to its end: it could only be stopped by killing
        its process, and a new one takes seconds to start. The pixels' shared memory is freed with the last reference.

        Args:
            size: upright width and height in pixels, as the file's header states them.
            place: place in the queue from `fair_queue.virtual_arrival_s`; equal places are served in order of arrival.

        Raises:
            ImageError: the file cannot be decoded, took too long, or killed its decoder.
            WorkerEndedError: no decoder process can be started.
        """
        await self._permits.acquire(place)
        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, self._decode, data, bounds, size)
        except BaseException:
            self._permits.release()
            raise
        future.add_done_callback(self._release_permit)
        return await asyncio.shield(future)

    def _release_permit(self, future: asyncio.Future[Pixels | Decoded]) -> None:
        self._permits.release()
        if not future.cancelled():
            future.exception()  # retrieved, or asyncio logs the exception if the caller was cancelled

    def _decode(self, data: bytes, bounds: PixelBounds | None, size: tuple[int, int]) -> Pixels | Decoded:
        width, height = resized_size(*size, self._rules, bounds) if self._resize else size
        allocation = self.arena.allocate(3 * width * height)
        if allocation is None:
            self._on_piped()
        # Outside of shared memory, only the limit on queued tokens bounds the waiting pixels, and only resized ones.
        resize = self._resize or allocation is None
        place = (allocation.offset, allocation.num_bytes) if allocation is not None else (0, 0)
        decoder = self._idle.get()
        try:
            values = decoder.run(Task(data, bounds, resize, *place), allocation, self._timeout_s)
        finally:
            self._idle.put(decoder)
        if not resize:
            return Decoded(values, image_grid(values.shape[1], values.shape[0], self._rules, bounds))
        patch = self._rules.patch_size
        return Pixels(values, (1, values.shape[1] // patch, values.shape[2] // patch))

    def stop(self) -> None:
        """Ends the worker processes. Decodings in flight never complete, so no caller may be waiting."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for decoder in self._decoders:
            decoder.stop()
