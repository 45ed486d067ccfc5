"""Hostile and odd files on the way from the request to pixels: each is an image or a clear refusal that names it.

What is refused says nothing of our insides, a good image is decoded after each, and the decoder process is the same.
"""

from __future__ import annotations

import asyncio
import base64
import io
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from configs.schema import FetchConfig, IngressConfig
from deployments.common.api_error import ApiError
from deployments.encoder_replica.decode.memory_bound import MemoryLimitError, limit_memory
from deployments.encoder_replica.decode.pool import DecodePool
from deployments.ingress.fetch.fetcher import MediaFetcher
from deployments.ingress.http.image_parts import ImagePart
from encoder.images.size import ImageError
from tests.hostile import files
from tests.hostile.files import BMP, GIF, JPEG, PNG, TIFF, WEBP, chunk, encoded, picture, png_stating
from tests.unit.deployments.samples import IDENTITY, RULES, request_images

MEMORY_BYTES = 400_000_000
SHARED: Any = {"shm_bytes": 2**26, "resize": True}
INSIDES = re.compile(r"0x[0-9a-f]{4,}|/usr|/tmp|\.py|site-packages|Traceback|PIL|Pillow|object at|Error", re.IGNORECASE)
LIMITS = IngressConfig(max_image_pixels=4_000_000)


def frames(number: int, image_format: str, **options: Any) -> bytes:
    first, *rest = [picture(32, 32, seed) for seed in range(number)]
    return encoded(first, image_format, save_all=True, append_images=rest, **options)


def sixteen_bits() -> bytes:
    """RGB with 16 bits a sample, which Pillow cannot write."""
    rows = np.random.default_rng(0).integers(0, 256, (48, 1 + 64 * 6), dtype=np.uint8)
    rows[:, 0] = 0
    head = struct.pack(">IIBBBBB", 64, 48, 16, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(rows.tobytes()))
    return files.PNG_SIGNATURE + chunk(b"IHDR", head) + body + chunk(b"IEND")


def gif_of(width: int, height: int) -> bytes:
    return GIF[:6] + struct.pack("<HH", width, height) + GIF[10:]


def with_profile(profile: bytes) -> bytes:
    return encoded(picture(), "JPEG", icc_profile=profile)


# What is an image, odd as it may be: these are decoded.
IMAGES = {
    "cmyk": encoded(picture().convert("CMYK"), "JPEG"),
    "16 bit": sixteen_bits(),
    "16 bit grey": encoded(Image.fromarray(np.arange(3072, dtype=np.uint16).reshape(48, 64) * 20), "PNG"),
    "1 bit": encoded(picture().convert("1"), "PNG"),
    "palette": encoded(picture().quantize(7), "PNG"),
    "transparent": encoded(picture().convert("RGBA"), "PNG"),
    "progressive": encoded(picture(), "JPEG", progressive=True),
    "profile that is none": with_profile(b"no profile at all"),
    "large profile": with_profile(bytes(3_000_000)),
    "animated gif": frames(50, "GIF"),
    "animated png": frames(50, "PNG"),
    "animated webp": frames(50, "WEBP"),
    "1x1": encoded(picture(1, 1), "PNG"),
    "1x1 gif": encoded(picture(1, 1), "GIF"),
    "a gif whose frame is all that has a size": gif_of(0, 0),
    "1x200": encoded(picture(1, 200), "PNG"),
    "exif that is none": encoded(picture(), "JPEG", exif=b"Exif\0\0II*\0garbage"),
    "exif that leads to itself": encoded(picture(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\x08\0\0\0"),
    "exif with values that are not there": encoded(picture(), "JPEG", exif=b"Exif\0\0" + files.exif(100, 2**30)),
}
# What is refused, and what is said then.
REFUSED = {
    "nothing": (b"", "empty"),
    "text": (b"this is no image", "not an image of a supported format"),
    "html": (b"<html><body>404</body></html>", "not an image of a supported format"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'/>", "not an image of a supported format"),
    "pdf": (b"%PDF-1.7\n" + bytes(1000), "not an image of a supported format"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image of a supported format"),
    "pickle": (b"\x80\x04\x95" + bytes(100), "not an image of a supported format"),
    "tiff": (TIFF, "not an image of a supported format"),
    "plain text bitmap": (b"P3 9 9 255\n" + b"1 2 3 " * 81, "not an image of a supported format"),
    "icon": (encoded(picture(32, 32), "ICO"), "not an image of a supported format"),
    "signature alone": (PNG[:8], "truncated or corrupt|not an image"),
    "half a png": (PNG[: len(PNG) // 2], "truncated or corrupt"),
    "half a jpeg": (JPEG[: len(JPEG) // 2], "truncated or corrupt"),
    "half a gif": (GIF[: len(GIF) // 2], "truncated or corrupt"),
    "half a webp": (WEBP[: len(WEBP) // 2], "truncated or corrupt|not an image"),
    "half a bmp": (BMP[: len(BMP) // 2], "truncated or corrupt"),
    "a png with a hole": (PNG[:200] + bytes(200) + PNG[400:], "truncated or corrupt"),
    "a png of 0x0": (png_stating(0, 0), "truncated or corrupt|not an image|side"),
    "a png of 0x48": (png_stating(0, 48), "truncated or corrupt|not an image|side"),
    "a png of 2³¹x2³¹": (png_stating(2**31 - 1, 2**31 - 1), "pixels, the limit is"),
    "a png larger than its pixels": (png_stating(1000, 1000), "truncated or corrupt"),
    "a gif of 65535x65535": (gif_of(65535, 65535), "pixels, the limit is"),
    "a bomb in a few bytes": (encoded(Image.new("1", (60_000, 60_000)), "PNG"), "pixels, the limit is"),
    "a needle": (encoded(Image.new("1", (40_000, 1)), "PNG"), "over the largest side, 32768|aspect ratio"),
    "a long one": (encoded(Image.new("L", (5000, 10)), "PNG"), "aspect ratio 500, the limit is 200"),
    **{name: (data, "the limit is|of EXIF as text|not an image") for name, data in files.header_bombs(100_000).items()},
}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def pool(runner: asyncio.Runner) -> Iterator[DecodePool]:
    pool = DecodePool(
        RULES, workers=1, max_pixels=LIMITS.max_image_pixels, timeout_s=60, memory_bytes=MEMORY_BYTES, **SHARED
    )
    yield pool
    pool.workers.stop()


async def through(data: bytes, pool: DecodePool, limits: IngressConfig = LIMITS) -> str:
    """The size in patches, or what the client is told, from the door to the decoder."""
    fetcher = MediaFetcher(FetchConfig(), max_bytes=10**8)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    try:
        found = await request_images([ImagePart({}, url, "auto", "image 1 of 1")], None, IDENTITY, fetcher, limits)
        pixels = await pool.decode(found.jobs[0].data, None, found.jobs[0].size)
    except ApiError as error:
        return f"{error.status}, {error.message}"
    except ImageError as error:  # the replica names the image then: deployments/llm/deployment.py
        return str(error)
    finally:
        await fetcher.close()
    return str(pixels.grid_thw)


@pytest.mark.parametrize("name", IMAGES)
def test_an_odd_image_is_an_image(name: str, pool: DecodePool, runner: asyncio.Runner) -> None:
    assert runner.run(through(IMAGES[name], pool)).startswith("(1, ")


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_file_is_refused_and_told(name: str, pool: DecodePool, runner: asyncio.Runner) -> None:
    data, expected = REFUSED[name]
    told = runner.run(through(data, pool))
    assert told.startswith("400, image 1 of 1: ") or not re.match(r"\d", told), told
    assert re.search(expected, told), told
    assert not INSIDES.search(told), told
    assert runner.run(through(PNG, pool)).startswith("(1, ")


@pytest.mark.parametrize("name", ["animated gif", "animated png", "animated webp"])
def test_of_an_animation_the_first_frame_counts(name: str, pool: DecodePool, runner: asyncio.Runner) -> None:
    first = Image.open(io.BytesIO(IMAGES[name])).convert("RGB")
    still = runner.run(pool.decode(encoded(first, "PNG"), None, first.size))
    assert np.array_equal(runner.run(pool.decode(IMAGES[name], None, first.size)).values, still.values)


def test_nothing_is_kept_of_what_was_refused(pool: DecodePool, runner: asyncio.Runner) -> None:
    """Neither here nor in the decoder: memory is where it was after every hostile file, and the process is the same."""

    def resident() -> tuple[list[int], int]:
        family = [psutil.Process(), *psutil.Process().children()]
        return sorted(process.pid for process in family), sum(process.memory_info().rss for process in family)

    async def all_of_them() -> None:
        for data, _ in REFUSED.values():
            await through(data, pool)

    runner.run(all_of_them())
    processes, before = resident()
    for _ in range(3):
        runner.run(all_of_them())
    assert resident()[0] == processes
    assert resident()[1] < before + 30_000_000


def test_sides_are_bounded(pool: DecodePool, runner: asyncio.Runner) -> None:
    limits = LIMITS.model_copy(update={"min_image_side": 48, "max_image_side": 64})
    assert runner.run(through(PNG, pool, limits)).startswith("(1, ")
    small, large = encoded(picture(60, 47), "PNG"), encoded(picture(65, 50), "PNG")
    assert "image of 60x47 is under the least side, 48" in runner.run(through(small, pool, limits))
    assert "image of 65x50 is over the largest side, 64" in runner.run(through(large, pool, limits))


def test_formats_are_what_the_operator_allows(pool: DecodePool, runner: asyncio.Runner) -> None:
    limits = LIMITS.model_copy(update={"image_formats": ("TIFF", "JPEG")})
    assert runner.run(through(TIFF, pool, limits)).startswith("(1, ")
    assert runner.run(through(encoded(picture(), "MPO"), pool, limits)).startswith("(1, "), "a JPEG of a phone"
    assert "not an image of a supported format" in runner.run(through(PNG, pool, limits))


def test_what_a_type_or_a_name_says_does_not_count(pool: DecodePool, runner: asyncio.Runner) -> None:
    async def told() -> bytes:
        fetcher = MediaFetcher(FetchConfig(), max_bytes=10**6)
        url = "data:image/jpeg;name=a.jpg;base64," + base64.b64encode(PNG).decode()
        return await fetcher.fetch(url)

    assert runner.run(told()) == PNG


def test_memory_is_bounded_for_one_image(pool: DecodePool, runner: asyncio.Runner) -> None:
    """A file of kilobytes that becomes a hundred megabytes; the process that refuses it goes on."""

    async def scenario() -> None:
        small = DecodePool(RULES, workers=1, max_pixels=100_000_000, timeout_s=60, memory_bytes=60_000_000, **SHARED)
        try:
            bomb = encoded(Image.new("L", (9000, 9000)), "PNG")
            assert len(bomb) < 200_000
            with pytest.raises(ImageError, match=r"more than 60000000 bytes of memory, the limit|truncated or corrupt"):
                await small.decode(bomb, None, (9000, 9000))
            assert (await small.decode(PNG, None, (64, 48))).grid_thw[0] == 1
        finally:
            small.workers.stop()

    runner.run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="address space is bounded on Linux")
def test_the_bound_on_memory_holds_and_is_taken_back() -> None:
    """An allocation over it fails and one under it does not; afterwards everything goes again."""
    with limit_memory(200_000_000):
        bytearray(50_000_000)
    with pytest.raises(MemoryLimitError), limit_memory(200_000_000):
        bytearray(400_000_000)
    bytearray(400_000_000)
    with pytest.raises(RuntimeError, match="another"), limit_memory(200_000_000):
        raise RuntimeError("another")
