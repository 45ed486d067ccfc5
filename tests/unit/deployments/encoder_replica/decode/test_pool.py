"""A real pool of decoder processes: what kills, stalls or leaves costs one image, and the pool goes on.

One file, since its tests, those of videos too, share one pool, whose processes take seconds to start.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Coroutine, Generator, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch

from deployments.common.messages import ChunkOfVideo, StoredFile, VideoSampling
from deployments.common.replica_errors import WorkerEndedError
from deployments.encoder_replica.decode.pool import DecodePool
from deployments.encoder_replica.decode.worker_process import Task
from encoder.checkpoint.video_rules import VideoRules
from encoder.images.decoded import Decoded
from encoder.images.size import ImageError, PixelBounds, read_header
from encoder.pixels.preprocess import Pixels, Preprocessor, resize
from encoder.video.bounds import VideoBounds
from encoder.video.decode import decode
from tests.unit.deployments.samples import RULES, png
from tests.video_files import Clip

ROOT = Path(__file__).parents[5]
TIMEOUT_S = 3
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


SLOW, TOO_SLOW = slow_bitmap(300_000), slow_bitmap(6_000_000)


def decoders() -> set[psutil.Process]:
    """The worker processes; the resource tracker, which Python starts beside them, is none."""
    return {child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())}


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


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """The one event loop that the pool is used from."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def pool(runner: asyncio.Runner) -> Iterator[DecodePool]:
    before = decoders()
    settings: dict[str, Any] = {"max_pixels": MAX_PIXELS, "timeout_s": TIMEOUT_S, "shm_bytes": SHARED_BYTES}
    pool = DecodePool(RULES, workers=1, resize=True, on_lost=lambda: LOST.append(None), **settings)
    yield pool
    runner.run(decoded(pool, GOOD))
    assert len(decoders() - before) == 1
    pool.stop()
    assert decoders() <= before, "stop() ends the processes"


def test_pixels_are_those_of_the_preprocessor(pool: DecodePool, runner: asyncio.Runner) -> None:
    for bounds in (None, PixelBounds(100 * 28 * 28, None)):
        pixels = runner.run(decoded(pool, GOOD, bounds))
        expected = Preprocessor(RULES).preprocess(GOOD, bounds)
        assert pixels.grid_thw == expected.grid_thw
        assert np.array_equal(pixels.values, expected.values)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"no image", "not an image"),
        (GOOD[:80], "truncated or corrupt"),
        (png(2001, 2000), "2001x2000 = 4002000 pixels, the limit is 4000000"),
    ],
)
def test_a_bad_image_is_an_image_error(pool: DecodePool, runner: asyncio.Runner, data: bytes, told: str) -> None:
    with pytest.raises(ImageError, match=told):
        runner.run(decoded(pool, data))


def test_a_bad_image_fails_alone(pool: DecodePool, runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        files = [GOOD, b"no image", GOOD]
        results = await asyncio.gather(*[decoded(pool, data) for data in files], return_exceptions=True)
        assert [isinstance(result, ImageError) for result in results] == [False, True, False]

    runner.run(scenario())


def test_callers_who_leave_cost_nothing(
    pool: DecodePool, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits is dropped. What is being decoded goes on: it could only be stopped with its process, and clients that
    hang up could keep all decoders restarting."""
    scheduled: list[bytes] = []
    decode = pool._decode

    def counted(data: bytes, bounds: PixelBounds | None, size: tuple[int, int]) -> Pixels | Decoded:
        scheduled.append(data)
        return decode(data, bounds, size)

    async def scenario() -> None:
        await decoded(pool, GOOD)
        before = decoders()
        monkeypatch.setattr(pool, "_decode", counted)
        leaving = [asyncio.create_task(decoded(pool, SLOW)) for _ in range(100)]
        await asyncio.sleep(0.05)
        for task in leaving:
            task.cancel()
        assert all(
            isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*leaving, return_exceptions=True)
        )
        assert (await decoded(pool, GOOD)).grid_thw[0] == 1
        assert scheduled == [SLOW, SLOW, GOOD], "one at work and one behind it"
        assert decoders() == before

    runner.run(scenario())


def test_an_image_that_takes_too_long_is_refused_and_the_pool_goes_on(pool: DecodePool, runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        both = await asyncio.gather(decoded(pool, TOO_SLOW), decoded(pool, GOOD), return_exceptions=True)
        slow, good = both
        assert isinstance(slow, ImageError)
        assert str(slow) == "decoding took longer than 3 s"
        assert not isinstance(good, BaseException)

    runner.run(scenario())


@pytest.fixture
def handed_over(pool: DecodePool, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the process has begun with an image."""
    begun, (decoder,) = threading.Event(), pool._workers.decoders
    hand_over = decoder._send_task

    def told(task: Task, stateless: bool) -> None:
        hand_over(task, stateless)
        begun.set()

    monkeypatch.setattr(decoder, "_send_task", told)
    return begun


@pytest.mark.parametrize("kills", [1, 2])
def test_a_decoder_killed_at_work_costs_one_retry(
    pool: DecodePool, runner: asyncio.Runner, handed_over: threading.Event, kills: int
) -> None:
    """As the kernel does when memory runs out. A file that two decoders did not survive is refused."""

    async def scenario() -> None:
        await decoded(pool, GOOD)
        before = len(LOST)
        handed_over.clear()
        job = asyncio.create_task(decoded(pool, TOO_SLOW))
        for _ in range(kills):
            assert await asyncio.to_thread(handed_over.wait, 60)
            (worker,) = decoders()
            handed_over.clear()
            worker.kill()
        killed_twice = "the file could not be decoded: its decoder process ended"
        with pytest.raises(ImageError, match=killed_twice if kills == 2 else "decoding took longer"):
            await job
        assert len(LOST) == before + 1
        assert (await decoded(pool, GOOD)).grid_thw[0] == 1
        assert worker not in decoders()

    runner.run(scenario())


def test_a_decoder_killed_while_idle_is_replaced(pool: DecodePool, runner: asyncio.Runner) -> None:
    """The death of an idle worker was once the end of its pool: every later image was answered with 500."""

    async def scenario() -> None:
        await decoded(pool, GOOD)
        (worker,) = decoders()
        worker.kill()
        results = await asyncio.gather(*[decoded(pool, GOOD) for _ in range(4)])  # before it was noticed
        assert all(result.grid_thw[0] == 1 for result in results)
        (worker,) = decoders()
        worker.kill()
        await asyncio.sleep(0.6)  # and after
        assert (await decoded(pool, GOOD)).grid_thw[0] == 1
        assert len(decoders()) == 1

    runner.run(scenario())


def test_a_decoder_that_cannot_be_started_is_no_fault_of_the_image(
    pool: DecodePool, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the system has no process or file left for it: every later image that drew this decoder was answered
    with 500, since a process that had never started could not be ended either."""

    def refused(_: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    async def scenario() -> None:
        await decoded(pool, GOOD)
        (worker,) = decoders()
        with monkeypatch.context() as patch:
            patch.setattr("multiprocessing.context.SpawnProcess.start", refused)
            worker.kill()
            for _ in range(2):
                with pytest.raises(WorkerEndedError):
                    await decoded(pool, GOOD)
        assert (await decoded(pool, GOOD)).grid_thw[0] == 1
        assert len(decoders()) == 1

    runner.run(scenario())


@pytest.mark.parametrize(
    "answers",
    [
        [b"[]"],
        [b'{"error": "' + b"x" * 100_000 + b'"}'],
        [b'{"shape": [3, -1, 4], "shared": false}', bytes(12)],
        [b'{"shape": [3, 2, 2], "shared": false}'],
    ],
    ids=["no object", "a long text", "a side below nothing", "no pixels"],
)
def test_a_decoder_that_answers_anything_costs_one_image(
    pool: DecodePool, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, answers: list[bytes]
) -> None:
    """As one that a file has taken over: its nonsense was a 500 and it went on decoding for others, what it sent was
    taken up to the last byte of memory, and who waited for the rest of it waited for ever."""
    (decoder,) = pool._workers.decoders

    async def scenario() -> None:
        await decoded(pool, GOOD)
        (worker,) = decoders()
        decoder._connection.close()
        decoder._connection, theirs = multiprocessing.Pipe()

        def hand_over(*_: object) -> None:
            for one in answers:
                theirs.send_bytes(one)

        with monkeypatch.context() as patch:
            patch.setattr(decoder, "_send_task", hand_over)
            with pytest.raises(ImageError):
                await decoded(pool, GOOD)
        assert (await decoded(pool, GOOD)).grid_thw[0] == 1
        assert worker not in decoders()

    runner.run(scenario())


def test_pixels_lie_in_shared_memory_until_nobody_holds_them(pool: DecodePool, runner: asyncio.Runner) -> None:
    assert freed(pool)
    pixels = runner.run(decoded(pool, GOOD))
    assert pool.arena.address <= pixels.values.ctypes.data < pool.arena.address + pool.arena.num_bytes
    tensor = torch.from_numpy(pixels.values)[:, :2]
    del pixels
    assert not freed(pool, patience_s=0.3), "a view of a view holds them too"
    del tensor
    assert freed(pool)


def test_without_room_pixels_come_through_the_pipe_and_are_counted(
    pool: DecodePool, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped: list[int] = []
    monkeypatch.setattr(pool, "_on_piped", lambda: piped.append(1))
    assert freed(pool)
    everything = pool.arena.allocate(SHARED_BYTES)
    assert everything is not None
    pixels = runner.run(decoded(pool, GOOD))
    assert np.array_equal(pixels.values, Preprocessor(RULES).preprocess(GOOD).values)
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
    assert np.array_equal(pixels.values, Preprocessor(RULES).preprocess(large).values)
    assert (neighbour == 77).all()


def test_a_killed_decoders_memory_is_free_again(
    pool: DecodePool, runner: asyncio.Runner, handed_over: threading.Event
) -> None:
    async def scenario() -> None:
        await decoded(pool, GOOD)
        (worker,) = decoders()
        handed_over.clear()
        job = asyncio.create_task(decoded(pool, TOO_SLOW))
        await asyncio.to_thread(handed_over.wait, 60)
        worker.kill()
        await asyncio.wait([job])
        assert isinstance(job.exception(), ImageError)

    runner.run(scenario())
    assert freed(pool)


def test_where_the_device_resizes_the_workers_only_decode(runner: asyncio.Runner) -> None:
    """They need no torch then, which is most of what a worker would take to start and in memory."""
    before = decoders()
    pool = DecodePool(RULES, workers=1, max_pixels=MAX_PIXELS, timeout_s=9, shm_bytes=SHARED_BYTES, resize=False)
    try:
        image = runner.run(decoded(pool, GOOD))
        assert isinstance(image, Decoded)
        assert image.values.shape == (60, 100, 3)
        assert np.array_equal(resize(image, RULES).values, Preprocessor(RULES).preprocess(GOOD).values)
        (worker,) = decoders() - before
        assert not any("libtorch" in mapped.path for mapped in worker.memory_maps())
        del image
        assert freed(pool)
        nearly_all = pool.arena.allocate(SHARED_BYTES - 4096)
        assert nearly_all is not None
        piped = runner.run(decoded(pool, png(300, 300)))
        assert isinstance(piped, Pixels), "what goes through the pipe is the smaller, resized image"
    finally:
        pool.stop()


OWNER = textwrap.dedent("""
    import asyncio, sys
    from deployments.encoder_replica.decode.pool import DecodePool
    from tests.unit.deployments.samples import RULES, png
    from tests.unit.deployments.encoder_replica.decode.test_pool import slow_bitmap

    async def main():
        pool = DecodePool(RULES, workers=2, max_pixels=10**6, timeout_s=60, shm_bytes=2**26, resize=False)
        images = await asyncio.gather(*[pool.decode(png(100, 60), None, (100, 60)) for _ in range(4)])
        print(*[decoder._process.pid for decoder in pool._workers.decoders], flush=True)
        slow = slow_bitmap(6_000_000)
        await asyncio.gather(*[pool.decode(slow, None, (30, 30)) for _ in range(4)])
        await asyncio.sleep(600)

    if __name__ == "__main__":
        asyncio.run(main())
""")


def test_nothing_is_left_of_an_owner_that_was_killed(tmp_path: Path) -> None:
    """No process, though it was decoding, and no shared memory: that has no name, and goes with the last process."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    named = set(Path("/dev/shm").iterdir())
    owner = subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(workers) == 2
    assert all(any("vitray-pixels" in mapped.path for mapped in worker.memory_maps()) for worker in workers)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    assert not [path.name for path in set(Path("/dev/shm").iterdir()) - named if "vitray" in path.name]


VIDEO_RULES = VideoRules("qwen2_vl", RULES, 2.0, 4, 768)
BOUNDS = VideoBounds(max_frames=40)


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
