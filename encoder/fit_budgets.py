"""The budgets that pad a known traffic least: a pure function of what batches held.

It must not know images, graphs or files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

# Of more different sizes, neighbours are put together first.
MOST_SIZES = 256
# Rows of a graph are patches: multiples of 16 of them keep kernels on their fast paths.
STEP = 4


def fit_budgets(
    wanted: Mapping[int, int],
    count: int,
    *,
    cost: Callable[[int], float] = float,
    step: int = STEP,
    most_sizes: int = MOST_SIZES,
) -> tuple[int, ...]:
    """The `count` budgets, or fewer, that carry the batches at the least total cost; ascending.

    Args:
        wanted: tokens of a batch, and how many such batches there were.
        cost: of running a batch in a budget, not falling with the budget; padding counts alone by default.
        step: budgets are multiples of it.
        most_sizes: exact up to so many different sizes; the time grows with their square.

    A batch runs in the smallest budget that holds it, so an optimal budget is one of the batches' own sizes, and the
    best k for the batches up to one size follow from the best k - 1 up to a smaller one.
    """
    if count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")
    sizes, counts = _sizes(wanted, step, most_sizes)
    if not sizes:
        return ()
    before = [0]
    for number in counts:
        before.append(before[-1] + number)
    costs = [cost(size) for size in sizes]
    # best[j]: least cost of the first j sizes with the budgets so far; cuts[k][j]: where the last budget begins.
    best = [0.0] + [costs[end - 1] * before[end] for end in range(1, len(sizes) + 1)]
    cuts = [[0] * (len(sizes) + 1)]
    for _ in range(1, min(count, len(sizes))):
        following, cut = list(best), [0] * (len(sizes) + 1)
        for end in range(1, len(sizes) + 1):
            price, number = costs[end - 1], before[end]
            values = [best[start] + price * (number - before[start]) for start in range(end)]
            cut[end] = min(range(end), key=values.__getitem__)
            following[end] = values[cut[end]]
        best = following
        cuts.append(cut)
    chosen, end = [], len(sizes)
    for cut in reversed(cuts):
        if end == 0:
            break
        chosen.append(sizes[end - 1])
        end = cut[end]
    return tuple(reversed(chosen))


def _sizes(wanted: Mapping[int, int], step: int, most: int) -> tuple[list[int], list[int]]:
    rounded: Counter[int] = Counter()
    for size, number in wanted.items():
        if number > 0:
            rounded[-(-size // step) * step] += number
    while len(rounded) > most:
        step *= 2
        coarser: Counter[int] = Counter()
        for size, number in rounded.items():
            coarser[-(-size // step) * step] += number
        rounded = coarser
    sizes = sorted(rounded)
    return sizes, [rounded[size] for size in sizes]
