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
# Four steps an octave, of which the third is the one that images of 224² and 448² fill with patches
# of 16, merged by twos (49 tokens and 196); with patches of 14 they fill the first (64 and 256).
_STEPS = (64, 80, 98, 112)


def default_budgets() -> tuple[int, ...]:
    """29 from 64 to 8192 tokens, four an octave: 64, 80, 98, 112, 128, 160, 196, ..."""
    octaves = range((LARGEST // SMALLEST).bit_length())
    sizes = [step * 2**octave * SMALLEST // 64 for octave in octaves for step in _STEPS]
    return tuple(size for size in sizes if size <= LARGEST)


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
