"""Pixels of a real pool of decoder processes that resize, and frames of videos, which they always resize."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import threading
from collections.abc import Generator, Iterator
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest

from deployments.common.messages import ChunkOfVideo, StoredFile, VideoSampling
from deployments.encoder_replica.decode.pool import DecodePool
from encoder.checkpoint.video_rules import VideoRules
from encoder.images.decoded import Decoded
from encoder.images.decoded import decode as decode_image
from encoder.images.size import ImageError, PixelBounds
from encoder.pixels.preprocess import Pixels, resize
from encoder.video.bounds import VideoBounds
from encoder.video.decode import decode
from tests.unit.deployments.encoder_replica.decode.pools import (
    GOOD,
    LOST,
    MAX_PIXELS,
    SHARED_BYTES,
    decoded,
    decoders,
    freed,
    one_decoder,
)
from tests.unit.deployments.samples import RULES, png
from tests.video_files import Clip

VIDEO_RULES = VideoRules("qwen2_vl", RULES, 2.0, 4, 768)
BOUNDS = VideoBounds(max_frames=40)


@pytest.fixture(scope="module")
def pool(runner: asyncio.Runner) -> Iterator[DecodePool]:
    with one_decoder(runner, resize=True) as pool:
        yield pool


def test_pixels_are_those_of_the_preprocessor(pool: DecodePool, runner: asyncio.Runner) -> None:
    for bounds in (None, PixelBounds(100 * 28 * 28, None)):
        pixels = runner.run(decoded(pool, GOOD, bounds))
        expected = resize(decode_image(GOOD, RULES, bounds), RULES)
        assert pixels.grid_thw == expected.grid_thw
        assert np.array_equal(pixels.values, expected.values)


def test_without_room_pixels_come_through_the_pipe_and_are_counted(
    pool: DecodePool, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped: list[int] = []
    monkeypatch.setattr(pool, "_on_piped", lambda: piped.append(1))
    assert freed(pool)
    everything = pool.arena.allocate(SHARED_BYTES)
    assert everything is not None
    pixels = runner.run(decoded(pool, GOOD))
    assert np.array_equal(pixels.values, resize(decode_image(GOOD, RULES), RULES).values)
    assert piped == [1]
    del everything
    runner.run(decoded(pool, GOOD))
    assert piped == [1]


def test_a_file_that_holds_more_than_its_header_said_comes_through_the_pipe(
    pool: DecodePool, runner: asyncio.Runner
) -> None:
    """The allocation is made for what the ingress read; no decoder writes past it."""
    assert freed(pool)
    first = pool.arena.allocate(1)
    second = pool.arena.allocate(4096)
    assert first is not None
    assert second is not None
    neighbour = second.array((4096,))
    neighbour[:] = 77
    del first  # the gap before the neighbour is what the next image gets
    large = png(560, 280)
    pixels = runner.run(pool.decode(large, None, (28, 28)))
    assert np.array_equal(pixels.values, resize(decode_image(large, RULES), RULES).values)
    assert (neighbour == 77).all()


def test_where_the_device_resizes_the_workers_only_decode(runner: asyncio.Runner) -> None:
    """They need no torch then, which is most of what a worker would take to start and in memory."""
    before = decoders()
    pool = DecodePool(RULES, workers=1, max_pixels=MAX_PIXELS, timeout_s=9, shm_bytes=SHARED_BYTES, resize=False)
    try:
        image = runner.run(decoded(pool, GOOD))
        assert isinstance(image, Decoded)
        assert image.values.shape == (60, 100, 3)
        assert np.array_equal(resize(image, RULES).values, resize(decode_image(GOOD, RULES), RULES).values)
        (worker,) = decoders() - before
        assert not any("libtorch" in mapped.path for mapped in worker.memory_maps())
        del image
        assert freed(pool)
        nearly_all = pool.arena.allocate(SHARED_BYTES - 4096)
        assert nearly_all is not None
        piped = runner.run(decoded(pool, png(300, 300)))
        assert isinstance(piped, Pixels), "what goes through the pipe is the smaller, resized image"
    finally:
        pool.workers.stop()


def planned(pool: DecodePool, runner: asyncio.Runner, data: bytes, fps: float | None = None) -> list[ChunkOfVideo]:
    """The chunks of a video."""
    plan = runner.run(pool.plan_video(data, VideoSampling(fps=fps), VIDEO_RULES, BOUNDS))
    return [ChunkOfVideo("video", plan.frames.indices, part, StoredFile(data)) for part in plan.chunks]


def test_chunks_of_frames_are_those_of_the_preprocessor(pool: DecodePool, runner: asyncio.Runner) -> None:
    """In order, alone and twice; in shared memory or, where it is full, through the pipe."""
    data = Clip(40, Fraction(8), 150, 90).encode()
    chunks = planned(pool, runner, data, fps=7)
    indices = chunks[0].indices
    assert len(chunks) == 5
    frames = resize(Decoded(decode(data, indices), (len(indices) // 2, *chunks[0].part.grid_thw[1:])), RULES).values
    for full, order in ((False, (0, 1, 2, 3, 4)), (True, (3, 1, 2, 4, 4))):
        held = pool.arena.allocate(SHARED_BYTES - 2**12) if full else None
        for number in order:
            part = chunks[number].part
            pixels = runner.run(pool.decode_chunk(chunks[number], BOUNDS))
            assert np.array_equal(pixels.values, frames[part.first_frame : part.first_frame + part.num_frames])
            assert pixels.grid_thw == part.grid_thw
        del held
    del pixels
    assert freed(pool)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"no video", "not a video of a supported format"),
        (Clip(20).encode()[:900], "truncated or corrupt"),
        (Clip(200, Fraction(4)).encode(), "100 frames of the video were to be decoded, the limit is 40"),
    ],
)
def test_a_bad_video_is_refused(pool: DecodePool, runner: asyncio.Runner, data: bytes, told: str) -> None:
    with pytest.raises(ImageError, match=told):
        planned(pool, runner, data)


def test_a_decoder_killed_within_a_video_decodes_its_next_chunk_anew(pool: DecodePool, runner: asyncio.Runner) -> None:
    """Before it gets the chunk, and while it has it: the next process gets the file, of which only the first had it."""
    data = Clip(40, Fraction(8), seed=3).encode()
    chunks = planned(pool, runner, data, fps=7)
    expected = [runner.run(pool.decode_chunk(chunk, BOUNDS)).values for chunk in chunks]
    before = len(LOST)
    for at_work in (False, True):
        for number, chunk in enumerate(chunks):
            if number == 2:
                (worker,) = decoders()
                worker.send_signal(signal.SIGSTOP if at_work else signal.SIGKILL)
                if at_work:
                    threading.Timer(0.5, worker.kill).start()
            assert np.array_equal(runner.run(pool.decode_chunk(chunk, BOUNDS)).values, expected[number])
    assert len(LOST) == before + 2


def test_a_frame_that_cannot_be_decoded_refuses_its_chunk(pool: DecodePool, runner: asyncio.Runner) -> None:
    """The header is whole, later frames are damaged: a video is never shortened. The chunk after it is refused too,
    and another video is not."""
    data = bytearray(Clip(40, Fraction(8), options={"g": "8"}).encode())
    begin = data.index(b"mdat") + 4
    middle = begin + (len(data) - begin) // 4
    data[middle:-3000] = bytes(len(data) - 3000 - middle)
    chunks = planned(pool, runner, bytes(data), fps=8)
    for chunk in chunks[-2:]:
        with pytest.raises(ImageError, match=r"cannot be decoded|truncated or corrupt"):
            runner.run(pool.decode_chunk(chunk, BOUNDS))
    good = Clip(8).encode()
    assert runner.run(pool.decode_chunk(planned(pool, runner, good)[0], BOUNDS)).values.ndim == 4


def test_a_file_is_fetched_for_one_chunk_at_a_time(pool: DecodePool, runner: asyncio.Runner) -> None:
    """Chunks that waited for their turn held a copy of the file each: 16 of them 640 MiB of a file at the bound."""
    data = Clip(40, Fraction(8), seed=4).encode()
    chunks = planned(pool, runner, data, fps=7)
    copies: list[int] = []
    """Chunks that have been fetched for and are not decoded yet, at each fetch."""
    num_held = 0

    class Reference:
        def __await__(self) -> Generator[Any, Any, bytes]:
            nonlocal num_held
            num_held += 1
            copies.append(num_held)
            yield from asyncio.sleep(0).__await__()
            return data

    async def decode_all() -> None:
        async def decode_one(chunk: ChunkOfVideo) -> None:
            nonlocal num_held
            await pool.decode_chunk(dataclasses.replace(chunk, file=cast(Any, Reference())), BOUNDS)
            num_held -= 1

        await asyncio.gather(*map(decode_one, chunks))

    runner.run(decode_all())
    assert copies == [1] * len(chunks)
