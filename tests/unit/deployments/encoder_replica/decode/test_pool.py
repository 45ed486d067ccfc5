"""A real pool of decoder processes: a killed or stalled decoder costs one image, and the pool goes on."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from deployments.common.replica_errors import WorkerEndedError
from deployments.encoder_replica.decode.pool import DecodePool
from deployments.encoder_replica.decode.worker_process import DECODER_FAILED, Task
from encoder.images.decoded import Decoded
from encoder.images.size import ImageError, PixelBounds
from encoder.pixels.preprocess import Pixels
from tests.unit.deployments.encoder_replica.decode import taken_over
from tests.unit.deployments.encoder_replica.decode.pools import (
    GOOD,
    LOST,
    SLOW,
    TOO_SLOW,
    decoded,
    decoders,
    freed,
    one_decoder,
)
from tests.unit.deployments.encoder_replica.decode.taken_over import length, message
from tests.unit.deployments.samples import png

ROOT = Path(__file__).parents[5]


@pytest.fixture(scope="module")
def pool(runner: asyncio.Runner) -> Iterator[DecodePool]:
    with one_decoder(runner, resize=False) as pool:
        yield pool


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
    pool: DecodePool, runner: asyncio.Runner, handed_over: threading.Event, monkeypatch: pytest.MonkeyPatch
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
        handed_over.clear()
        leaving = [asyncio.create_task(decoded(pool, SLOW)) for _ in range(100)]
        assert await asyncio.to_thread(handed_over.wait, 60)
        for task in leaving:
            task.cancel()
        assert all(
            isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*leaving, return_exceptions=True)
        )
        assert (await decoded(pool, GOOD)).grid_thw[0] == 1
        assert scheduled == [SLOW, SLOW, GOOD], "one at work and one behind it"
        assert decoders() == before

    runner.run(scenario())


@pytest.fixture
def impatient(pool: DecodePool) -> None:
    """The limit of an image is short enough to be waited for."""
    pool._timeout_s = 3


@pytest.mark.usefixtures("impatient")
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
    begun, (decoder,) = threading.Event(), pool.workers.decoders
    hand_over = decoder._send_task

    def told(task: Task, stateless: bool) -> None:
        hand_over(task, stateless)
        begun.set()

    monkeypatch.setattr(decoder, "_send_task", told)
    return begun


@pytest.mark.usefixtures("impatient")
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
        assert len(LOST) == before + kills
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
            could_start = [pool.workers.can_start]
            for _ in range(3):
                with pytest.raises(WorkerEndedError):
                    await decoded(pool, GOOD)
                could_start.append(pool.workers.can_start)
        assert could_start == [True, True, True, False]
        assert (await decoded(pool, GOOD)).grid_thw[0] == 1
        assert pool.workers.can_start
        assert len(decoders()) == 1

    runner.run(scenario())


NO_PIXELS = message(b'{"shape": [3, 2, 2], "shared": false}')


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("sent", "drips", "told"),
    [
        (message(b"[]"), False, DECODER_FAILED),
        (message(b'{"error": "' + b"x" * 100_000 + b'"}'), False, DECODER_FAILED),
        (message(b'{"shape": [3, -1, 4], "shared": false}') + message(bytes(12)), False, DECODER_FAILED),
        (message(b'{"shape": [1e999, 1, 1], "shared": false}') + message(bytes(12)), False, DECODER_FAILED),
        (message(b"[" * 60_000), False, DECODER_FAILED),
        (NO_PIXELS, False, "longer than 3 s"),
        (b"", False, "longer than 3 s"),
        (length(100), False, "longer than 3 s"),
        (length(100), True, "longer than 3 s"),
        (NO_PIXELS + message(bytes(12))[:-1], False, "longer than 3 s"),
    ],
    ids=[
        "no object",
        "a long text",
        "a side below nothing",
        "a side without end",
        "nested",
        "no pixels",
        "nothing",
        "a length",
        "drips",
        "not all",
    ],
)
def test_a_decoder_that_answers_anything_costs_one_image(
    pool: DecodePool, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, sent: bytes, drips: bool, told: str
) -> None:
    """As one that a file has taken over: its nonsense was a 500 and it went on decoding for others, what it sent was
    taken up to the last byte of memory, and who waited for the rest of it waited for ever."""
    (decoder,) = pool.workers.decoders

    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "_serve", taken_over.serve)
            patch.setattr(decoder, "_settings", (sent, drips))
            decoder._restart()
        (worker,) = decoders()
        with pytest.raises(ImageError, match=told):
            await decoded(pool, GOOD)
        assert (await decoded(pool, GOOD)).grid_thw[0] == 1
        assert worker not in decoders()

    runner.run(scenario())


def test_a_decoder_that_takes_no_task_is_replaced(
    pool: DecodePool, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is larger than the pipe's buffer was written for as long as the process was stopped."""
    file = io.BytesIO()
    Image.frombytes("RGB", (600, 400), os.urandom(720_000)).save(file, "PNG")
    (decoder,) = pool.workers.decoders
    restart, start_timeout_s = decoder._restart, decoder._start_timeout_s

    def restart_patiently() -> None:
        monkeypatch.setattr(decoder, "_start_timeout_s", start_timeout_s)
        restart()

    async def scenario() -> None:
        await decoded(pool, GOOD)
        (worker,) = decoders()
        worker.suspend()
        monkeypatch.setattr(decoder, "_start_timeout_s", 1.0)
        monkeypatch.setattr(decoder, "_restart", restart_patiently)
        assert (await decoded(pool, file.getvalue())).grid_thw[0] == 1
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


@pytest.mark.usefixtures("impatient")
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


OWNER = textwrap.dedent("""
    import asyncio, sys
    from deployments.encoder_replica.decode.pool import DecodePool
    from tests.unit.deployments.encoder_replica.decode.pools import slow_bitmap
    from tests.unit.deployments.samples import RULES, png

    async def main():
        pool = DecodePool(RULES, workers=2, max_pixels=10**6, timeout_s=60, shm_bytes=2**26, resize=False)
        images = await asyncio.gather(*[pool.decode(png(100, 60), None, (100, 60)) for _ in range(4)])
        print(*[decoder._process.pid for decoder in pool.workers.decoders], flush=True)
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
    _, alive = psutil.wait_procs(workers, timeout=600)
    assert not alive
    assert not [path.name for path in set(Path("/dev/shm").iterdir()) - named if "vitray" in path.name]
