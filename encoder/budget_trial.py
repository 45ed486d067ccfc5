"""Budgets tried on a trace: fitted to windows of images, and what a way of packing comes to, by measured times.

It must not know of files, commands or graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from encoder.fit_windows import fit_to_windows
from encoder.packing import Batch
from encoder.planning import CostTable, ImageCost, plan
from encoder.recorded_costs import AnyCosts

Window = Sequence[ImageCost]
ALIKE = 1.01
"""Fitted budgets may take so many times what those of "auto" take: they are fewer, in memory and to be captured."""


@dataclass(frozen=True)
class Outcome:
    """One way of packing over all windows. Ratios and shares are of tokens; milliseconds are by the cost table."""

    padded_over_real: float
    """Of the batches that are replayed."""
    replayed_share: float
    total_ms: float
    batches: int


def outcome(costs: AnyCosts, budgets: Sequence[int], made: Sequence[tuple[Window, Sequence[Batch]]]) -> Outcome:
    """What `made`, batches for each window, comes to."""
    table = costs.table(budgets)
    real = padded = total = batches = 0
    ms = 0.0
    for window, packed in made:
        ms += table.total_ms(window, packed)
        for batch in packed:
            tokens = sum(window[index].num_tokens for index in batch.indices)
            total, batches = total + tokens, batches + 1
            if batch.budget is not None:
                real, padded = real + tokens, padded + batch.budget
    return Outcome(padded / real if real else 1.0, real / total, ms, batches)


@dataclass(frozen=True)
class Bounds:
    """How budgets are fitted and images packed."""

    window: int
    """Images that are packed at once, and that one batch may hold."""
    count: int
    largest: int
    prefer: float
    """By what share of itself an eager run counts more, when a way is chosen."""

    def choosing(self, costs: AnyCosts, budgets: Sequence[int]) -> CostTable:
        """The table that plans are made with."""
        table = costs.table(budgets)
        return replace(table, eager_ms=tuple((tokens, ms * (1 + self.prefer)) for tokens, ms in table.eager_ms))

    def fit(self, costs: AnyCosts, found: Sequence[Window]) -> tuple[int, ...]:
        return fit_to_windows(
            found,
            count=self.count,
            largest=self.largest,
            table=partial(self.choosing, costs),
            max_images=self.window,
            max_tokens=self.largest,
        )

    def tried(self, costs: AnyCosts, budgets: Sequence[int], found: Sequence[Window]) -> Outcome:
        """What `plan` makes of the windows with these budgets; an eager batch holds what the largest one would."""
        make = partial(
            plan, table=self.choosing(costs, budgets), max_images=self.window, max_tokens=max([self.largest, *budgets])
        )
        return outcome(costs, budgets, [(images, make(images)) for images in found])

    def better(
        self, costs: AnyCosts, found: Sequence[Window], *, auto: Sequence[int]
    ) -> tuple[tuple[int, ...], Outcome, Outcome, bool]:
        """The fitted budgets, what those in `auto` come to, what these do, and whether they are to be used."""
        budgets = self.fit(costs, found)
        before, after = self.tried(costs, auto, found), self.tried(costs, budgets, found)
        return budgets, before, after, bool(budgets) and after.total_ms <= ALIKE * before.total_ms
