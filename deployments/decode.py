"""Decoding in worker processes, so that a decoder's crash or a slow file costs one request.

Where the device resizes, a worker only decodes; else it resizes too. Pixels come through shared memory; where that is
full they come resized through a pipe, which is counted. Who waits for a worker waits in a fair line. It must not
know what becomes of the pixels.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from deployments.arena import Arena
from deployments.decoder_process import Decoder, Task
from deployments.fair_line import FairLine
from encoder.decoded import Decoded
from encoder.image_size import ImageRules, PixelBounds, grid_of, resized
from encoder.preprocess import Pixels


def _ignore() -> None: ...


class Turns:
    """So many at a time; the others in a fair line. For one event loop."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._line: FairLine[asyncio.Future[None]] = FairLine()

    async def begin(self, place: float) -> None:
        """Waits for its turn, which `end` ends. A caller who leaves gives up its place."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.add(place, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._line.discard(turn)
            else:
                self.end()  # it came as the caller left
            raise

    def end(self) -> None:
        while self._line:
            turn = self._line.pop()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class DecodePool:
    """Worker processes that turn files into pixels. Used from one event loop."""

    def __init__(
        self,
        rules: ImageRules,
        *,
        workers: int,
        max_pixels: int,
        timeout_s: float,
        shared_bytes: int,
        resize: bool,
        piped: Callable[[], None] = _ignore,
        memory_bytes: int = 2 * 1024**3,
    ) -> None:
        """`max_pixels` bounds width times height as a file's header states it, `shared_bytes` the pixels in shared
        memory. `resize`: in the workers, for a device that does not. `piped` is called, on any thread, for each image
        that found no room in shared memory. `memory_bytes`: what one image may take in its worker."""
        self._rules = rules
        self._timeout_s = timeout_s
        self._resize = resize
        self._piped = piped
        self.arena = Arena(shared_bytes)
        self._decoders = [
            Decoder(rules, max_pixels, memory_bytes, self.arena.handle(), resizes=resize) for _ in range(workers)
        ]
        self._idle: queue.SimpleQueue[Decoder] = queue.SimpleQueue()
        for decoder in self._decoders:
            self._idle.put(decoder)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        # Jobs beyond these wait here, where leaving costs nothing; the one job more keeps the workers busy.
        self._turns = Turns(workers + 1)

    async def pixels(
        self, data: bytes, bounds: PixelBounds | None, size: tuple[int, int], place: float = 0.0
    ) -> Pixels | Decoded:
        """The image and its grid. `size`: upright width and height, as the file's header states them. `place`: in line,
        by `fair_line.place_of`; those with equal ones as they come.

        A caller who leaves gives up its place in the queue. What is being decoded is decoded to its end: it could only
        be stopped with its process, and a new one takes seconds to start. The pixels' memory is free again when nobody
        holds them any more.

        Raises:
            ImageError: the file cannot be decoded, took too long, or killed its decoder.
        """
        await self._turns.begin(place)
        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, self._decode, data, bounds, size)
        except BaseException:
            self._turns.end()
            raise
        future.add_done_callback(self._done)
        return await asyncio.shield(future)

    def _done(self, future: asyncio.Future[Pixels | Decoded]) -> None:
        self._turns.end()
        if not future.cancelled():
            future.exception()  # of a caller who left, nobody asks

    def _decode(self, data: bytes, bounds: PixelBounds | None, size: tuple[int, int]) -> Pixels | Decoded:
        width, height = resized(*size, self._rules, bounds) if self._resize else size
        lease = self.arena.take(3 * width * height)
        if lease is None:
            self._piped()
        # Without room in shared memory the smaller image goes: what waits then has the bound of the tokens that wait.
        resize = self._resize or lease is None
        place = (lease.start, lease.num_bytes) if lease is not None else (0, 0)
        decoder = self._idle.get()
        try:
            values = decoder.run(Task(data, bounds, resize, *place), lease, self._timeout_s)
        finally:
            self._idle.put(decoder)
        if not resize:
            return Decoded(values, grid_of(values.shape[1], values.shape[0], self._rules, bounds))
        patch = self._rules.patch_size
        return Pixels(values, (1, values.shape[1] // patch, values.shape[2] // patch))

    def stop(self) -> None:
        """Ends the worker processes. What is under way is never answered: call it when nobody waits any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for decoder in self._decoders:
            decoder.stop()
