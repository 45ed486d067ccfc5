"""Cost tables of a tower from a result of benchmarks/bench_encoder.py (`vitray bench encoder --peers vllm`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from encoder.packing.cost_based import CostTable, interpolate_ms

_LARGEST_TOKENS = 65_536
"""End in tokens of the line of vLLM's times; above it times are in proportion."""


def read_costs(path: Path, tower: str) -> CostTable:
    """Returns the cost table that a runner of vitray's tower measured.

    Raises:
        ValueError, KeyError: the file is not such a result, or has no table of `tower`.
    """
    tables = {row["name"]: (row.get("facts") or {}).get("cost_table") for row in _read_tower(path, tower)["rows"]}
    table = tables.get("fusion") or tables.get("cudagraph")
    if table is None:
        raise ValueError(f"{path.name} has no measured cost table of {tower}")
    rows = {key: tuple((int(size), float(ms)) for size, ms in table[key]) for key in ("replay_ms", "eager_ms")}
    return CostTable(**rows, work_ms=float(table["work_ms"]))


def for_budgets(table: CostTable, budgets: Sequence[int]) -> CostTable:
    """Returns the table for `budgets`, in any order: replays interpolated, above the largest in proportion. Raises
    ValueError for a table without replays."""
    if not table.replay_ms:
        raise ValueError("replay_ms is empty; there must be at least 1 measurement")
    times = tuple((budget, interpolate_ms(table.replay_ms, budget)) for budget in sorted(set(budgets)))
    return replace(table, replay_ms=times)


def read_vllm_costs(path: Path, tower: str, *, work_ms: float) -> CostTable:
    """Returns a line over tokens through the times of vLLM's tower, each shape by its fastest mode: least squares of
    the relative errors, which are up to 13 % for benchmarks/results/ladder_h200.json.

    A unit of attention work is assumed to take `work_ms`, as measured for vitray's tower: both use the same kind of
    kernel, and a fit through a handful of shapes would be lower than the device can reach.

    Raises:
        ValueError, KeyError: the file is not such a result, or has too few times of vLLM's tower, or they do not grow
            with the tokens.
    """
    found = _read_tower(path, tower)
    modes = [row["cells"] for row in found["rows"] if row["name"].startswith("vllm ")]
    rows = []
    for shape in found["shapes"]:
        times = [cells[shape["name"]]["ms"] for cells in modes if shape["name"] in cells]
        if times and "work" in shape:
            rows.append((shape["tokens"], shape["work"], min(times)))
    if len(rows) < 3:
        raise ValueError(f"{path.name} has times of vLLM's tower of {tower} for {len(rows)} shapes, not at least 3")
    tokens, work, ms = np.array(rows, dtype=float).T
    if not np.isfinite(rows).all() or ms.min() <= 0:
        raise ValueError(f"{path.name} has times of vLLM's tower of {tower} that are not finite and positive: {rows}")
    base_ms, token_ms = (
        float(v) for v in np.linalg.lstsq(np.stack((1 / ms, tokens / ms), 1), 1 - work_ms * work / ms)[0]
    )
    if base_ms <= 0 or token_ms <= 0:
        raise ValueError(
            f"the line through the times of vLLM's tower is {base_ms:.3g} + {token_ms:.3g} · tokens ms; both must be "
            "positive"
        )
    eager_ms = tuple((size, base_ms + token_ms * size) for size in (1, _LARGEST_TOKENS))
    return CostTable(replay_ms=(), eager_ms=eager_ms, work_ms=work_ms)


def _read_tower(path: Path, tower: str) -> dict[str, Any]:
    towers: dict[str, dict[str, Any]] = json.loads(path.read_text())["archs"]
    if tower not in towers:
        raise ValueError(f"{path.name} has no tower {tower!r}; it has {', '.join(towers)}")
    return towers[tower]
