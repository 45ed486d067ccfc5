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
from planner.recorded_costs import for_budgets, read_costs, read_vllm_costs
from planner.traces import RULES, image_cost

RESULT_FILE = "serving_transfer_h200.json"
COSTS_FILE = "ladder_h200.json"
"""Measured times of towers on an H200."""
OURS, VLLM_ALONE = "cudagraph + layer fusion", "vLLM alone, encoder graphs"
"""Names of rows in the result."""
TOWER = "qwen3_vl"
"""The tower of the result."""
_PARALLEL_STAGES = ("preprocess", "queue", "transfer")
"""Stages besides encoding that concurrent requests pass in parallel."""


@dataclass(frozen=True)
class Overheads:
    """Overheads in seconds, as in `planner.model.Speeds`."""

    transfer_overhead_s: float
    llm_overhead_s: float
    image_load_s_per_token: float
    vllm_image_load_s_per_token: float


def image_costs(row: dict[str, Any]) -> list[ImageCost]:
    """Returns the costs of the images of a row's requests."""
    return [image_cost({"w": width, "h": height}, RULES[TOWER]) for width, height in row["images"]]


def read_towers(costs: Path, tower: str) -> tuple[Tower, Tower]:
    """Returns vitray's and vLLM's `tower` from a file of measured times. Raises OSError, ValueError, KeyError."""
    ours = read_costs(costs, tower)
    vllms = read_vllm_costs(costs, tower, work_ms=ours.work_ms)
    return Tower(for_budgets(ours, default_budgets())), Tower(vllms, max_images=1024)


def read_overheads(results: Path) -> Overheads:
    """Returns the overheads from the result's sequential requests. Raises ValueError if the folder lacks a result."""
    try:
        _, vllms = read_towers(results / COSTS_FILE, TOWER)
        rows = json.loads((results / RESULT_FILE).read_text())["rows"]
        ours, alone = rows[OURS], rows[VLLM_ALONE]
        stages_ms: dict[str, float] = ours["stages_ms"]
        entry_ms = stages_ms["first-token"]
        between_ms = sum(stages_ms[name] for name in _PARALLEL_STAGES)
        ours_ms = ours["latency_ttft_ms"]["mean"] - between_ms - stages_ms["encode"] - entry_ms
        vllms_ms = alone["latency_ttft_ms"]["mean"] - 1e3 * vllms.seconds(image_costs(alone)) - entry_ms
        tokens = _tokens(image_costs(ours)), _tokens(image_costs(alone))
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(
            f"{results} lacks {COSTS_FILE}, by benchmarks/bench_encoder.py, or {RESULT_FILE} with rows {OURS!r} and "
            f"{VLLM_ALONE!r}, by benchmarks/bench_serving.py: {error!r}"
        ) from error
    return Overheads(
        between_ms / 1e3, entry_ms / 1e3, max(0.0, ours_ms) / 1e3 / tokens[0], max(0.0, vllms_ms) / 1e3 / tokens[1]
    )


def _tokens(images: Sequence[ImageCost]) -> int:
    return sum(image.num_tokens for image in images)
