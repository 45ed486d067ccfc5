"""Fitted budgets are the best there are."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.fit_budgets import MOST_SIZES, fit_budgets


def total(wanted: dict[int, int], budgets: tuple[int, ...]) -> int:
    return sum(number * next(b for b in budgets if b >= size) for size, number in wanted.items())


@given(st.dictionaries(st.integers(1, 60), st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 8))
def test_no_other_budgets_pad_less(wanted: dict[int, int], count: int) -> None:
    found = fit_budgets(wanted, count, step=1)
    assert list(found) == sorted(set(found))
    assert 1 <= len(found) <= count
    others = [(*some, max(wanted)) for number in range(count) for some in combinations(sorted(wanted)[:-1], number)]
    assert total(wanted, found) == min(total(wanted, other) for other in others)


def test_budgets_are_multiples_of_the_step_and_hold_every_batch() -> None:
    found = fit_budgets({785: 3, 49: 10, 1001: 1}, 2)
    assert found == (52, 1004)
    assert fit_budgets({785: 3, 49: 10, 1001: 1}, 9) == (52, 788, 1004)


def test_a_cost_of_a_batch_decides() -> None:
    """Where a graph takes the same time up to 64 tokens, a budget below buys nothing."""
    wanted = {8: 100, 64: 1, 128: 1}
    assert fit_budgets(wanted, 2) == (8, 128)
    assert fit_budgets({**wanted, 64: 40}, 2, cost=lambda budget: max(budget, 64)) == (64, 128)


def test_many_sizes_are_fitted_in_reasonable_work() -> None:
    wanted = dict.fromkeys(range(1, 9000, 3), 1)
    found = fit_budgets(wanted, 23)
    assert len(found) == 23
    assert len(wanted) > MOST_SIZES
    assert found[-1] >= max(wanted)
    assert total(wanted, found) / sum(wanted) < 1.06


def test_nothing_wanted_needs_nothing_and_a_count_of_none_is_refused() -> None:
    assert fit_budgets({}, 3) == ()
    assert fit_budgets({5: 0}, 3) == ()
    with pytest.raises(ValueError, match="count is 0; it must be at least 1"):
        fit_budgets({5: 1}, 0)
