"""Values are made once while they are among those used last, the bound holds, and hits are counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from encoder.pixels.byte_lru import ByteLru


def test_what_was_used_longest_ago_goes_first() -> None:
    made: list[int] = []

    def make(key: int) -> int:
        made.append(key)
        return key

    recent: ByteLru[int, int] = ByteLru(make, lambda value: 40, 100)
    assert [recent.get(key) for key in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]
    assert (recent.hits, recent.misses, recent.held_bytes) == (2, 4, 80)
    assert (1 in recent, 3 in recent) == (True, False)


def test_a_value_over_the_bound_is_made_each_time_and_displaces_nothing() -> None:
    recent: ByteLru[int, int] = ByteLru(lambda key: key, lambda value: value, 100)
    for key in (60, 101, 101, 60):
        assert recent.get(key) == key
    assert (recent.hits, recent.misses, recent.held_bytes) == (1, 3, 60)


@given(st.lists(st.integers(1, 60), max_size=80), st.integers(1, 120))
def test_the_bound_holds_in_any_history(keys: list[int], max_bytes: int) -> None:
    recent: ByteLru[int, int] = ByteLru(lambda key: key, lambda value: value, max_bytes)
    for key in keys:
        assert recent.get(key) == key
        assert recent.held_bytes <= max_bytes
    assert recent.hits + recent.misses == len(keys)
