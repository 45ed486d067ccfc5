"""Generates the figures of docs/measurements.md from benchmarks/results/*.json: `python benchmarks/reports/report.py`.

All figures in the text come from results. `python scripts/readme.py` writes the text without the plot, which needs
matplotlib (`pip install '.[bench]'`).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.record import ROOT
from benchmarks.reports.ladder import encoder_text, plot, totals_text
from benchmarks.reports.scaling import learns, predictions_text, simulate_text
from benchmarks.reports.tables import table_row, table_rule

RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "docs" / "ladder.png"
NOTHING = "No figures of this version are in benchmarks/results."
GIB = 2**30
Record = Mapping[str, Any]


def results(folder: Path = RESULTS) -> dict[str, list[Record]]:
    """Returns results by `benchmark`, in order of file names, without tiny runs and runs without a GPU."""
    kinds = ("encoder", "start", "latency", "decode", "simulate", "predict_run")
    found: dict[str, list[Record]] = {kind: [] for kind in kinds}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        kind = result.get("benchmark")
        if kind in ("encoder", "start", "decode") and (result["tiny"] or result["gpu"] is None):
            continue
        if kind == "latency" and result.get("tiny"):
            continue
        if kind == "simulate" and not learns(result):
            continue
        if kind in found:
            found[kind].append(result)
    # Ladders in which vLLM took turns replace those in which vLLM ran afterwards.
    if any("sustain_s" in result for result in found["encoder"]):
        found["encoder"] = [one for one in found["encoder"] if "sustain_s" in one or one["without_hopper"]]
    found["encoder"].sort(key=lambda result: "sustain_s" not in result)
    return found


def markdown(found: Mapping[str, Sequence[Record]]) -> str:
    """Returns the figures' section of docs/measurements.md, whose plot is next to it; one line without results."""
    parts: list[str] = []
    for result in found["encoder"]:
        parts += [encoder_text(result, record) for record in result["archs"].values()]
    parts += [totals_text(result) for result in found["encoder"] if result.get("summary", {}).get("vllm_best_over")]
    if any(record["rows"] for result in found["encoder"] for record in result["archs"].values()):
        parts.append(f"![Speed-up of each rung over the first row, by shape]({PLOT.name})")
    parts += [start_text(result) for result in found["start"]]
    parts += [latency_text(result) for result in found["latency"]]
    parts += [decode_text(result) for result in found["decode"]]
    parts += [simulate_text(result) for result in found["simulate"]]
    parts += [predictions_text(result) for result in found["predict_run"]]
    return "\n\n".join(parts) or NOTHING


def start_text(result: Record) -> str:
    """Returns the start-up times of an encoder in seconds."""
    lines = [
        f"Seconds until an encoder serves, each in a fresh process: {result['model']}, one {result['gpu']['name']}, "
        f"commit {result['commit']}, {result['date'][:10]}:",
        "",
        table_row(
            ["", "forward", "graphs and tables", "ready after the weights", "with a first image", "budgets", "GiB"]
        ),
        table_rule(7),
    ]
    for row in result["rows"]:
        if "error" in row:
            continue
        took = row["seconds"]
        parts = ("forward", "graphs_and_tables", "ready_after_weights", "first_image_after_weights")
        name = f"{row['label']}, `capture: {row['capture']}`, {row['state']} state folder"
        cells = [f"{took[part]:.1f}" for part in parts]
        lines.append(table_row([name, *cells, str(row["graphs"]), f"{row['graph_bytes'] / GIB:.2f}"]))
    return "\n".join(lines)


def decode_text(result: Record) -> str:
    """Returns the throughput from files in images per second."""
    lines = [
        f"Images a second from JPEG files of {result['side']}², one {result['gpu']['name']}, "
        f"{result['workers']} decoder processes on {result['cores']} cores, commit {result['commit']}, "
        f"{result['date'][:10]}:",
        "",
    ]
    for arch, row in result["archs"].items():
        lines.append(
            f"- {arch}: {row['files_images_per_s']:.1f} from files to embeddings, {row['files_over_tower']:.1%} of "
            f"the {row['tower_images_per_s']:.1f} of the tower alone; the decoders alone "
            f"{row['decoders_images_per_s']:.0f}."
        )
    return "\n".join(lines)


def latency_text(result: Record) -> str:
    """Returns the application's labels: the ladder end to end, and the serving figures."""
    kinds = ("ttft", "tpot", "itl")
    lines = [*_latency_head(result), ""]
    titles = ["", "GPU", "latency", "encode", *(f"{k.upper()} mean / median / p99" for k in kinds), "tokens/s"]
    lines += [table_row(titles), table_rule(len(titles))]
    first: float | None = None
    for label, row in result["rows"].items():
        latency = "–"
        if row["latency_ms"] is not None:
            mean = row["latency_ms"]["mean"]
            first = first or mean
            latency = f"{mean:.1f} ({first / mean:.2f}×)"
        serving, stages = row["serving"] or {}, row.get("stages_ms") or {}
        lines.append(
            table_row(
                [
                    label,
                    str(row["gpu"] or "–"),
                    latency,
                    f"{stages['encode']:.1f}" if "encode" in stages else "–",
                    *(_three(serving.get(f"{k}_ms")) for k in kinds),
                    f"{serving['output_tokens_per_s']:.0f}" if "output_tokens_per_s" in serving else "–",
                ]
            )
        )
    return "\n".join(lines)


def _latency_head(result: Record) -> list[str]:
    """Returns the conditions of the measurement on which all labels agree."""
    rows = list(result["rows"].values())
    said = (
        {key: rows[0][key] for key in ("images", "words", "latency_tokens", "commit") if key in rows[0]} if rows else {}
    )
    if len(said) < 4 or any(row.get(key) != value for row in rows for key, value in said.items()):
        return ["A running application, milliseconds:"]
    images = ", ".join(f"{count} × {w}×{h}" for (w, h), count in Counter(map(tuple, said["images"])).items())
    head = (
        f"A running application, milliseconds and speed-up over the first row; requests of {said['words']} words and "
        f"new images ({images}), {said['latency_tokens']} tokens per answer, first one by one with a warm prefix "
        f"cache, then in an open loop; commit {said['commit']}"
    )
    if "side_by_side" in result:
        head += (
            ". A small language model and the tower of Qwen3-VL-8B, random weights; all rows were up side by side on "
            "one GPU and were asked in turn"
        )
    return [head + ":"]


def _three(values: Record | None) -> str:
    return "–" if not values else f"{values['mean']:.1f} / {values['median']:.1f} / {values['p99']:.1f}"


def main() -> int:
    from scripts import readme

    plot(results()["encoder"], PLOT)
    return readme.main()


if __name__ == "__main__":
    sys.exit(main())
