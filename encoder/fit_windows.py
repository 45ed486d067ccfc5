"""Budgets under which `plan` takes the least measured time for windows of images that wait together.

A pure function of token counts and measured times. It must not know of torch, graphs, or where the counts were seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

from encoder.fit_budgets import fit_budgets
from encoder.packing import Batch
from encoder.planning import CostTable, ImageCost, plan

STEP = 16
"""Budgets are multiples of so many tokens: 64 patches, which kernels' blocks divide."""


def fit_to_windows(
    windows: Sequence[Sequence[ImageCost]],
    *,
    count: int,
    largest: int,
    table: Callable[[tuple[int, ...]], CostTable],
    max_images: int,
    max_tokens: int,
    rounds: int = 4,
) -> tuple[int, ...]:
    """At most `count` budgets up to `largest` under which `plan` takes little time for all `windows`: the least found.

    Which images go together depends on the budgets, and which budgets are best on what goes together: so budgets are
    fitted to the batches that `plan` makes of them, `rounds` times over, from two beginnings, and the best ones are
    kept. `table` gives the measured times for any budgets. `max_images`, `max_tokens`: see `plan`.

    Raises:
        ValueError: `largest` is not a positive multiple of `STEP`, or `count` is under 1.
    """
    if largest < STEP or largest % STEP or count < 1:
        raise ValueError(f"largest is {largest} and count {count}; they must be a multiple of {STEP} and at least 1")
    if not any(windows):
        return ()
    rows = table(tuple(range(STEP, largest + 1, STEP))).replay_ms
    # Where a measured time falls with the budget, which is noise, the largest so far counts.
    prices = dict(zip((budget for budget, _ in rows), accumulate((ms for _, ms in rows), max), strict=True))

    def fit(sums: Sequence[int]) -> tuple[int, ...]:
        found = fit_budgets(Counter(sums), count, cost=lambda budget: prices[min(budget, largest)], step=STEP)
        return tuple(sorted({min(budget, largest) for budget in found}))

    parts: list[int] = []
    for window in windows:
        tokens = sum(image.num_tokens for image in window if image.num_tokens <= largest)
        number = -(-tokens // largest)
        parts += [-(-tokens // number)] * number if number else []
    even = tuple(sorted({max(STEP, round(largest * (k + 1) / count / STEP) * STEP) for k in range(count)}))
    best: tuple[float, tuple[int, ...]] = (float("inf"), ())
    for beginning in (fit(parts), even):
        budgets = beginning
        for _ in range(rounds):
            costs = table(budgets)
            batches = [plan(window, table=costs, max_images=max_images, max_tokens=max_tokens) for window in windows]
            ms = sum(costs.total_ms(window, made) for window, made in zip(windows, batches, strict=True))
            best = min(best, (ms, budgets))
            sums = [tokens for w, made in zip(windows, batches, strict=True) for tokens in _sums(w, made, largest)]
            if not sums:
                break  # every image is over the largest budget
            budgets = fit(sums)
    return best[1]


def _sums(window: Sequence[ImageCost], batches: Sequence[Batch], largest: int) -> list[int]:
    totals = [sum(window[index].num_tokens for index in batch.indices) for batch in batches]
    return [total for total in totals if total <= largest]
