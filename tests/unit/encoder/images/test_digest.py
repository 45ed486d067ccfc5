"""The digest tells apart what must be told apart."""

from __future__ import annotations

import io
from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from encoder.images.identity import image_digest
from encoder.images.load import to_rgb
from encoder.images.size import PixelBounds

BASE: dict[str, Any] = {
    "data": b"image",
    "rules_version": "1",
    "bounds": None,
    "numerics": "bfloat16",
    "weights": "w" * 64,
    "salt": None,
}


def digest(**changed: Any) -> str:
    return image_digest(**{**BASE, **changed})


def test_digest_is_256_bits_and_repeatable() -> None:
    assert len(digest()) == 64
    assert set(digest()) <= set("0123456789abcdef")
    assert digest() == digest()
    assert digest(bounds=PixelBounds()) == digest(bounds=None)  # both ask for nothing


def test_every_field_decides() -> None:
    """All of these were one key in some cache of images: other bounds, other dtype, other weights, another tenant."""
    variants = {
        "base": digest(),
        "data": digest(data=b"imagf"),
        "data longer": digest(data=b"image\0"),
        "rules": digest(rules_version="2"),
        "numerics": digest(numerics="float32"),
        "weights": digest(weights="v" * 64),
        "min": digest(bounds=PixelBounds(min_pixels=4096)),
        "max": digest(bounds=PixelBounds(max_pixels=4096)),
        "min and max": digest(bounds=PixelBounds(4096, 4096)),
        "empty salt": digest(salt=""),
        "salt": digest(salt="tenant"),
        "salt that reads like the mark of absence": digest(salt="-"),
        "other tenant": digest(salt="tenant2"),
        "raw pixels": digest(shape=(1, 1)),
    }
    for (one, a), (other, b) in combinations(variants.items(), 2):
        assert a != b, (one, other)


def test_fields_do_not_run_into_each_other() -> None:
    """Joining fields without their lengths gives one key to different requests."""
    assert digest(numerics="ab", weights="c") != digest(numerics="a", weights="bc")
    assert digest(weights="a", salt="bc") != digest(weights="ab", salt="c")
    assert digest(salt="x", data=b"yz") != digest(salt="xy", data=b"z")
    assert digest(salt=None, data=b"+1:x") != digest(salt="x", data=b"")
    assert digest(salt="1", data=b"") != digest(salt="", data=b"1")


@given(*[st.text(max_size=6)] * 6)
def test_different_fields_give_different_digests(a: str, b: str, c: str, d: str, e: str, f: str) -> None:
    one = image_digest(b"", rules_version="", bounds=None, numerics=a, weights=b, salt=c)
    other = image_digest(b"", rules_version="", bounds=None, numerics=d, weights=e, salt=f)
    assert (one == other) == ((a, b, c) == (d, e, f))


def test_raw_pixels_of_another_shape() -> None:
    """30x150 and 150x30 of the same bytes were one key elsewhere."""
    pixels = bytes(30 * 150 * 3)
    assert digest(data=pixels, shape=(30, 150)) != digest(data=pixels, shape=(150, 30))


def test_palette_and_orientation_reach_the_digest() -> None:
    """Palette images with the same indices, and images that only EXIF turns, were one key elsewhere."""
    red, blue = Image.new("P", (4, 2)), Image.new("P", (4, 2))
    red.putpalette([255, 0, 0])
    blue.putpalette([0, 0, 255])
    upright = Image.new("RGB", (2, 2))
    upright.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 3
    turned = io.BytesIO()
    upright.save(turned, "PNG", exif=exif)
    images = [red, blue, upright, Image.open(turned)]
    rgbs = [to_rgb(image) for image in images]
    assert len({digest(data=rgb.tobytes(), shape=rgb.size) for rgb in rgbs}) == len(images)
