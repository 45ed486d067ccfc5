"""The digest tells apart what must be told apart; the cache holds its bound and counts."""

from __future__ import annotations

import io
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from encoder.cache import EmbeddingCache, image_digest
from encoder.image_load import to_rgb
from encoder.image_size import PixelBounds

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


def test_hits_misses_and_order_of_use() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(100)
    assert cache.get("a") is None
    assert cache.put("a", "A", 40)
    assert cache.put("b", "B", 40)
    assert cache.get("a") == "A"  # now b is the least recently used
    assert "b" in cache  # looking does not touch
    assert cache.put("c", "C", 40)
    assert ("a" in cache, "b" in cache, "c" in cache) == (True, False, True)
    counts = cache.counts
    assert (counts.hits, counts.misses, counts.evictions) == (1, 1, 1)
    assert (counts.num_entries, counts.num_bytes, counts.too_large) == (2, 80, 0)


def test_an_entry_over_the_bound_is_counted_and_displaces_nothing() -> None:
    cache: EmbeddingCache[bytes] = EmbeddingCache(100)
    cache.put("a", b"A", 100)
    assert not cache.put("b", b"B", 101)
    assert cache.get("a") == b"A"
    assert cache.get("b") is None
    assert (cache.counts.too_large, cache.counts.evictions, cache.counts.num_bytes) == (1, 0, 100)


def test_replacing_counts_its_new_size_once() -> None:
    cache: EmbeddingCache[int] = EmbeddingCache(100)
    cache.put("a", 1, 30)
    cache.put("b", 2, 60)
    cache.put("b", 3, 70)
    assert (cache.get("b"), len(cache), cache.counts.num_bytes, cache.counts.evictions) == (3, 2, 100, 0)
    cache.put("a", 4, 90)  # a itself is the least recently used, and b has to go
    assert (cache.get("a"), len(cache), cache.counts.num_bytes, cache.counts.evictions) == (4, 1, 90, 1)


def test_clear_keeps_the_counts() -> None:
    cache: EmbeddingCache[int] = EmbeddingCache(100)
    cache.put("a", 1, 30)
    cache.get("a")
    cache.clear()
    assert (cache.get("a"), len(cache), cache.counts.num_bytes) == (None, 0, 0)
    assert (cache.counts.hits, cache.counts.misses) == (1, 1)


def test_a_cache_of_no_bytes_stores_nothing() -> None:
    cache: EmbeddingCache[int] = EmbeddingCache(0)
    assert not cache.put("a", 1, 1)
    assert cache.get("a") is None


def test_keys_are_compared_whole() -> None:
    class Colliding(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return 7

        __eq__ = str.__eq__

    cache: EmbeddingCache[int] = EmbeddingCache(100)
    keys = [Colliding("f" * 63 + last) for last in "0123"]
    for number, key in enumerate(keys):
        cache.put(key, number, 1)
    assert [cache.get(key) for key in keys] == [0, 1, 2, 3]
    assert cache.get(Colliding("f" * 63)) is None


def test_errors_name_value_and_limit() -> None:
    with pytest.raises(ValueError, match="max_bytes is -1; it must be at least 0"):
        EmbeddingCache(-1)
    with pytest.raises(ValueError, match="num_bytes is -2; it must be at least 0"):
        EmbeddingCache[int](10).put("a", 1, -2)


@given(st.integers(0, 50), st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60)), max_size=60))
def test_bound_and_counts_hold_in_any_history(max_bytes: int, puts: list[tuple[str, int]]) -> None:
    cache: EmbeddingCache[int] = EmbeddingCache(max_bytes)
    new_keys = 0
    latest: dict[str, int] = {}
    for number, (key, num_bytes) in enumerate(puts):
        new = key not in cache
        if cache.put(key, number, num_bytes):
            new_keys += new
            latest[key] = number
            assert cache.get(key) == number
        assert cache.counts.num_bytes <= max_bytes
        assert new_keys - cache.counts.evictions == len(cache) == cache.counts.num_entries
    assert cache.counts.too_large == sum(num_bytes > max_bytes for _, num_bytes in puts)
    for key in latest:
        assert key not in cache or cache.get(key) == latest[key]
