"""What a tower's ladder comes to: vLLM's best of its ways, our rungs against it, and what is slower than eager.

Taken from the cells of a record alone. It must not know how they were measured or are shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

PEER_PREFIX = "vllm "
OTHER_PEER = "transformers"
PEER_BEST = "vLLM's best of its ways"
EAGER = "eager"
Record = Mapping[str, Any]


def summary(record: Record) -> dict[str, Any]:
    """Of one tower.

    `labels`: of our rungs.
    `vllm_best`: of each shape the least milliseconds of vLLM's rows, and which row; empty without such rows.
    `vllm_best_over`: of each of our rungs, for each shape that both have, vLLM's best over its own.
    `slower_than_eager`: of each rung but eager, the shapes that take longer than on eager, and of how many.
    """
    theirs = {row["name"]: row["cells"] for row in record["rows"] if row["name"].startswith(PEER_PREFIX)}
    rows = [row for row in record["rows"] if row["name"] not in theirs and row["name"] != OTHER_PEER]
    ours = {row["name"]: row["cells"] for row in rows}
    best: dict[str, dict[str, Any]] = {}
    for shape in (shape["name"] for shape in record["shapes"]):
        times = {name: cells[shape]["ms"] for name, cells in theirs.items() if shape in cells}
        if times:
            way = min(times, key=times.__getitem__)
            best[shape] = {"ms": times[way], "row": way}
    over = {
        rung: {shape: best[shape]["ms"] / cell["ms"] for shape, cell in cells.items() if shape in best}
        for rung, cells in ours.items()
    }
    slower = {}
    if EAGER in ours:
        for rung, cells in ours.items():
            both = [shape for shape in cells if shape in ours[EAGER]]
            if rung != EAGER:
                late = [shape for shape in both if cells[shape]["ms"] > ours[EAGER][shape]["ms"]]
                slower[rung] = {"shapes": late, "of": len(both)}
    return {
        "labels": {row["name"]: row["label"] for row in rows},
        "vllm_best": best,
        "vllm_best_over": {rung: ratios for rung, ratios in over.items() if ratios},
        "slower_than_eager": slower,
    }


def together(summaries: Sequence[Record]) -> dict[str, Any]:
    """Of all towers: of each rung the geometric mean over every shape, and how many cells are slower than eager."""
    labels = {rung: label for one in summaries for rung, label in one["labels"].items()}
    means = {}
    for rung in labels:
        ratios = [ratio for one in summaries for ratio in one["vllm_best_over"].get(rung, {}).values()]
        if ratios:
            means[rung] = {"geometric_mean": geometric_mean(ratios), "cells": len(ratios)}
    slower: dict[str, dict[str, int]] = {}
    for one in summaries:
        for rung, found in one["slower_than_eager"].items():
            counted = slower.setdefault(rung, {"cells": 0, "of": 0})
            counted["cells"] += len(found["shapes"])
            counted["of"] += found["of"]
    return {"labels": labels, "vllm_best_over": means, "slower_than_eager": slower}


def geometric_mean(values: Sequence[float]) -> float:
    """Of at least one positive value."""
    return math.exp(sum(map(math.log, values)) / len(values))


def sentences(total: Record) -> list[str]:
    """What `together` found, a line a rung."""
    lines = []
    for rung, label in total["labels"].items():
        parts = []
        if mean := total["vllm_best_over"].get(rung):
            parts.append(
                f"{mean['geometric_mean']:.2f} times as fast as {PEER_BEST} (geometric mean of {mean['cells']} cells)"
            )
        if slower := total["slower_than_eager"].get(rung):
            parts.append(f"cells slower than our own eager: {slower['cells']} of {slower['of']}")
        if parts:
            lines.append(f"{label}: {'; '.join(parts)}")
    return lines
