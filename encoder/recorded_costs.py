"""A recorded cost table: what batches took on a GPU, and from that what any budget would take.

Measured are whole batches, replayed and launched one by one. From them: a line over tokens and attention work for a
replay, the work's share of which holds for both ways, and what a graph saves, interpolated over tokens. It must not
know of traces or graphs.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from encoder.planning import CostTable

_FAR = 65_536
"""Tokens up to which eager times are laid down; past them they are proportional."""


@dataclass(frozen=True)
class Measured:
    """One batch: `work` in `encoder.planning.PAIRS_PER_UNIT` pairs, times in milliseconds."""

    tokens: int
    work: float
    replay_ms: float
    eager_ms: float


@dataclass(frozen=True)
class Costs:
    """What batches take on one GPU, by tokens and work."""

    base_ms: float
    token_ms: float
    work_ms: float
    saved: tuple[tuple[int, float], ...]
    """Tokens and the milliseconds that a replay saves against launching, ascending by tokens."""

    @classmethod
    def of(cls, measured: Sequence[Measured], *, known_work_ms: float | None = None) -> Costs:
        """Least squares of relative errors. Raises ValueError for fewer than 3 batches, and for costs that fall.

        `known_work_ms`: of a unit of work, where that is known from elsewhere; few batches do not tell it from tokens.
        """
        if len(measured) < 3:
            raise ValueError(f"{len(measured)} measured batches; a line over tokens and work needs at least 3")
        rows = np.array([[1.0, batch.tokens, batch.work] for batch in measured])
        times = np.array([batch.replay_ms for batch in measured])
        if known_work_ms is None:
            base, token, work = (float(v) for v in np.linalg.lstsq(rows / times[:, None], np.ones(len(times)))[0])
        else:
            wanted, work = 1 - known_work_ms * rows[:, 2] / times, known_work_ms
            base, token = (float(v) for v in np.linalg.lstsq(rows[:, :2] / times[:, None], wanted)[0])
        if base <= 0 or token <= 0 or work < 0:
            raise ValueError(f"a replay would take {base:.3g} + {token:.3g} · tokens + {work:.3g} · work ms")
        saved = sorted((batch.tokens, batch.eager_ms - batch.replay_ms) for batch in measured)
        return cls(base, token, work, tuple(saved))

    def table(self, budgets: Sequence[int]) -> CostTable:
        """For these budgets, in any order."""
        eager = sorted({1, *(tokens for tokens, _ in self.saved), _FAR})
        return CostTable(
            replay_ms=tuple((budget, self._replay(budget)) for budget in sorted(set(budgets))),
            eager_ms=tuple((tokens, self._replay(tokens) + self._saved(tokens)) for tokens in eager),
            work_ms=self.work_ms,
        )

    def _replay(self, tokens: int) -> float:
        return self.base_ms + self.token_ms * tokens

    def _saved(self, tokens: int) -> float:
        at = bisect_right(self.saved, (tokens, float("inf")))
        if at == 0 or at == len(self.saved):
            return self.saved[max(0, at - 1)][1]
        (low, low_ms), (high, high_ms) = self.saved[at - 1], self.saved[at]
        return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)


@dataclass(frozen=True)
class MeasuredTable:
    """A runner's own table, as `bench_encoder.py` records it, for budgets in between too."""

    recorded: CostTable

    def table(self, budgets: Sequence[int]) -> CostTable:
        """For these budgets, in any order: replays interpolated over tokens, past the largest in proportion."""
        sizes, times = zip(*self.recorded.replay_ms, strict=True)

        def replay(budget: int) -> float:
            return float(np.interp(budget, sizes, times) * max(1.0, budget / sizes[-1]))

        return replace(self.recorded, replay_ms=tuple((budget, replay(budget)) for budget in sorted(set(budgets))))


AnyCosts = Costs | MeasuredTable


def read_costs(path: Path, arch: str) -> Costs | MeasuredTable:
    """Reads `{"archs": {ARCH: [{"tokens", "work", "replay_ms", "eager_ms"}, …]}}`, or a result of `bench_encoder.py`.

    Raises:
        ValueError, KeyError: it is neither, or has no such tower.
    """
    found = _of_tower(path, arch)
    if isinstance(found, list):
        return _listed(found)
    tables = {row["name"]: (row.get("facts") or {}).get("cost_table") for row in found["rows"]}
    for name in ("fusion", "cudagraph"):
        if table := tables.get(name):
            rows = {key: tuple((size, ms) for size, ms in table[key]) for key in ("replay_ms", "eager_ms")}
            return MeasuredTable(CostTable(**rows, work_ms=table["work_ms"]))
    raise ValueError(f"{path.name} has no measured cost table of {arch}")


def read_vllm_costs(path: Path, arch: str, *, work_ms: float) -> Costs:
    """vLLM's own tower, each batch by the faster of its ways: such a list, or a result with `--peers vllm`.

    Attention is taken to cost it `work_ms` a unit, as our tower was measured: both run the same kind of kernel, and a
    line through a handful of shapes would put it below what the device can do.

    Raises:
        ValueError, KeyError: it is neither, or vLLM's tower was not measured.
    """
    found = _of_tower(path, arch)
    if isinstance(found, list):
        return _listed(found, known_work_ms=work_ms)
    ways = [row["cells"] for row in found["rows"] if row["name"].startswith("vllm ")]
    batches = []
    for shape in found["shapes"]:
        times = [cells[shape["name"]]["ms"] for cells in ways if shape["name"] in cells]
        if times and "work" in shape:
            batches.append(Measured(shape["tokens"], shape["work"], min(times), min(times)))
    if not batches:
        raise ValueError(f"{path.name} has no times of vLLM's tower of {arch}")
    return Costs.of(batches, known_work_ms=work_ms)


def _of_tower(path: Path, arch: str) -> list[dict[str, Any]] | dict[str, Any]:
    archs: dict[str, list[dict[str, Any]] | dict[str, Any]] = json.loads(path.read_text())["archs"]
    if arch not in archs:
        raise ValueError(f"{path.name} has no {arch}, only {', '.join(archs)}")
    return archs[arch]


def _listed(batches: list[dict[str, Any]], *, known_work_ms: float | None = None) -> Costs:
    names = [field.name for field in fields(Measured)]
    return Costs.of(
        [Measured(**{name: batch[name] for name in names}) for batch in batches], known_work_ms=known_work_ms
    )
