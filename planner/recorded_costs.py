"""Cost tables from recorded batch times of a GPU, for any budgets.

Records are times of whole batches, replayed and eager. A linear model over tokens and attention work fits the replays;
its attention term holds for eager runs too. The time that a graph saves is interpolated over tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from encoder.packing.cost_based import CostTable, interpolate_ms

_MAX_EAGER_TOKENS = 65_536
"""Largest size in tokens of the eager times; larger ones are proportional."""


@dataclass(frozen=True)
class Measured:
    """Measured times of one batch; `work` in units of `encoder.packing.cost_based.PAIRS_PER_UNIT` pairs."""

    tokens: int
    work: float
    replay_ms: float
    eager_ms: float


@dataclass(frozen=True)
class Costs:
    """Linear model of batch times on one GPU, over tokens and attention work."""

    base_ms: float
    token_ms: float
    work_ms: float
    saved: tuple[tuple[int, float], ...]
    """Pairs of tokens and the milliseconds that a replay saves over an eager run, ascending by tokens."""

    @classmethod
    def fit(cls, measured: Sequence[Measured], *, known_work_ms: float | None = None) -> Costs:
        """Fits the model by least squares of relative errors.

        `known_work_ms`: time of a unit of work if measured elsewhere, since few batches cannot separate it from tokens.
        Raises ValueError for fewer than 3 batches, a base or token cost that is not positive, or a negative work cost.
        """
        if len(measured) < 3:
            raise ValueError(
                f"there are {len(measured)} measured batches; the fit over tokens and work needs at least 3"
            )
        rows = np.array([[1.0, batch.tokens, batch.work] for batch in measured])
        times = np.array([batch.replay_ms for batch in measured])
        if known_work_ms is None:
            base, token, work = (float(v) for v in np.linalg.lstsq(rows / times[:, None], np.ones(len(times)))[0])
        else:
            wanted, work = 1 - known_work_ms * rows[:, 2] / times, known_work_ms
            base, token = (float(v) for v in np.linalg.lstsq(rows[:, :2] / times[:, None], wanted)[0])
        if base <= 0 or token <= 0 or work < 0:
            raise ValueError(
                f"the fitted replay time is {base:.3g} + {token:.3g} · tokens + {work:.3g} · work ms; "
                "base and token cost must be positive, work cost not negative"
            )
        saved = sorted((batch.tokens, batch.eager_ms - batch.replay_ms) for batch in measured)
        return cls(base, token, work, tuple(saved))

    def table(self, budgets: Sequence[int]) -> CostTable:
        """Returns the table for `budgets`, in any order."""
        sizes, saved_ms = zip(*self.saved, strict=True)
        eager = sorted({1, *(tokens for tokens, _ in self.saved), _MAX_EAGER_TOKENS})
        return CostTable(
            replay_ms=tuple((budget, self._replay_ms(budget)) for budget in sorted(set(budgets))),
            eager_ms=tuple(
                (tokens, self._replay_ms(tokens) + float(np.interp(tokens, sizes, saved_ms))) for tokens in eager
            ),
            work_ms=self.work_ms,
        )

    def _replay_ms(self, tokens: int) -> float:
        return self.base_ms + self.token_ms * tokens


@dataclass(frozen=True)
class MeasuredTable:
    """Cost table that a runner measured and `bench_encoder.py` recorded."""

    recorded: CostTable

    def table(self, budgets: Sequence[int]) -> CostTable:
        """Returns the table for `budgets`, in any order: replays interpolated, above the largest in proportion."""
        measured = self.recorded.replay_ms
        times = tuple((budget, interpolate_ms(measured, budget)) for budget in sorted(set(budgets)))
        return replace(self.recorded, replay_ms=times)


def read_costs(path: Path, arch: str) -> Costs | MeasuredTable:
    """Reads `{"archs": {ARCH: [{"tokens", "work", "replay_ms", "eager_ms"}, …]}}`, or a result of `bench_encoder.py`.

    Raises:
        ValueError, KeyError: the file is neither, or lacks the tower `arch`.
    """
    found = _read_tower(path, arch)
    if isinstance(found, list):
        return _fit_listed(found)
    tables = {row["name"]: (row.get("facts") or {}).get("cost_table") for row in found["rows"]}
    for name in ("fusion", "cudagraph"):
        if table := tables.get(name):
            rows = {key: tuple((size, ms) for size, ms in table[key]) for key in ("replay_ms", "eager_ms")}
            return MeasuredTable(CostTable(**rows, work_ms=table["work_ms"]))
    raise ValueError(f"{path.name} has no measured cost table of {arch}")


def read_vllm_costs(path: Path, arch: str, *, work_ms: float) -> Costs:
    """Reads costs of vLLM's tower, each batch by its fastest mode: a list as above, or a result with `--peers vllm`.

    A unit of attention work is assumed to take `work_ms`, as measured for vitray's tower: both use the same kind of
    kernel, and a fit through a handful of shapes would be lower than the device can reach.

    Raises:
        ValueError, KeyError: the file is neither, or lacks times of vLLM's tower.
    """
    found = _read_tower(path, arch)
    if isinstance(found, list):
        return _fit_listed(found, known_work_ms=work_ms)
    configurations = [row["cells"] for row in found["rows"] if row["name"].startswith("vllm ")]
    batches = []
    for shape in found["shapes"]:
        times = [cells[shape["name"]]["ms"] for cells in configurations if shape["name"] in cells]
        if times and "work" in shape:
            batches.append(Measured(shape["tokens"], shape["work"], min(times), min(times)))
    if not batches:
        raise ValueError(f"{path.name} has no times of vLLM's tower of {arch}")
    return Costs.fit(batches, known_work_ms=work_ms)


def _read_tower(path: Path, arch: str) -> list[dict[str, Any]] | dict[str, Any]:
    archs: dict[str, list[dict[str, Any]] | dict[str, Any]] = json.loads(path.read_text())["archs"]
    if arch not in archs:
        raise ValueError(f"{path.name} has no tower {arch!r}; it has {', '.join(archs)}")
    return archs[arch]


def _fit_listed(batches: list[dict[str, Any]], *, known_work_ms: float | None = None) -> Costs:
    names = [field.name for field in fields(Measured)]
    return Costs.fit(
        [Measured(**{name: batch[name] for name in names}) for batch in batches], known_work_ms=known_work_ms
    )
