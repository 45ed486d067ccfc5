"""Which graphs there are to capture: the budgets, and the bounds on an image's length that attention tells apart.

Pure Python. It must not know how graphs are captured or timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from encoder.graph_inputs import GraphKey

EAGER_BUDGETS = (2048, 4096, 8192, 13824)
"""Bounds of batches where nothing is captured."""

SMALLEST, LARGEST = 64, 8192
# Up to so many tokens, steps of so many: finest where a batch is common, takes long enough for padding to show, and is
# too short for its launches to hide behind it.
_STEPS = ((128, 16), (256, 32), (512, 64), (1024, 64), (2048, 128), (4096, 512), (LARGEST, 2048))


def default_budgets() -> tuple[int, ...]:
    """35 from 64 to 8192 tokens: an image of 256² for Qwen3-VL, and eight of 1024²."""
    found = [SMALLEST]
    for bound, step in _STEPS:
        found += range(found[-1] + step, bound + 1, step)
    return tuple(found)


def resolved_budgets(chosen: Literal["auto"] | tuple[int, ...], *, graphs: bool) -> tuple[int, ...]:
    """The budgets of the configuration, ascending, "auto" resolved."""
    if chosen != "auto":
        return chosen
    return default_budgets() if graphs else EAGER_BUDGETS


def whole_keys(budgets: Sequence[int], merge_unit: int) -> list[GraphKey]:
    """Graphs that any one image may fill, the largest first: the others fit into its memory."""
    return [GraphKey(budget, budget * merge_unit) for budget in sorted(budgets, reverse=True)]


def tight_keys(
    budgets: Sequence[int], length_classes: Sequence[int], merge_unit: int, max_images: int
) -> list[GraphKey]:
    """Graphs of many short images beside those: for each length at which attention changes its kernel, the budgets that
    `max_images` images of it can fill, the largest first. Lengths below the smallest budget's are left out: such images
    are rarer than their graphs would cost.
    """
    keys = []
    for length in length_classes:
        if length < SMALLEST * merge_unit:
            continue
        most = -(-max_images * length // merge_unit)
        reach = next((budget for budget in sorted(budgets) if budget >= most), max(budgets))
        keys += [GraphKey(budget, length) for budget in budgets if length < budget * merge_unit and budget <= reach]
    return sorted(keys, reverse=True)
