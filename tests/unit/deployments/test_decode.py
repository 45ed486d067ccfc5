"""A real pool of decoder processes: what kills, stalls or leaves costs one image, and the pool goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from deployments.decode import DecodePool
from encoder.image_size import ImageError, PixelBounds
from encoder.preprocess import Preprocessor
from tests.unit.deployments.samples import RULES, png

TIMEOUT_S = 1.5
MAX_PIXELS = 4_000_000
GOOD = png(100, 60)


def plain_text_image(side: int) -> bytes:
    """Pillow reads this format in Python, hundreds of times as slowly as a PNG file."""
    return b"P3 %d %d 255\n" % (side, side) + b"7 7 7 " * side**2


SLOW, TOO_SLOW = plain_text_image(300), plain_text_image(2000)


def decoders() -> set[psutil.Process]:
    """The worker processes; the resource tracker, which Python starts beside them, is none."""
    return {child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """The one event loop that the pool is used from."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def pool(runner: asyncio.Runner) -> Iterator[DecodePool]:
    before = decoders()
    pool = DecodePool(RULES, workers=1, max_pixels=MAX_PIXELS, timeout_s=TIMEOUT_S)
    yield pool
    runner.run(pool.pixels(GOOD, None))
    assert len(decoders() - before) == 1
    pool.stop()
    assert decoders() <= before, "stop() ends the processes"


def test_pixels_are_those_of_the_preprocessor(pool: DecodePool, runner: asyncio.Runner) -> None:
    for bounds in (None, PixelBounds(100 * 28 * 28, None)):
        pixels = runner.run(pool.pixels(GOOD, bounds))
        expected = Preprocessor(RULES).pixels(GOOD, bounds)
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
        runner.run(pool.pixels(data, None))


def test_a_bad_image_fails_alone(pool: DecodePool, runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        files = [GOOD, b"no image", GOOD]
        results = await asyncio.gather(*[pool.pixels(data, None) for data in files], return_exceptions=True)
        assert [isinstance(result, ImageError) for result in results] == [False, True, False]

    runner.run(scenario())


def test_callers_who_leave_cost_nothing(
    pool: DecodePool, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits is dropped. What is being decoded goes on: it could only be stopped with its process, and clients that
    hang up could keep all decoders restarting."""
    scheduled: list[bytes] = []
    schedule = pool._pool.schedule

    def counted(*arguments: Any, **options: Any) -> Any:
        scheduled.append(options["args"][2])
        return schedule(*arguments, **options)

    async def scenario() -> None:
        await pool.pixels(GOOD, None)
        before = decoders()
        monkeypatch.setattr(pool._pool, "schedule", counted)
        leaving = [asyncio.create_task(pool.pixels(SLOW, None)) for _ in range(100)]
        await asyncio.sleep(0.05)
        for task in leaving:
            task.cancel()
        assert all(
            isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*leaving, return_exceptions=True)
        )
        assert (await pool.pixels(GOOD, None)).grid_thw[0] == 1
        assert scheduled == [SLOW, SLOW, GOOD], "one at work and one behind it"
        assert decoders() == before

    runner.run(scenario())


def test_an_image_that_takes_too_long_is_refused_and_the_pool_goes_on(pool: DecodePool, runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        slow, good = await asyncio.gather(pool.pixels(TOO_SLOW, None), pool.pixels(GOOD, None), return_exceptions=True)
        assert isinstance(slow, ImageError)
        assert str(slow) == "decoding took longer than 1.5 s"
        assert not isinstance(good, BaseException)

    runner.run(scenario())


def test_a_decoder_killed_at_work_fails_its_image_and_the_pool_goes_on(
    pool: DecodePool, runner: asyncio.Runner
) -> None:
    """As the kernel does when memory runs out."""

    async def scenario() -> None:
        await pool.pixels(GOOD, None)
        (worker,) = decoders()
        job = asyncio.create_task(pool.pixels(TOO_SLOW, None))
        await asyncio.sleep(0.5)
        worker.kill()
        with pytest.raises(ImageError, match="the decoder gave up on this image"):
            await job
        assert (await pool.pixels(GOOD, None)).grid_thw[0] == 1
        assert worker not in decoders()

    runner.run(scenario())


def test_a_decoder_killed_while_idle_is_replaced(pool: DecodePool, runner: asyncio.Runner) -> None:
    """pebble takes the death of an idle worker for the end of its pool: every later image was answered with 500."""

    async def scenario() -> None:
        await pool.pixels(GOOD, None)
        (worker,) = decoders()
        worker.kill()
        results = await asyncio.gather(*[pool.pixels(GOOD, None) for _ in range(4)])  # before it was noticed
        assert all(result.grid_thw[0] == 1 for result in results)
        (worker,) = decoders()
        worker.kill()
        await asyncio.sleep(0.6)  # and after
        assert (await pool.pixels(GOOD, None)).grid_thw[0] == 1
        assert len(decoders()) == 1

    runner.run(scenario())
