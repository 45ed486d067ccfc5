"""Values in the cells of a record: errors, sustained runs, ratios and rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from benchmarks.ladder.gpu_clock import Readings
from benchmarks.ladder.summary import EAGER, OTHER_PEER
from benchmarks.ladder.turns import Spell, Times


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Returns ‖found - expected‖ / ‖expected‖ of one image; NaN if it contains a NaN."""
    return float((found - expected).norm() / expected.norm())


def relative_errors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Returns the relative error of each image in float32. Raises ValueError if numbers or shapes of images differ."""
    if [tokens.shape for tokens in found] != [tokens.shape for tokens in expected]:
        raise ValueError(
            f"embeddings of {[tuple(tokens.shape) for tokens in found]}, "
            f"expected {[tuple(tokens.shape) for tokens in expected]}"
        )
    return [relative_error(ours.float(), theirs.float()) for ours, theirs in zip(found, expected, strict=True)]


def sustained_cell(spell: Spell, readings: Readings) -> dict[str, object]:
    """Returns median and quartiles of a sustained run, with clock and power during the run."""
    times = Times.of(spell.samples_ms)
    conditions = readings.between(spell.began_s, spell.ended_s)
    return {
        "ms": times.ms,
        "low_ms": times.low_ms,
        "high_ms": times.high_ms,
        "runs": times.rounds,
        "seconds": spell.ended_s - spell.began_s,
        **({} if conditions is None else asdict(conditions)),
    }


def derive(record: dict[str, Any], peak: float | None) -> None:
    """Adds to each cell its ratio to the first row, TFLOP/s, share of the peak, and error relative to transformers'."""
    rows: Sequence[Mapping[str, Any]] = record["rows"]
    first = next((row for row in rows if row["name"] == EAGER), rows[0] if rows else None)
    theirs: Mapping[str, Any] = next((row["cells"] for row in rows if row["name"] == OTHER_PEER), {})
    for shape in record["shapes"]:
        name = shape["name"]
        for row in rows:
            cell = row["cells"].get(name)
            if cell is None:
                continue
            ms = cell["ms"]
            assert first is not None
            cell["speedup"] = first["cells"][name]["ms"] / ms if name in first["cells"] else 1.0
            cell["tflops"] = 1e3 * shape["tflop"] / ms
            cell["peak_share"] = None if peak is None else cell["tflops"] / peak
            if errors := cell.get("errors"):
                cell["error"] = _worst(errors)
                if compared := theirs.get(name, {}).get("errors"):
                    cell["error_over_transformers"] = _worst([a / b for a, b in zip(errors, compared, strict=True)])


def _worst(errors: Sequence[float]) -> float:
    """Returns the largest error, NaN if one is NaN: `max` ignores a NaN that is not the first."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)
