"""The cache of embeddings holds its bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.encoder_replica.embedding_cache import EmbeddingCache


class Value:
    def __init__(self, name: str) -> None:
        self.name = name


def test_what_was_used_last_is_kept() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(100)
    assert cache.get("a") is None
    cache.put("a", "A", 40)
    cache.put("b", "B", 40)
    assert cache.get("a") == "A"  # now b is the least recently used
    assert "b" in cache  # looking does not touch
    cache.put("c", "C", 40)
    assert ("a" in cache, "b" in cache, "c" in cache) == (True, False, True)
    assert (len(cache), cache.num_bytes) == (2, 80)


def test_an_entry_over_the_bound_displaces_nothing() -> None:
    cache: EmbeddingCache[bytes] = EmbeddingCache(100)
    cache.put("a", b"A", 100)
    cache.put("b", b"B", 101)
    assert cache.get("a") == b"A"
    assert cache.get("b") is None
    assert cache.num_bytes == 100


def test_replacing_counts_its_new_size_once() -> None:
    cache: EmbeddingCache[int] = EmbeddingCache(100)
    cache.put("a", 1, 30)
    cache.put("b", 2, 60)
    cache.put("b", 3, 70)
    assert (cache.get("b"), len(cache), cache.num_bytes) == (3, 2, 100)
    cache.put("a", 4, 90)  # a itself is the least recently used, and b has to go
    assert (cache.get("a"), len(cache), cache.num_bytes) == (4, 1, 90)


def test_what_was_used_least_recently_can_be_dropped_for_somebody_else() -> None:
    cache: EmbeddingCache[Value] = EmbeddingCache(100)
    cache.put("a", Value("A"), 30)
    cache.put("b", Value("B"), 30)
    cache.get("a")
    assert not cache.evict_oldest(lambda _: False)
    assert cache.evict_oldest(lambda _: True)
    assert ("a" in cache, "b" in cache) == (True, False)
    cache.put("c", Value("C"), 30)
    assert cache.evict_oldest(lambda value: value.name == "C")
    assert ("a" in cache, "c" in cache) == (True, False)
    assert cache.evict_oldest(lambda _: True)
    assert not cache.evict_oldest(lambda _: True)
    assert cache.num_bytes == 0


def test_what_is_referred_to_elsewhere_is_not_dropped_for_somebody_else() -> None:
    cache: EmbeddingCache[Value] = EmbeddingCache(100)
    held = Value("A")
    cache.put("a", held, 30)
    assert not cache.evict_oldest(lambda _: True)
    cache.put("b", Value("B"), 30)
    assert cache.evict_oldest(lambda _: True)
    assert (cache.get("a"), "b" in cache, cache.num_bytes) == (held, False, 30)
    del held
    assert cache.evict_oldest(lambda _: True)
    assert len(cache) == 0


def test_a_cache_of_no_bytes_stores_nothing() -> None:
    cache: EmbeddingCache[int] = EmbeddingCache(0)
    cache.put("a", 1, 1)
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


@given(st.integers(0, 50), st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60)), max_size=60))
def test_the_bound_holds_in_any_history(max_bytes: int, puts: list[tuple[str, int]]) -> None:
    cache: EmbeddingCache[int] = EmbeddingCache(max_bytes)
    latest: dict[str, int] = {}
    for number, (key, num_bytes) in enumerate(puts):
        cache.put(key, number, num_bytes)
        if num_bytes <= max_bytes:
            latest[key] = number
            assert cache.get(key) == number
        assert cache.num_bytes <= max_bytes
    for key in latest:
        assert key not in cache or cache.get(key) == latest[key]
