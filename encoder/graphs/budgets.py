"""Keys of the graphs that may be captured: token budgets, and bounds on image length at which attention changes its
kernel. Pure Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from encoder.graphs.buffers import GraphKey

EAGER_BUDGETS = (2048, 4096, 8192, 13824)
"""Token budgets that bound batches when CUDA graphs are off."""

SMALLEST, LARGEST = 64, 8192
# Four steps per octave. With patch size 16 and merge size 2, images of 224² and 448² pixels fill the third step
# (49 and 196 tokens) without padding; with patch size 14 they fill the first (64 and 256 tokens).
_STEPS = (64, 80, 98, 112)
# Images between these sizes are common and run longer than their launches take: four more steps halve their padding.
_FINE_FROM, _FINE_TO = 512, 2048
_FINE_STEPS = (72, 89, 104, 120)


def default_budgets() -> tuple[int, ...]:
    """Returns 37 budgets from 64 to 8192 tokens, four per octave (64, 80, 98, 112, 128, 160, 196, ...), eight per
    octave from 512 to 2048."""
    starts = [SMALLEST * 2**octave for octave in range((LARGEST // SMALLEST).bit_length())]
    sizes = [step * start // 64 for start in starts for step in _STEPS]
    sizes += [step * start // 64 for start in starts if _FINE_FROM <= start < _FINE_TO for step in _FINE_STEPS]
    return tuple(sorted(size for size in sizes if size <= LARGEST))


def resolve_budgets(chosen: Literal["auto"] | tuple[int, ...], *, graphs: bool) -> tuple[int, ...]:
    """Returns the configured token budgets, ascending, with "auto" resolved."""
    if chosen != "auto":
        return chosen
    return default_budgets() if graphs else EAGER_BUDGETS


def whole_keys(budgets: Sequence[int], merge_unit: int) -> list[GraphKey]:
    """Returns keys whose whole budget one image may fill, largest first: its pool memory serves the smaller ones."""
    return [GraphKey(budget, budget * merge_unit) for budget in sorted(budgets, reverse=True)]


def tight_keys(
    budgets: Sequence[int], length_classes: Sequence[int], merge_unit: int, max_images: int
) -> list[GraphKey]:
    """Returns additional keys for batches of short images, largest first: for each length (in patches) at which
    attention changes its kernel, the budgets that `max_images` images of that length can fill. Lengths below the
    smallest budget are omitted: such images are too rare to pay for their graphs.
    """
    keys = []
    for length in length_classes:
        if length < SMALLEST * merge_unit:
            continue
        most = -(-max_images * length // merge_unit)
        reach = next((budget for budget in sorted(budgets) if budget >= most), max(budgets))
        keys += [GraphKey(budget, length) for budget in budgets if length < budget * merge_unit and budget <= reach]
    return sorted(keys, reverse=True)
