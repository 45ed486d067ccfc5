"""Measured times of replays and eager runs, put together into the table that `encoder.planning` packs by.

Pure Python. It must not know how times are measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace

from encoder.geometry import Grid
from encoder.planning import PAIRS_PER_UNIT, CostTable, ImageCost

# Attention takes a part of a measurement; what is left of it is not taken for less than this share.
_LEAST_SHARE = 0.2
# Two measurements of one thing differed by up to 1.5 %, and an eager run is timed while nobody else needs the host that
# launches it: it is preferred to a replay where it is better by more than that.
EAGER_MARGIN = 1.04


def image_cost(grid: Grid, merge_unit: int) -> ImageCost:
    """Of one image."""
    t, h, w = grid
    return ImageCost(t * h * w // merge_unit, t * (h * w) ** 2 / PAIRS_PER_UNIT)


def work(grids: Iterable[Grid]) -> float:
    """Attention work of a batch, in the units of `ImageCost`."""
    return sum(t * (h * w) ** 2 for t, h, w in grids) / PAIRS_PER_UNIT


class Costs:
    """What was measured so far."""

    def __init__(self) -> None:
        self._work_ms = 0.0
        self.knows_work = False
        """Whether attention's share was measured."""
        self._replays: dict[int, tuple[float, float]] = {}
        self._eager: dict[int, tuple[float, float]] = {}
        self._table: CostTable | None = None
        self._choosing: tuple[CostTable, CostTable] | None = None

    def add_work(self, shorter: tuple[float, float], longer: tuple[float, float]) -> None:
        """Two replays of one graph, `(milliseconds, work)` each, that differ in their attention work alone."""
        difference = longer[1] - shorter[1]
        if difference > 0:
            self.knows_work = True
            self._work_ms = max(0.0, (longer[0] - shorter[0]) / difference)
            self._table = None

    def add_replay(self, budget: int, milliseconds: float, work: float) -> None:
        self._replays[budget] = (milliseconds, work)
        self._table = None

    def add_eager(self, num_tokens: int, milliseconds: float, work: float) -> None:
        self._eager[num_tokens] = (milliseconds, work)
        self._table = None

    def table(self) -> CostTable | None:
        """What was measured; None before anything ran eagerly."""
        if self._table is None and self._eager:
            self._table = CostTable(self._rows(self._replays), self._rows(self._eager), self._work_ms)
        return self._table

    def choosing(self) -> CostTable | None:
        """The same with `EAGER_MARGIN` on top of eager times: what is to be chosen by."""
        table = self.table()
        if table is None:
            return None
        if self._choosing is None or self._choosing[0] is not table:
            eager = tuple((tokens, EAGER_MARGIN * ms) for tokens, ms in table.eager_ms)
            self._choosing = table, replace(table, eager_ms=eager)
        return self._choosing[1]

    def replay_ms(self, budget: int) -> float | None:
        """Without attention work: measured, or in proportion to those measured. None before any was."""
        table = self.table()
        rows = self._rows(self._replays) if table is None else table.replay_ms
        if not rows:
            return None
        at = bisect_left([size for size, _ in rows], budget)
        if at == len(rows):
            return rows[-1][1] * budget / rows[-1][0]
        if rows[at][0] == budget or at == 0:
            return rows[at][1]
        (low, low_ms), (high, high_ms) = rows[at - 1], rows[at]
        return low_ms + (high_ms - low_ms) * (budget - low) / (high - low)

    def _rows(self, measured: dict[int, tuple[float, float]]) -> tuple[tuple[int, float], ...]:
        sizes = sorted(measured)
        bases = [max(ms - self._work_ms * done, _LEAST_SHARE * ms) for ms, done in (measured[size] for size in sizes)]
        return tuple(zip(sizes, ascending(bases), strict=True))


def ascending(times: Iterable[float]) -> list[float]:
    """The nearest times that do not fall: neighbours that do were measured at different clocks, and get their mean."""
    blocks: list[tuple[float, int]] = []
    for time in times:
        total, number = time, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / number:
            before, count = blocks.pop()
            total, number = total + before, number + count
        blocks.append((total, number))
    return [total / number for total, number in blocks for _ in range(number)]
