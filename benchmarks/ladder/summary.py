"""Summarizes a tower's ladder: our rungs against vLLM's best configuration, in turn and each alone.

Uses the cells of a record only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PEER_PREFIX, PEER_FP8_PREFIX = "vllm ", "vllm-fp8 "
OTHER_PEER = "transformers"
PEER_BEST = "vLLM's best configuration"
EAGER, HEADLINE, FP8 = "eager", "fusion", "fp8"
CLOSE = 1.02
"""A peer's row within this factor of its best one in turn also runs alone, where another one may be the best."""
Record = Mapping[str, Any]


def summary(record: Record) -> dict[str, Any]:
    """Summarizes one tower.

    `labels`: of our rungs.
    `vllm_best`: for each shape the lowest milliseconds of vLLM's bfloat16 rows, and its row; empty without such rows.
    `vllm_best_over`: for each of our rungs and each shape that both have, vLLM's best over the rung's time.
    `slower_than_eager`: for each rung but eager, the shapes slower than eager, and the number of shapes.
    `sustained`: by shape, our rungs and vLLM's best alone; see `_sustained`.
    All but the last are measured in turn.
    """
    rows = record["rows"]
    ours = {row["name"]: row["cells"] for row in rows if not _is_peer(row["name"])}
    best = {}
    for shape in (shape["name"] for shape in record["shapes"]):
        if found := _best(rows, PEER_PREFIX, shape, _in_turn):
            best[shape] = found
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
        "labels": {row["name"]: row["label"] for row in rows if row["name"] in ours},
        "vllm_best": best,
        "vllm_best_over": {rung: ratios for rung, ratios in over.items() if ratios},
        "slower_than_eager": slower,
        "sustained": {
            shape["name"]: found for shape in record["shapes"] if (found := _sustained(rows, shape)) is not None
        },
    }


def _is_peer(name: str) -> bool:
    return name.startswith((PEER_PREFIX, PEER_FP8_PREFIX)) or name == OTHER_PEER


def _in_turn(cell: Record) -> Record | None:
    return cell or None


def _alone(cell: Record) -> Record | None:
    return cell.get("sustained")


def _best(
    rows: Sequence[Record], prefix: str, shape: str, figure: Callable[[Record], Record | None]
) -> dict[str, Any] | None:
    """Returns `figure`, `row` and `label` of the fastest row with prefix `prefix` and finite output."""
    found = []
    for row in rows:
        if not row["name"].startswith(prefix) or not _is_finite(row["cells"].get(shape, {})):
            continue
        if cell := figure(row["cells"].get(shape, {})):
            found.append({"ms": cell["ms"], "row": row["name"], "label": row["label"], **_conditions(cell)})
    return min(found, key=lambda each: float(each["ms"]), default=None)


def _is_finite(cell: Record) -> bool:
    """Whether the output was finite, as far as it was compared with float32."""
    error = cell.get("error")
    return error is None or math.isfinite(error)


def _conditions(cell: Record) -> dict[str, Any]:
    return {key: cell[key] for key in ("sm_mhz", "watts") if cell.get(key) is not None}


def _sustained(rows: Sequence[Record], shape: Record) -> dict[str, Any] | None:
    """Returns our `fusion` and `fp8` alone, vLLM's best in bfloat16 and in fp8 alone, and their ratios; None without
    ours.

    `fp8_over` compares fp8 with fp8; `over` bfloat16 with bfloat16.
    """
    name = shape["name"]
    ours = {row["name"]: row["cells"].get(name, {}).get("sustained") for row in rows if row["name"] in (HEADLINE, FP8)}
    if not ours.get(HEADLINE):
        return None
    found: dict[str, Any] = {"held_out": bool(shape.get("held_out"))}
    for rung, prefix, theirs, over in (
        (HEADLINE, PEER_PREFIX, "vllm", "over"),
        (FP8, PEER_FP8_PREFIX, "vllm_fp8", "fp8_over"),
    ):
        if own := ours.get(rung):
            found[rung] = {"ms": own["ms"], **_conditions(own)}
        if best := _best(rows, prefix, name, _alone):
            found[theirs] = best
        if own and best:
            found[over] = best["ms"] / own["ms"]
    return found


def sustained_stages(record: Record, shape: str) -> list[list[str]]:
    """Returns the rows that run alone on a shape, in three stages: the headline, fp8, and all others.

    The headline consists of our fused rung and those of vLLM's bfloat16 rows within `CLOSE` of its best in turn; the
    fp8 stage likewise.
    """
    rows = [row for row in record["rows"] if shape in row["cells"]]
    stages = []
    for rung, prefix in ((HEADLINE, PEER_PREFIX), (FP8, PEER_FP8_PREFIX)):
        best = _best(rows, prefix, shape, _in_turn)
        close = [
            row["name"]
            for row in rows
            if best
            and row["name"].startswith(prefix)
            and _is_finite(row["cells"][shape])
            and row["cells"][shape]["ms"] <= CLOSE * best["ms"]
        ]
        stages.append([row["name"] for row in rows if row["name"] == rung] + close)
    chosen = {name for stage in stages for name in stage}
    return [*stages, [row["name"] for row in rows if row["name"] not in chosen]]


def together(summaries: Sequence[Record]) -> dict[str, Any]:
    """Summarizes all towers: each rung's geometric mean over every shape, and the number of cells slower than eager."""
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
    return {
        "labels": labels,
        "vllm_best_over": means,
        "slower_than_eager": slower,
        "sustained": _sustained_means([cell for one in summaries for cell in one.get("sustained", {}).values()]),
    }


def _sustained_means(cells: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Returns geometric means of `over` and `fp8_over`: of all shapes, of the held-out ones, and of the others."""
    found = {}
    for over in ("over", "fp8_over"):
        groups = {
            "all": [cell[over] for cell in cells if over in cell],
            "fitted": [cell[over] for cell in cells if over in cell and not cell["held_out"]],
            "held_out": [cell[over] for cell in cells if over in cell and cell["held_out"]],
        }
        means = {
            name: {"geometric_mean": geometric_mean(ratios), "lowest": min(ratios), "cells": len(ratios)}
            for name, ratios in groups.items()
            if ratios
        }
        if means:
            found[over] = means
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """Returns the geometric mean of at least one positive value."""
    return math.exp(sum(map(math.log, values)) / len(values))


_GROUPS = {
    "all": "all",
    "fitted": "the shapes of the first ladder",
    "held_out": "the six further shapes",
}


def sustained_sentences(total: Record) -> list[str]:
    """Returns the sustained results of `together`, a line per dtype; empty without any."""
    lines = []
    for over, label in (("over", "Fused kernels, bfloat16"), ("fp8_over", "fp8, both sides")):
        means = total.get("sustained", {}).get(over)
        if means:
            parts = "; ".join(
                f"{_GROUPS[name]}: {mean['geometric_mean']:.2f} (lowest {mean['lowest']:.2f}, {mean['cells']} cells)"
                for name, mean in means.items()
            )
            lines.append(f"{label}, each alone, times as fast as {PEER_BEST} (geometric mean): {parts}")
    return lines


def sentences(total: Record) -> list[str]:
    """Returns the results of `together`, a line per rung. fp8 is not compared, because vLLM's best is in bfloat16."""
    lines = []
    for rung, label in total["labels"].items():
        parts = []
        if rung != FP8 and (mean := total["vllm_best_over"].get(rung)):
            parts.append(
                f"{mean['geometric_mean']:.2f} times as fast as {PEER_BEST} (geometric mean of {mean['cells']} cells)"
            )
        if slower := total["slower_than_eager"].get(rung):
            parts.append(f"cells slower than our own eager: {slower['cells']} of {slower['of']}")
        if parts:
            lines.append(f"{label}: {'; '.join(parts)}")
    return lines
