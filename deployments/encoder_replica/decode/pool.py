"""Decoding of images and videos in worker processes, so that a decoder crash or a slow file costs one request.

Workers decode, and also resize if the device does not. Pixels are passed through shared memory; if it is full, they are
resized and sent through a pipe, which is counted. Images wait for a worker in a fair queue.
"""

from __future__ import annotations

import asyncio
import math
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from deployments.common.fair_queue import FairQueue
from deployments.common.messages import ChunkOfVideo, StoredFile, VideoSampling
from deployments.common.replica_errors import WorkerEndedError
from deployments.encoder_replica.decode.video_task import ChunkTask, HeaderTask
from deployments.encoder_replica.decode.worker_process import (
    DECODER_FAILED,
    Decoder,
    DecoderLostError,
    Receive,
    Task,
    parse_pixels,
    serve_tasks,
)
from deployments.transfer.shared_memory import Arena
from encoder.checkpoint.video_rules import VideoRules
from encoder.images.decoded import Decoded
from encoder.images.size import ImageRules, PixelBounds, image_grid, resized_size
from encoder.pixels.preprocess import Pixels
from encoder.video.bounds import VideoBounds, VideoError
from encoder.video.header import VideoHeader
from encoder.video.plan import VideoPlan

T = TypeVar("T")

MAX_NOT_STARTED = 3
"""Tasks in a row without a process, after which a replica is replaced: its caches attract images that it refuses."""


def ignore() -> None: ...


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


class Workers:
    """Worker processes, each used by one thread at a time. For one event loop."""

    def __init__(self, decoders: Sequence[Decoder], on_lost: Callable[[], None] = ignore) -> None:
        """`on_lost`: called, on any thread, when a process has ended at work."""
        self.decoders = decoders
        self._on_lost = on_lost
        self._idle: queue.SimpleQueue[Decoder] = queue.SimpleQueue()
        for decoder in decoders:
            self._idle.put(decoder)
        self.threads = ThreadPoolExecutor(len(decoders), thread_name_prefix="decode")
        # Further jobs wait in the fair queue, where cancelling is free. The extra job keeps the workers busy.
        self._permits = FairSemaphore(len(decoders) + 1)
        self._num_not_started = 0

    async def run(self, job: Callable[[], T], place: float) -> T:
        """Runs a job, which calls `run_task`, in a thread.

        A cancelled caller leaves the queue. A job in flight runs to its end: it could only be stopped by killing its
        process, and a new one takes seconds to start.
        """
        await self._permits.acquire(place)
        try:
            future = asyncio.get_running_loop().run_in_executor(self.threads, job)
        except BaseException:
            self._permits.release()
            raise
        future.add_done_callback(self._release_permit)
        try:
            return await asyncio.shield(future)
        finally:
            del future  # or its error would keep this frame, and the pixels' memory

    def _release_permit(self, future: asyncio.Future[Any]) -> None:
        self._permits.release()
        if not future.cancelled():
            future.exception()  # retrieved, or asyncio logs the exception if the caller was cancelled

    def run_task(self, task: object, parse: Callable[[bytes, Receive], T], timeout_s: float) -> T:
        """Calls `Decoder.run` of an idle process, as `retry_once`."""

        def run() -> T:
            with self.idle() as decoder:
                return decoder.run(task, parse, timeout_s)

        return self.retry_once(run)

    def retry_once(self, run: Callable[[], T]) -> T:
        """Returns the result of `run`, which is called again if its process ends: the file need not be the reason.
        Raises DecoderLostError if that of the second call ends, too."""
        try:
            return run()
        except DecoderLostError:
            self._on_lost()
        try:
            return run()
        except DecoderLostError:
            self._on_lost()
            raise

    @contextmanager
    def idle(self, video: str = "") -> Iterator[Decoder]:
        """Takes an idle process, if possible one that has the file of `video`, and waits for one if there is none."""
        taken = [self._idle.get()]
        with suppress(queue.Empty):
            while taken[-1].video != video:
                taken.append(self._idle.get_nowait())
        decoder = taken.pop() if taken[-1].video == video else taken.pop(0)
        for other in taken:
            self._idle.put(other)
        cannot_start = False
        try:
            yield decoder
        except WorkerEndedError:
            cannot_start = True
            raise
        finally:
            self._num_not_started = self._num_not_started + 1 if cannot_start else 0
            self._idle.put(decoder)

    @property
    def can_start(self) -> bool:
        """False if no process could be started for the last MAX_NOT_STARTED tasks."""
        return self._num_not_started < MAX_NOT_STARTED

    def stop(self) -> None:
        """Ends the worker processes. Jobs in flight never complete, so no caller may be waiting."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for decoder in self.decoders:
            decoder.stop()


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
        on_piped: Callable[[], None] = ignore,
        memory_bytes: int = 2 * 1024**3,
        on_lost: Callable[[], None] = ignore,
    ) -> None:
        """Starts the workers.

        Args:
            max_pixels: limit of width times height as a file's header states them.
            shm_bytes: size of the shared memory for pixels.
            resize: whether the workers resize, for a device that does not.
            on_piped: called, on any thread, for each image that did not fit in shared memory.
            memory_bytes: limit of the memory that one image may take in its worker.
            on_lost: as in Workers.
        """
        self._rules = rules
        self._timeout_s = timeout_s
        self._resize = resize
        self._on_piped = on_piped
        self.arena = Arena(shm_bytes)
        self._memory_bytes = memory_bytes
        self._videos: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        settings = (rules, max_pixels, memory_bytes, self.arena, resize)
        self.workers = Workers([Decoder(serve_tasks, *settings) for _ in range(workers)], on_lost)

    async def decode(
        self, data: bytes, bounds: PixelBounds | None, size: tuple[int, int], place: float = 0.0
    ) -> Pixels | Decoded:
        """Decodes an image, as `Workers.run`. The pixels' shared memory is freed with the last reference.

        Args:
            size: upright width and height in pixels, as the file's header states them.
            place: place in the queue from `fair_queue.virtual_arrival_s`; equal places are served in order of arrival.

        Raises:
            ImageError: the file cannot be decoded, took too long, or killed two decoders.
            WorkerEndedError: no decoder process can be started.
        """
        return await self.workers.run(partial(self._decode, data, bounds, size), place)

    def _decode(self, data: bytes, bounds: PixelBounds | None, size: tuple[int, int]) -> Pixels | Decoded:
        width, height = resized_size(*size, self._rules, bounds) if self._resize else size
        allocation = self.arena.allocate(3 * width * height)
        if allocation is None:
            self._on_piped()
        # Outside of shared memory, only the limit on queued tokens bounds the waiting pixels, and only resized ones.
        resize = self._resize or allocation is None
        place = (allocation.offset, allocation.num_bytes) if allocation is not None else (0, 0)
        parse = partial(parse_pixels, allocation=allocation, memory_bytes=self._memory_bytes)
        values = self.workers.run_task(Task(data, bounds, resize, *place), parse, self._timeout_s)
        if not resize:
            return Decoded(values, image_grid(values.shape[1], values.shape[0], self._rules, bounds))
        patch = self._rules.patch_size
        return Pixels(values, (1, values.shape[1] // patch, values.shape[2] // patch))

    async def plan_video(
        self, data: bytes, sampling: VideoSampling, rules: VideoRules, bounds: VideoBounds, place: float = 0.0
    ) -> VideoPlan:
        """Reads a video's header, and chooses its frames. Raises VideoError, and otherwise as `decode`."""

        def parse(answer: bytes, _: Receive) -> VideoHeader:
            return msgspec.json.decode(answer, type=VideoHeader)

        run = partial(self.workers.run_task, HeaderTask(data, bounds), parse, self._timeout_s)
        header = await self.workers.run(run, place)
        return VideoPlan.make(header, rules, bounds, sampling.fps, sampling.num_frames)

    async def decode_chunk(self, of: ChunkOfVideo, bounds: VideoBounds, place: float = 0.0) -> Pixels:
        """Decodes and resizes frames of a video, as `decode`. One chunk of a video is decoded at a time, in order of
        the calls, by the process that decoded the one before: it goes through the file once, and there is one copy of
        the file here."""
        lock = self._videos.setdefault(of.video, asyncio.Lock())
        async with lock:
            data = of.file.data if isinstance(of.file, StoredFile) else await of.file
            return await self.workers.run(partial(self._decode_chunk, data, of, bounds), place)

    def _decode_chunk(self, data: bytes, of: ChunkOfVideo, bounds: VideoBounds) -> Pixels:
        _, h, w = of.part.grid_thw
        shape = (of.part.num_frames, 3, h * self._rules.patch_size, w * self._rules.patch_size)
        allocation = self.arena.allocate(math.prod(shape))
        if allocation is None:
            self._on_piped()
        place = (allocation.offset, allocation.num_bytes) if allocation is not None else (0, 0)
        parse = partial(parse_pixels, allocation=allocation, memory_bytes=self._memory_bytes, ndim=4)

        def run() -> Pixels:
            with self.workers.idle(of.video) as decoder:
                sent = b"" if decoder.video == of.video else data
                decoder.video = ""
                task = ChunkTask(sent, bounds, of.indices, of.part, *place)
                values = decoder.run(task, parse, self._timeout_s, stateless=bool(sent))
                if values.shape != shape:
                    raise VideoError(DECODER_FAILED)
                decoder.video = "" if task.is_last else of.video
            return Pixels(values, of.part.grid_thw)

        return self.workers.retry_once(run)
