"""Compares predictions of `vitray plan` with measurements of the same set-ups."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reports.tables import table_row, table_rule
from planner import overheads
from planner.model import Language, Layout, Placement, Speeds, simulate_ttft
from planner.overheads import OURS, RESULT_FILE, VLLM_ALONE, image_costs
from planner.traces import Request

AT_ONCE = 10
"""Requests of the record's open loop, all sent at the same time."""
_UNBOUND = 1e12


@dataclass(frozen=True)
class Compared:
    """Predicted and measured values, in milliseconds or as a ratio."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def burst_ms(speeds: Speeds, row: dict[str, Any], placement: Placement) -> list[float]:
    """Returns milliseconds to the first token of each of ten simultaneous requests."""
    images = tuple(image_costs(row))
    tokens = sum(image.num_tokens for image in images) + row["words"]
    requests = [Request(0.0, images, tokens, row["output_tokens"])] * AT_ONCE
    layout = Layout(placement, 0 if placement is Placement.AGGREGATED else 1, 1)
    waits, _, _ = simulate_ttft(requests, speeds, layout)
    return [1e3 * wait for wait in waits]


def comparison(results: Path) -> list[Compared]:
    """Compares the set-ups in the record of transfers: shares of one GPU, four new pictures per request."""
    rows = json.loads((results / RESULT_FILE).read_text())["rows"]
    ours_tower, vllms_tower = overheads.read_towers(results / overheads.COSTS_FILE, overheads.TOWER)
    around = overheads.read_overheads(results)
    # The time that the small language model adds to every first token includes its prefill.
    speeds = Speeds(
        Language(_UNBOUND, _UNBOUND), ours_tower, vllms_tower, around.transfer_overhead_s, around.llm_overhead_s,
        around.image_load_s_per_token, around.vllm_image_load_s_per_token,
    )  # fmt: skip
    ours, alone = rows[OURS], rows[VLLM_ALONE]
    # The encoder had its own share of the GPU: two queues in series.
    by_ours, by_vllm = burst_ms(speeds, ours, Placement.SPLIT), burst_ms(speeds, alone, Placement.AGGREGATED)
    found = [
        Compared(
            "our encoder, one request: encoding",
            1e3 * ours_tower.seconds(image_costs(ours)),
            ours["stages_ms"]["encode"],
        )
    ]
    for name, predicted, row in (("vLLM alone", by_vllm, alone), ("ours", by_ours, ours)):
        measured = row["serving"]["ttft_ms"]
        found += [
            Compared(f"{name}, ten at once: first token, mean", statistics.fmean(predicted), measured["mean"]),
            Compared(f"{name}, ten at once: first token, the last", max(predicted), measured["p99"]),
        ]
    ratio = ours["serving"]["ttft_ms"]["mean"] / alone["serving"]["ttft_ms"]["mean"]
    predicted_ratio = statistics.fmean(by_ours) / statistics.fmean(by_vllm)
    return [*found, Compared("ours over vLLM alone, ten at once", predicted_ratio, ratio)]


def markdown(results: Path) -> str:
    """Returns the table for docs/measurements.md."""
    if not (results / RESULT_FILE).is_file():
        return ""
    record = json.loads((results / RESULT_FILE).read_text())["rows"][OURS]
    lines = [
        f"What `vitray plan` predicts for requests of four new pictures of 448² ({record['gpu']}, commit "
        f"{record['commit']}, {record['date'][:10]}), from the towers' recorded times and from requests one by one; "
        "measured in milliseconds with ten at once, which the planner was not shown:",
        "",
        table_row(["", "predicted", "measured", "off by"]),
        table_rule(4),
    ]
    for one in comparison(results):
        digits = 2 if one.measured < 2 else 1
        lines.append(
            table_row(
                [one.what, f"{one.predicted:.{digits}f}", f"{one.measured:.{digits}f}", f"{100 * one.error:+.0f} %"]
            )
        )
    return "\n".join(lines)
