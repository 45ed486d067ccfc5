"""Decoding and resizing in worker processes, so that a decoder's crash or a slow file costs one request.

It must not know what becomes of the pixels.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
from concurrent.futures.process import BrokenProcessPool

import torch
from pebble import ProcessExpired, ProcessPool

from encoder.image_size import ImageError, ImageRules, PixelBounds
from encoder.preprocess import Pixels, Preprocessor

logger = logging.getLogger("ray.serve")

GAVE_UP = "the decoder gave up on this image"


@functools.cache  # one for each worker process
def _preprocessor(rules: ImageRules, max_pixels: int) -> Preprocessor:
    torch.set_num_threads(1)  # the pool is the parallelism
    return Preprocessor(rules, max_pixels_decoded=max_pixels)


def _decode(rules: ImageRules, max_pixels: int, data: bytes, bounds: PixelBounds | None) -> Pixels:
    return _preprocessor(rules, max_pixels).pixels(data, bounds)


class DecodePool:
    """Worker processes that turn files into pixels. Used from one event loop."""

    def __init__(self, rules: ImageRules, *, workers: int, max_pixels: int, timeout_s: float) -> None:
        """`max_pixels` bounds width times height as a file's header states it."""
        self._settings = (rules, max_pixels)
        self._workers = workers
        self._timeout_s = timeout_s
        # Jobs beyond these wait here, where leaving costs nothing; the one job more keeps the workers busy.
        self._slots = asyncio.Semaphore(workers + 1)
        self._pool = self._started_pool()

    async def pixels(self, data: bytes, bounds: PixelBounds | None) -> Pixels:
        """`uint8 [3, H, W]` and the grid.

        A caller who leaves gives up its place in the queue. What is being decoded is decoded to its end: it could only
        be stopped with its process, and a new one takes seconds to start.

        Raises:
            ImageError: the file cannot be decoded, took too long, or killed its decoder.
        """
        try:
            return await self._decoded(data, bounds)
        except BrokenProcessPool:  # a worker died while all were idle; pebble gives up the whole pool for that
            logger.warning("the decoders were lost and are started anew")
        try:
            return await self._decoded(data, bounds)
        except BrokenProcessPool as error:
            raise ImageError(GAVE_UP) from error

    async def _decoded(self, data: bytes, bounds: PixelBounds | None) -> Pixels:
        await self._slots.acquire()
        try:
            if not self._pool.active:
                lost, self._pool = self._pool, self._started_pool()
                asyncio.get_running_loop().run_in_executor(None, _stop, lost)
            future = asyncio.wrap_future(
                self._pool.schedule(_decode, args=(*self._settings, data, bounds), timeout=self._timeout_s)
            )
        except BaseException:
            self._slots.release()
            raise
        future.add_done_callback(lambda _: self._slots.release())
        try:
            return await asyncio.shield(future)
        except TimeoutError as error:
            raise ImageError(f"decoding took longer than {self._timeout_s:g} s") from error
        except ProcessExpired as error:
            raise ImageError(GAVE_UP) from error

    def _started_pool(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=self._workers,
            initializer=_preprocessor,
            initargs=self._settings,
            context=multiprocessing.get_context("spawn"),  # a fork of a process with CUDA or threads is not safe
        )
        pool.schedule(_preprocessor, args=self._settings)  # starts the processes now, and not with the first image
        return pool

    def stop(self) -> None:
        """Ends the worker processes. What is under way is never answered: call it when nobody waits any more."""
        _stop(self._pool)


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()
