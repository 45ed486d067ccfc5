"""README's figures from benchmarks/results/*.json, and the ladder's plot: `python benchmarks/report.py`.

Nothing is typed by hand: what is not in a result is not in the text. `python scripts/readme.py` writes the text without
the plot, which needs matplotlib (`pip install '.[bench]'`). It must not know how anything was measured.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ladder_summary import PEER_BEST, sentences
from benchmarks.record import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "docs" / "ladder.png"
NOTHING = "No figures of this version are in benchmarks/results."
GIB = 2**30
A100_TFLOPS = 312.0
"""Of bfloat16 products, as NVIDIA's data sheet has it."""
Record = Mapping[str, Any]


def results(folder: Path = RESULTS) -> dict[str, list[Record]]:
    """By `benchmark`, in order of file names; tiny runs and runs without a GPU are no figures."""
    found: dict[str, list[Record]] = {"encoder": [], "start": [], "latency": [], "decode": [], "fit_budgets": []}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        kind = result.get("benchmark")
        if kind in ("encoder", "start", "decode") and (result["tiny"] or result["gpu"] is None):
            continue
        if kind == "latency" and result.get("tiny"):
            continue
        if kind in found:
            found[kind].append(result)
    return found


def markdown(found: Mapping[str, Sequence[Record]]) -> str:
    """README's section, or one line where there is nothing to show."""
    parts: list[str] = []
    for result in found["encoder"]:
        parts += [encoder_text(result, record) for record in result["archs"].values()]
    parts += [totals_text(result) for result in found["encoder"] if result.get("summary", {}).get("vllm_best_over")]
    if any(record["rows"] for result in found["encoder"] for record in result["archs"].values()):
        parts.append(f"![How many times as fast as the first row each rung is, by shape](docs/{PLOT.name})")
    parts += [start_text(result) for result in found["start"]]
    parts += [latency_text(result) for result in found["latency"]]
    parts += [decode_text(result) for result in found["decode"]]
    parts += [budgets_text(result) for result in found["fit_budgets"]]
    return "\n\n".join(parts) or NOTHING


def headline(found: Mapping[str, Sequence[Record]]) -> str:
    """One sentence for each tower that was measured beside vLLM; nothing where none was."""
    said = []
    for result in found["encoder"]:
        for record in result["archs"].values():
            best = (record.get("summary") or {}).get("vllm_best") or {}
            cells = _fused_cells(record)
            both = [name for name in best if name in cells]
            vllm = result["versions"].get("vllm", "")
            if both:
                times = ", ".join(f"{name} in {cells[name]['ms']:.1f} ms ({best[name]['ms']:.1f})" for name in both)
                said.append(
                    f"{record['model'].partition(',')[0]} on one {result['gpu']['name']}, patches to embeddings: "
                    f"{times}; in brackets the best of vLLM {vllm}'s ways in the same run."
                )
    return "\n\n".join(said)


def _fused_cells(record: Record) -> Record:
    return next((row["cells"] for row in record["rows"] if row["name"] == "fusion"), {})


def encoder_text(result: Record, record: Record) -> str:
    """One tower's ladder."""
    gpu, versions = result["gpu"], result["versions"]
    named = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "triton", "transformers", "vllm") if name in versions
    )
    hopper = ", without the packages for Hopper" if result["without_hopper"] else ""
    names = [shape["name"] for shape in record["shapes"]]
    lines = [
        f"{record['model']}, {record['dtype']}, one {gpu['name']} (driver {gpu['driver']}, {named}{hopper}), "
        f"{result['rounds']} interleaved rounds, commit {result['commit']}, {result['date'][:10]}. "
        "Milliseconds, and how many times as fast as the first row:",
        "",
        _row(["", *names]),
        _rule(1 + len(names)),
    ]
    for row in record["rows"]:
        lines.append(_row([row["label"], *(_cell(row, name, "{ms:.2f} ({speedup:.2f}×)") for name in names)]))
    if best := record.get("summary", {}).get("vllm_best"):
        lines.append(_row([PEER_BEST, *(f"{best[name]['ms']:.2f}" if name in best else "–" for name in names)]))
    lines += [
        "",
        f"Of the {result['product_tflops']:.0f} TFLOP/s that an 8192³ product reaches in the same run; the worst "
        "image's relative error to transformers in float32, over transformers' own; the most memory, weights included; "
        "milliseconds for batches of sizes not seen before, and again:",
        "",
        _row(["", *names, "error", "GiB", "unseen", "again"]),
        _rule(5 + len(names)),
    ]
    for row in record["rows"]:
        shares = [_cell(row, name, "{peak_share:.0%}") for name in names]
        lines.append(_row([row["label"], *shares, _error(row), _gib(row), *_unseen(row)]))
    return "\n".join([*lines, *_a100(record)])


def _a100(record: Record) -> list[str]:
    """What an A100 would take by arithmetic alone; nothing where the fused rung was not measured."""
    cells = _fused_cells(record)
    shapes = [shape for shape in record["shapes"] if cells.get(shape["name"], {}).get("peak_share")]
    if not shapes:
        return []
    floors = {shape["name"]: 1e3 * shape["tflop"] / A100_TFLOPS for shape in shapes}
    times = ", ".join(f"{name} {ms:.1f} ({ms / cells[name]['peak_share']:.1f})" for name, ms in floors.items())
    return [
        "",
        f"Computed, not measured: what an A100 ({A100_TFLOPS:.0f} TFLOP/s) takes at least for these operations, and at "
        f"the share of the peak that the fused rung reaches here, in milliseconds: {times}.",
    ]


def totals_text(result: Record) -> str:
    """All towers of a run together, against vLLM and against our own eager rung."""
    return "\n".join(f"- {line}" for line in sentences(result["summary"]))


def start_text(result: Record) -> str:
    """Seconds until an encoder serves."""
    lines = [
        f"Seconds until an encoder serves, each in a fresh process: {result['model']}, one {result['gpu']['name']}, "
        f"commit {result['commit']}, {result['date'][:10]}:",
        "",
        _row(["", "forward", "graphs and tables", "ready after the weights", "with a first image", "graphs", "GiB"]),
        _rule(7),
    ]
    for row in result["rows"]:
        if "error" in row:
            continue
        took = row["seconds"]
        parts = ("forward", "graphs_and_tables", "ready_after_weights", "first_image_after_weights")
        name = f"{row['label']}, `capture: {row['capture']}`, {row['state']} state folder"
        cells = [f"{took[part]:.1f}" for part in parts]
        lines.append(_row([name, *cells, str(row["graphs"]), f"{row['graph_bytes'] / GIB:.2f}"]))
    return "\n".join(lines)


def decode_text(result: Record) -> str:
    """Images a second from files."""
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
    """The application's labels: the ladder end to end, and the serving figures."""
    kinds = ("ttft", "tpot", "itl")
    lines = [*_latency_head(result), ""]
    titles = ["", "GPU", "latency", "encode", *(f"{k.upper()} mean / median / p99" for k in kinds), "tokens/s"]
    lines += [_row(titles), _rule(len(titles))]
    first: float | None = None
    for label, row in result["rows"].items():
        latency = "–"
        if row["latency_ms"] is not None:
            mean = row["latency_ms"]["mean"]
            first = first or mean
            latency = f"{mean:.1f} ({first / mean:.2f}×)"
        serving, stages = row["serving"] or {}, row.get("stages_ms") or {}
        lines.append(
            _row(
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
    """What was asked of what, as far as all labels agree."""
    rows = list(result["rows"].values())
    said = (
        {key: rows[0][key] for key in ("images", "words", "latency_tokens", "commit") if key in rows[0]} if rows else {}
    )
    if len(said) < 4 or any(row.get(key) != value for row in rows for key, value in said.items()):
        return ["Through the running application, milliseconds:"]
    images = ", ".join(f"{count} × {w}×{h}" for (w, h), count in Counter(map(tuple, said["images"])).items())
    head = (
        f"Through the running application, milliseconds, and how many times as fast as the first row; requests of "
        f"{said['words']} words and new pictures ({images}), {said['latency_tokens']} tokens an answer one by one with "
        f"a warm prefix cache, then an open loop; commit {said['commit']}"
    )
    if "side_by_side" in result:
        head += (
            ". A small language model and the tower of Qwen3-VL-8B, random weights; all rows were up side by side on "
            "one GPU and were asked in turn"
        )
    return [head + ":"]


def budgets_text(result: Record) -> str:
    """Padding with fitted budgets."""
    bounds, costs = result["bounds"], result["costs"]
    (other,) = {key for found in result["traces"].values() for key in found if key.startswith("eager_")}
    wide = f"over eager up to {other.removeprefix('eager_')} tokens"
    lines = [
        f"Budgets fitted to the first half of a trace and counted on its second, windows of {bounds['window']} images, "
        f"up to {bounds['count']} budgets and {bounds['largest']} tokens, {result['arch']}, times by the table that "
        f"was measured on one {costs['gpu']} ({costs['file']} there); eager runs hold as many tokens:",
        "",
        _row(
            ["trace", "padded/real tokens", "greedy rule", "replayed", "time over the better of greedy and eager", wide]
        ),
        _rule(6),
    ]
    for name, found in result["traces"].items():
        fitted, greedy = found["fitted"], found["greedy"]
        lines.append(
            _row(
                [
                    name,
                    f"{fitted['padded_over_real']:.3f}",
                    f"{greedy['padded_over_real']:.3f}",
                    f"{fitted['replayed_share']:.1%}",
                    f"{found['time_over_the_better']:.3f}",
                    f"{fitted['total_ms'] / found[other]['total_ms']:.3f}",
                ]
            )
        )
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(columns: int) -> str:
    return "|---" * columns + "|"


def _cell(row: Record, shape: str, form: str) -> str:
    cell = row["cells"].get(shape)
    return "–" if cell is None else form.format(**cell)


def _error(row: Record) -> str:
    cells = row["cells"].values()
    ratios = [cell["error_over_transformers"] for cell in cells if "error_over_transformers" in cell]
    worst = [cell["error"] for cell in cells if "error" in cell]
    return "–" if not worst else f"{max(worst):.1e}" + (f" ({max(ratios):.2f})" if ratios else "")


def _gib(row: Record) -> str:
    return f"{row['peak_memory_bytes'] / GIB:.2f}" if "peak_memory_bytes" in row else "–"


def _unseen(row: Record) -> list[str]:
    grids = row.get("grids") or {}
    return [f"{grids[key]:.2f}" if grids.get(key) is not None else "–" for key in ("cold_ms", "warm_ms")]


def _three(values: Record | None) -> str:
    return "–" if not values else f"{values['mean']:.1f} / {values['median']:.1f} / {values['p99']:.1f}"


def plot(encoder: Sequence[Record], out: Path) -> bool:
    """A PNG of how many times as fast as the first row each row is, a panel a tower; False for nothing to draw."""
    panels = [record for result in encoder for record in result["archs"].values() if record["rows"]]
    if not panels:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(7 * len(panels), 4.5), squeeze=False, layout="constrained")
    for axis, record in zip(axes[0], panels, strict=True):
        names = [shape["name"] for shape in record["shapes"]]
        width = 0.8 / len(record["rows"])
        for place, row in enumerate(record["rows"]):
            there = [number for number, name in enumerate(names) if name in row["cells"]]
            heights = [row["cells"][names[number]]["speedup"] for number in there]
            axis.bar([number + place * width for number in there], heights, width, label=row["label"])
        axis.set_xticks([number + 0.4 - width / 2 for number in range(len(names))], names)
        axis.set_ylabel(f"times as fast as {record['rows'][0]['label']}")
        axis.set_title(f"{record['model']}, {record['dtype']}")
        axis.legend(fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return True


def main() -> int:
    from scripts import readme

    plot(results()["encoder"], PLOT)
    return readme.main()


if __name__ == "__main__":
    sys.exit(main())
