"""The cache of embeddings holds its bound and counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.cache import EmbeddingCache


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


def test_what_was_used_least_recently_can_be_dropped_for_somebody_else() -> None:
    cache: EmbeddingCache[int] = EmbeddingCache(100)
    cache.put("a", 1, 30)
    cache.put("b", 2, 30)
    cache.get("a")
    assert cache.drop_oldest()
    assert ("a" in cache, "b" in cache, cache.counts.evictions) == (True, False, 1)
    assert cache.drop_oldest()
    assert not cache.drop_oldest()
    assert (cache.counts.num_bytes, cache.counts.evictions) == (0, 2)


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
