"""Budgets fitted to windows: never worse than even ones, and within their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.fit_windows import STEP, fit_to_windows
from encoder.planning import CostTable, ImageCost, plan


def replay_ms(budget: int) -> float:
    return 1.0 + budget / 100


def table(budgets: tuple[int, ...]) -> CostTable:
    return CostTable(tuple((b, replay_ms(b)) for b in budgets), eager_ms=((64, 5.0), (16384, 170.0)), work_ms=0.0)


def test_no_images_are_no_budgets() -> None:
    assert fit_to_windows([[], []], count=4, largest=64, table=table, max_images=4, max_tokens=64) == ()


def test_a_window_that_comes_again_and_again_has_a_budget_of_its_own() -> None:
    windows = [[ImageCost(100, 0.0), ImageCost(124, 0.0)]] * 9 + [[ImageCost(480, 0.0)]]
    assert fit_to_windows(windows, count=2, largest=512, table=table, max_images=8, max_tokens=512) == (224, 480)


def test_a_time_that_falls_is_noise() -> None:
    def noisy(budgets: tuple[int, ...]) -> CostTable:
        return CostTable(tuple((b, 9.0 if b == 32 else 1 + b / 100) for b in budgets), ((64, 50.0),), 0.0)

    windows = [[ImageCost(30, 0.0)], [ImageCost(60, 0.0)]]
    assert 64 in fit_to_windows(windows, count=2, largest=128, table=noisy, max_images=8, max_tokens=512)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=8), min_size=1, max_size=5), st.integers(1, 4))
def test_windows_are_no_slower_than_under_even_budgets(counts: list[list[int]], count: int) -> None:
    windows = [[ImageCost(tokens, 0.0) for tokens in window] for window in counts]
    largest = 512
    even = tuple(sorted({max(STEP, round(largest * (k + 1) / count / STEP) * STEP) for k in range(count)}))
    fitted = fit_to_windows(windows, count=count, largest=largest, table=table, max_images=8, max_tokens=2048)

    def total(budgets: tuple[int, ...]) -> float:
        made = [plan(window, table=table(budgets), max_images=8, max_tokens=2048) for window in windows]
        return sum(table(budgets).total_ms(window, batches) for window, batches in zip(windows, made, strict=True))

    assert len(fitted) <= count
    assert max(fitted) <= largest
    assert total(fitted) <= total(even) + 1e-9


def test_images_over_the_largest_budget_are_left_to_eager_runs() -> None:
    windows = [[ImageCost(900, 0.0)], [ImageCost(60, 0.0), ImageCost(4, 0.0)]]
    assert fit_to_windows(windows, count=2, largest=64, table=table, max_images=4, max_tokens=64)[-1] == 64


@pytest.mark.parametrize(("largest", "count"), [(100, 2), (0, 2), (64, 0)])
def test_bounds_that_cannot_be_are_refused(largest: int, count: int) -> None:
    with pytest.raises(ValueError, match="largest is"):
        fit_to_windows([], count=count, largest=largest, table=table, max_images=4, max_tokens=64)
