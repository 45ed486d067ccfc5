"""A real pool of decoder processes: what kills, stalls or leaves costs one image, and the pool goes on."""

from __future__ import annotations

import asyncio
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
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from deployments.common.replica_errors import WorkerEndedError
from deployments.encoder_replica.decode.pool import DecodePool
from deployments.encoder_replica.decode.worker_process import Task
from encoder.images.decoded import Decoded
from encoder.images.size import ImageError, PixelBounds, read_header
from encoder.pixels.preprocess import Pixels, Preprocessor, resize
from tests.unit.deployments.samples import RULES, png

ROOT = Path(__file__).parents[5]
TIMEOUT_S = 3
MAX_PIXELS = 4_000_000
SHARED_BYTES = 2**20
GOOD = png(100, 60)


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
    pool = DecodePool(RULES, workers=1, max_pixels=MAX_PIXELS, timeout_s=TIMEOUT_S, shm_bytes=SHARED_BYTES, resize=True)
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
    begun, (decoder,) = threading.Event(), pool._decoders
    hand_over = decoder._send_task

    def told(task: Task) -> None:
        hand_over(task)
        begun.set()

    monkeypatch.setattr(decoder, "_send_task", told)
    return begun


def test_a_decoder_killed_at_work_fails_its_image_and_the_pool_goes_on(
    pool: DecodePool, runner: asyncio.Runner, handed_over: threading.Event
) -> None:
    """As the kernel does when memory runs out."""

    async def scenario() -> None:
        await decoded(pool, GOOD)
        (worker,) = decoders()
        handed_over.clear()
        job = asyncio.create_task(decoded(pool, TOO_SLOW))
        await asyncio.to_thread(handed_over.wait, 60)
        worker.kill()
        with pytest.raises(ImageError, match="the image could not be decoded: its decoder process ended"):
            await job
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
    (decoder,) = pool._decoders

    async def scenario() -> None:
        await decoded(pool, GOOD)
        (worker,) = decoders()
        decoder._connection.close()
        decoder._connection, theirs = multiprocessing.Pipe()

        def hand_over(_: object) -> None:
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
        print(*[decoder._process.pid for decoder in pool._decoders], flush=True)
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
