"""The encoder's ladder: README's headline, and tables and plot of docs/measurements.md.

It must not know how anything was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ladder_summary import PEER_BEST, sentences
from benchmarks.report_tables import table_row, table_rule

GIB = 2**30
A100_TFLOPS = 312.0
"""Of bfloat16 products, as NVIDIA's data sheet has it."""
Record = Mapping[str, Any]


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
        table_row(["", *names]),
        table_rule(1 + len(names)),
    ]
    for row in record["rows"]:
        lines.append(table_row([row["label"], *(_cell(row, name, "{ms:.2f} ({speedup:.2f}×)") for name in names)]))
    if best := record.get("summary", {}).get("vllm_best"):
        lines.append(table_row([PEER_BEST, *(f"{best[name]['ms']:.2f}" if name in best else "–" for name in names)]))
    lines += [
        "",
        f"Of the {result['product_tflops']:.0f} TFLOP/s that an 8192³ product reaches in the same run; the worst "
        "image's relative error to transformers in float32, over transformers' own; the most memory, weights included; "
        "milliseconds for batches of sizes not seen before, and again:",
        "",
        table_row(["", *names, "error", "GiB", "unseen", "again"]),
        table_rule(5 + len(names)),
    ]
    for row in record["rows"]:
        shares = [_cell(row, name, "{peak_share:.0%}") for name in names]
        lines.append(table_row([row["label"], *shares, _error(row), _gib(row), *_unseen(row)]))
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


def _cell(row: Record, shape: str, form: str) -> str:
    cell = row["cells"].get(shape)
    return "–" if cell is None else form.format(**cell)
