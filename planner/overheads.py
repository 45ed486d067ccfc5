"""Overheads besides encoding and prefill, for `vitray plan`, from a result of benchmarks/bench_serving.py: CPU time of
requests, transfer between replicas, and the language model's constant part of the first token.

They are measured with one request at a time; the model adds the queueing of concurrent requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encoder.graphs.budgets import default_budgets
from encoder.packing.cost_based import ImageCost
from planner.model import Tower
from planner.recorded_costs import read_costs, read_vllm_costs
from planner.traces import RULES, image_cost

RECORD = "serving_transfer_h200.json"
OURS, ALONE = "cudagraph + layer fusion", "vLLM alone, encoder graphs"
"""Names of rows in the result."""
_ARCH = "qwen3_vl"
_BETWEEN = ("preprocess", "queue", "transfer")
"""Stages besides encoding that concurrent requests pass in parallel."""


@dataclass(frozen=True)
class Overheads:
    """Overheads in seconds, as in `planner.model.Speeds`; `*_reading_s` are per visual token."""

    hop_s: float
    entry_s: float
    ours_reading_s: float
    vllms_reading_s: float


def images_of(row: dict[str, Any]) -> list[ImageCost]:
    """Returns the costs of the images of a row's requests."""
    return [image_cost({"w": width, "h": height}, RULES[_ARCH]) for width, height in row["images"]]


def towers(results: Path) -> tuple[Tower, Tower]:
    """Returns vitray's and vLLM's tower from the folder `results`. Raises OSError, ValueError, KeyError."""
    times = read_costs(results / f"encoder_h200_{_ARCH}.json", _ARCH)
    work_ms = times.table(()).work_ms
    vllms = read_vllm_costs(results / "costs_vllm_h200.json", _ARCH, work_ms=work_ms)
    return Tower(times.table(default_budgets())), Tower(vllms.table(()), max_images=1024)


def measured(results: Path) -> Overheads:
    """Returns the overheads from the result's sequential requests. Raises ValueError if the folder lacks the result."""
    try:
        _, vllms = towers(results)
        rows = json.loads((results / RECORD).read_text())["rows"]
        ours, alone = rows[OURS], rows[ALONE]
        stages_ms: dict[str, float] = ours["stages_ms"]
        entry_ms = stages_ms["first-token"]
        between_ms = sum(stages_ms[name] for name in _BETWEEN)
        ours_ms = ours["latency_ttft_ms"]["mean"] - between_ms - stages_ms["encode"] - entry_ms
        vllms_ms = alone["latency_ttft_ms"]["mean"] - 1e3 * vllms.seconds(images_of(alone)) - entry_ms
        tokens = _tokens(images_of(ours)), _tokens(images_of(alone))
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{RECORD} is not there with both ways, as benchmarks/bench_serving.py writes it") from error
    return Overheads(
        between_ms / 1e3, entry_ms / 1e3, max(0.0, ours_ms) / 1e3 / tokens[0], max(0.0, vllms_ms) / 1e3 / tokens[1]
    )


def _tokens(images: Sequence[ImageCost]) -> int:
    return sum(image.num_tokens for image in images)
