"""Collects measured times of replays and eager runs into the table for `encoder.packing.cost_based`. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from encoder.images.size import Grid
from encoder.packing.cost_based import PAIRS_PER_UNIT, CostTable, ImageCost, interpolate_ms

# Minimum share of a measurement that remains after attention's part is subtracted.
_MIN_SHARE = 0.2
# Repeated measurements differed by up to 1.5 %, and eager runs are timed while the host is otherwise idle: an eager run
# is preferred to a replay only if it is faster by more than this factor.
EAGER_MARGIN = 1.04


def image_cost(grid: Grid, merge_unit: int) -> ImageCost:
    """Returns the cost of one image with this grid."""
    t, h, w = grid
    return ImageCost(t * h * w // merge_unit, t * (h * w) ** 2 / PAIRS_PER_UNIT, t)


def attention_work(grids: Iterable[Grid]) -> float:
    """Returns the attention work of a batch, in the units of `ImageCost.work`."""
    return sum(t * (h * w) ** 2 for t, h, w in grids) / PAIRS_PER_UNIT


class Costs:
    """Measurements so far. Not thread-safe."""

    def __init__(self) -> None:
        self._work_ms = 0.0
        self.knows_work = False
        """Whether the time of attention work was measured."""
        self._replays: dict[int, tuple[float, float]] = {}
        self._eager: dict[int, tuple[float, float]] = {}
        self._table: CostTable | None = None
        self._packing_table: CostTable | None = None

    def add_work(self, shorter: tuple[float, float], longer: tuple[float, float]) -> None:
        """Adds two replays of one graph, `(milliseconds, work)` each, that differ only in attention work."""
        difference = longer[1] - shorter[1]
        if difference > 0:
            self.knows_work = True
            self._work_ms = max(0.0, (longer[0] - shorter[0]) / difference)
            self._table = None

    def add_replay(self, budget: int, milliseconds: float, attention_work: float) -> None:
        self._replays[budget] = (milliseconds, attention_work)
        self._table = None

    def add_eager(self, num_tokens: int, milliseconds: float, attention_work: float) -> None:
        self._eager[num_tokens] = (milliseconds, attention_work)
        self._table = None

    def table(self) -> CostTable | None:
        """Returns the table of all measurements; None before the first eager one."""
        self._make_tables()
        return self._table

    def packing_table(self) -> CostTable | None:
        """Returns the table for packing, with eager times multiplied by `EAGER_MARGIN`; None as in `table`."""
        self._make_tables()
        return self._packing_table

    def _make_tables(self) -> None:
        if self._table is None and self._eager:
            self._table = CostTable(self._rows(self._replays), self._rows(self._eager), self._work_ms)
            eager = tuple((tokens, EAGER_MARGIN * ms) for tokens, ms in self._table.eager_ms)
            self._packing_table = replace(self._table, eager_ms=eager)

    def replay_ms(self, budget: int) -> float | None:
        """Returns a replay's time without attention work, interpolated if not measured; None before any measurement."""
        table = self.table()
        rows = self._rows(self._replays) if table is None else table.replay_ms
        return interpolate_ms(rows, budget) if rows else None

    def _rows(self, measured: dict[int, tuple[float, float]]) -> tuple[tuple[int, float], ...]:
        sizes = sorted(measured)
        bases = [max(ms - self._work_ms * done, _MIN_SHARE * ms) for ms, done in (measured[size] for size in sizes)]
        return tuple(zip(sizes, isotonic_fit(bases), strict=True))


def isotonic_fit(times: Iterable[float]) -> list[float]:
    """Returns the nearest non-decreasing times: decreasing neighbours, measured at different clocks, get their mean."""
    blocks: list[tuple[float, int]] = []
    for time in times:
        total, number = time, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / number:
            before, count = blocks.pop()
            total, number = total + before, number + count
        blocks.append((total, number))
    return [total / number for total, number in blocks for _ in range(number)]
