"""A pool of one decoder process, and files for it."""

from __future__ import annotations

import asyncio
import gc
import struct
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from deployments.encoder_replica.decode.pool import DecodePool
from encoder.images.decoded import Decoded
from encoder.images.size import ImageError, PixelBounds, read_header
from encoder.pixels.preprocess import Pixels
from tests.unit.deployments.samples import RULES, png

TIMEOUT_S = 60
MAX_PIXELS = 4_000_000
SHARED_BYTES = 2**20
GOOD = png(100, 60)
LOST: list[None] = []
"""For each decoder that was lost at work."""


def slow_bitmap(steps: int) -> bytes:
    """A small BMP with `steps` moves by nothing before its runs. Pillow reads runs in Python: microseconds a step."""
    side = 30
    rows = b"\0\2\0\0" * steps + (b"\1\7" * side + b"\0\0") * side + b"\0\1"
    palette = bytes(4 * 256)
    begin = 14 + 40 + len(palette)
    header = struct.pack("<2sIHHI", b"BM", begin + len(rows), 0, 0, begin)
    return header + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(rows), 0, 0, 256, 0) + palette + rows


SLOW, TOO_SLOW = slow_bitmap(300_000), slow_bitmap(10_000_000)


def decoders() -> set[psutil.Process]:
    """The worker processes; the resource tracker, which Python starts beside them, is none. A process that has just
    been started has no command line for a moment."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return {child for child in alive if "resource_tracker" not in " ".join(child.cmdline())}


def decoded(pool: DecodePool, data: bytes, bounds: PixelBounds | None = None) -> Coroutine[Any, Any, Pixels | Decoded]:
    """With the size that the header states, as the ingress gives it."""
    try:
        found = read_header(data)
    except ImageError:
        return pool.decode(data, bounds, (10, 10))
    return pool.decode(data, bounds, (found.width, found.height))


def freed(pool: DecodePool, patience_s: float = 10) -> bool:
    """Whether all shared memory becomes free: a thread that has just answered may hold some a moment longer."""
    deadline = time.monotonic() + patience_s
    while pool.arena.free_bytes != SHARED_BYTES and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return pool.arena.free_bytes == SHARED_BYTES


@contextmanager
def one_decoder(runner: asyncio.Runner, *, resize: bool) -> Iterator[DecodePool]:
    """The pool, whose process must still be the only one at the end. With `resize`, it imports torch, which takes
    seconds."""
    before = decoders()
    pool = DecodePool(
        RULES,
        workers=1,
        max_pixels=MAX_PIXELS,
        timeout_s=TIMEOUT_S,
        shm_bytes=SHARED_BYTES,
        resize=resize,
        on_lost=lambda: LOST.append(None),
    )
    try:
        yield pool
        runner.run(decoded(pool, GOOD))
        assert len(decoders() - before) == 1
    finally:
        pool.workers.stop()
    assert decoders() <= before, "stop() ends the processes"
