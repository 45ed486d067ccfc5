"""Images that others have taken for one another, through the door: each has an embedding, and a digest, of its own.

That caches hold under a digest what was encoded for it is tested with the encoder replica; here it is that no two
images that look different share a digest, and that tenants share none.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from configs.schema import FetchConfig, IngressConfig
from deployments.ingress.fetch.fetcher import MediaFetcher
from deployments.ingress.http.image_parts import ImagePart
from encoder.images.load import load_rgb
from encoder.images.size import PixelBounds
from tests.hostile import attack_server as attacks
from tests.hostile.attack_server import Names
from tests.hostile.files import encoded, picture
from tests.unit.deployments.ingress.fetch.loopback import answer
from tests.unit.deployments.samples import IDENTITY, request_images


def data_url(data: bytes) -> str:
    return "data:;base64," + base64.b64encode(data).decode()


def digests(
    *files: bytes, bounds: PixelBounds | None = None, salt: str | None = None, details: tuple[str, ...] = ("auto",)
) -> list[str]:
    """Of each file at each detail, as the ingress makes them."""
    parts = [ImagePart({}, data_url(data), detail, "image") for data in files for detail in details]

    async def scenario() -> list[str]:
        fetcher = MediaFetcher(FetchConfig(), max_bytes=10**7)
        limits = IngressConfig(low_detail_max_pixels=28 * 28)
        found = await request_images(parts, bounds, IDENTITY, fetcher, limits, salt=salt)
        await fetcher.close()
        return [found.jobs[job].digest for job in found.job_of_part]

    return asyncio.run(scenario())


def seen(data: bytes) -> tuple[tuple[int, int], bytes]:
    image = load_rgb(data)
    return image.size, image.tobytes()


def rotated(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture(90, 60), "PNG", exif=exif)


def palette(*colours: int) -> bytes:
    image = Image.fromarray((np.arange(64 * 64) % 2).reshape(64, 64).astype(np.uint8), "L")
    image.putpalette(bytes(colours))
    return encoded(image, "PNG")


COLLISIONS = {
    "the same samples in another shape": [
        encoded(Image.new("RGB", size, "red"), image_format)
        for size in ((30, 150), (150, 30))
        for image_format in ("PNG", "BMP")
    ],
    "the same indices in another palette": [palette(0, 0, 0, 255, 0, 0), palette(0, 0, 0, 0, 0, 255)],
    "the same pixels turned by EXIF": [rotated(orientation) for orientation in range(1, 9)],
    "the same colours, another transparency": [
        encoded(Image.new("RGBA", (64, 64), (9, 9, 9, alpha)), "PNG") for alpha in (0, 128, 255)
    ],
    "the same first frame, another after it": [
        encoded(picture(64, 64), "GIF", save_all=True, append_images=[picture(64, 64, seed)]) for seed in (1, 2)
    ],
    "one file and the same with more behind it": [encoded(picture(), "PNG"), encoded(picture(), "PNG") + b"\0"],
}


@pytest.mark.parametrize("name", COLLISIONS)
def test_no_two_share_a_digest(name: str) -> None:
    found = digests(*COLLISIONS[name])
    assert len(set(found)) == len(COLLISIONS[name])


@pytest.mark.parametrize(
    ("name", "hash_of"),
    [
        ("the same samples in another shape", lambda image: image.convert("RGB").tobytes()),
        ("the same indices in another palette", lambda image: (image.size, image.tobytes())),
        ("the same pixels turned by EXIF", lambda image: (image.size, image.tobytes())),
        ("the same colours, another transparency", lambda image: (image.size, image.convert("RGB").tobytes())),
    ],
)
def test_hashes_of_pixels_as_they_are_often_made_do_share(name: str, hash_of: object) -> None:
    """While what is seen differs: the collisions are real."""
    files = COLLISIONS[name]
    assert callable(hash_of)
    hashes = [hash_of(Image.open(BytesIO(data))) for data in files]
    confused = [
        (one, other)
        for one, other in itertools.combinations(range(len(files)), 2)
        if hashes[one] == hashes[other] and seen(files[one]) != seen(files[other])
    ]
    assert confused


def test_how_an_image_is_read_is_part_of_it() -> None:
    """The same file at another detail or within other bounds has another embedding."""
    file = encoded(picture(300, 200), "PNG")
    found = [
        *digests(file, details=("auto", "low")),
        *digests(file, bounds=PixelBounds(None, 100 * 100)),
        *digests(file, bounds=PixelBounds(100 * 100, None)),
        *digests(file, bounds=PixelBounds(100 * 100, 200 * 200)),
    ]
    assert len(set(found)) == len(found)
    assert digests(file, details=("auto", "high"))[0] == digests(file, details=("high",))[0]


def test_tenants_share_nothing() -> None:
    file = encoded(picture(), "PNG")
    found = [digests(file, salt=salt)[0] for salt in (None, "", "a", "b", "ab")]
    assert len(set(found)) == len(found)


def test_a_url_is_no_name_for_what_is_behind_it() -> None:
    """Caches by URL hand out yesterday's image, or another tenant's: the bytes count, whatever their address was."""

    async def scenario() -> None:
        first, second = encoded(picture(seed=1), "PNG"), encoded(picture(seed=2), "PNG")
        served = [first, second, first]

        async def respond(head: str, writer: asyncio.StreamWriter) -> None:
            await answer(served.pop(0))(head, writer)

        async with attacks.network(public=respond) as network:
            fetcher = MediaFetcher(
                FetchConfig(http=True), max_bytes=10**6, resolve=Names(a_example=[[attacks.PUBLIC]]), network=network
            )
            part = ImagePart({}, "http://a.example/image.png", "auto", "image")
            jobs = [await request_images([part], None, IDENTITY, fetcher, IngressConfig()) for _ in range(3)]
            found = [images.jobs[0].digest for images in jobs]
            await fetcher.close()
        assert found == [IDENTITY.digest(data, None) for data in (first, second, first)]
        assert len(set(found)) == 2

    asyncio.run(scenario())
