"""Tables of docs/measurements.md on scaling: the simulator on traces, and its prediction of recorded runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.reports.tables import table_row, table_rule

Record = Mapping[str, Any]


def learns(result: Record) -> bool:
    """Whether a result has a row of the policy with its defaults."""
    return any(not row["ours"]["settings"] for found in result["traces"].values() for row in found["rows"])


def simulate_text(result: Record) -> str:
    """Returns our policy with its defaults, and Serve's at the best setting of a sweep for each trace."""
    load = f"that rises and falls by {result['swell']:.0%}" if result["swell"] else "of the trace alone"
    swept = max(found["settings_swept"] for found in result["traces"].values())
    chosen = "best settings of a sweep" if result.get("best_of") else f"best of {swept} settings"
    lines = [
        f"Simulated autoscaling of encoders: each trace sped up to keep {result['replicas']} replicas busy, with load "
        f"{load}, and a target of {result['target_s']:g} s; share of requests that miss it, and GPU-hours. "
        f"`VisualTokenPolicy` has its defaults for every trace; Serve's request-based autoscaler the {chosen} for "
        f"each, chosen in hindsight. Commit {result['commit']}, {result['date'][:10]}:",
        "",
        table_row(
            ["trace", "`VisualTokenPolicy`", "request-based, no more GPU-hours", "request-based, no more missed"]
        ),
        table_rule(4),
    ]
    for name, found in result["traces"].items():
        row = next(row for row in found["rows"] if not row["ours"]["settings"])
        ways = ("ours", "serve_for_no_more", "serve_as_good")
        lines.append(table_row([name, *(_cell(row.get(way)) for way in ways)]))
    return "\n".join(lines)


def predictions_text(result: Record) -> str:
    """Returns the simulator's predictions and the measurements of the real application."""
    names = ("replica_seconds", "within_target", "delay_p50_s", "delay_p90_s")
    lines = [
        "The simulator beside recorded runs of the application on Ray Serve, with encoders whose forward takes a fixed "
        f"time, on two CPU cores. Commit {result['commit']}, {result['date'][:10]}:",
        "",
        table_row(["run", "", "replica-seconds", "within the target", "delay p50, s", "p90, s"]),
        table_rule(6),
    ]
    for run, found in result["runs"].items():
        lines.append(table_row([run, "recorded", *(f"{found['recorded'][name]:g}" for name in names)]))
        predicted = (f"{found['predicted'][name]:g} ({found['off_by'][name]:+.1%})" for name in names)
        lines.append(table_row(["", "predicted", *predicted]))
    return "\n".join(lines)


def _cell(row: Record | None) -> str:
    return "none" if row is None else f"{row['missed']:.2%}, {row['gpu_hours']:.0f} h"
