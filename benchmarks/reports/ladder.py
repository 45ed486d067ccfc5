"""Tables and plot of the encoder's ladder for docs/measurements.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ladder.summary import FP8, PEER_BEST, PEER_FP8_PREFIX, PEER_PREFIX, sentences, sustained_sentences
from benchmarks.reports.tables import table_row, table_rule

GIB = 2**30
NOT_RUN = "On an A100: not run."
Record = Mapping[str, Any]


def _order(result: Record, record: Record) -> str:
    """Returns how the configurations of a run took turns; in old runs vLLM was measured after ours."""
    if "sustain_s" in result:
        return "All configurations in turn, in random order."
    if not any(row["name"].startswith(PEER_PREFIX) for row in record["rows"]):
        return "All configurations in turn."
    return (
        "Ours took turns with slower rungs, which leave the GPU cool; vLLM ran afterwards in a separate process. Ours "
        "is slower when it runs alone for long."
    )


def encoder_text(result: Record, record: Record) -> str:
    """Returns one tower's ladder: each side alone, then in turn."""
    return "\n\n".join([part for part in (_alone_text(result, record), _in_turn_text(result, record)) if part])


def _limits(result: Record, record: Record) -> str:
    """Returns the difference between fp8 rows and the product's default."""
    if result.get("weights") == "massive" or not any(row["name"] == FP8 for row in record["rows"]):
        return ""
    return " Our fp8 runs without a limit on its error; the product refuses it by default on these random weights."


def _named(result: Record) -> str:
    gpu, versions = result["gpu"], result["versions"]
    named = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "triton", "transformers", "vllm") if name in versions
    )
    hopper = ", without the packages for Hopper" if result["without_hopper"] else ""
    return f"one {gpu['name']} (driver {gpu['driver']}, {named}{hopper})"


def _alone_text(result: Record, record: Record) -> str:
    """Returns a row per shape; empty if nothing ran alone."""
    cells = (record.get("summary") or {}).get("sustained") or {}
    if not cells:
        return ""
    titles = [
        "", "fused", f"{PEER_BEST}", "its setting", "ratio", "fp8", "vLLM's best fp8", "its setting", "ratio",
    ]  # fmt: skip
    lines = [
        f"**{record['model']}, {record['dtype']}**, {_named(result)}, commit {result['commit']}, "
        f"{result['date'][:10]}. Each configuration ran **alone** for {result['sustain_s']:g} s after a warm-up of "
        f"{result['settle_s']:g} s: median milliseconds, median SM clock and mean power. vLLM has the same weights. "
        "None of our budgets was chosen by 1×640×480, 1×1920×1080, 3×1240×1754 and 1×3000×2000, while vLLM's “fitted” "
        "budgets are those of each shape. A configuration of vLLM whose output is not finite does not count. vLLM's "
        f"fp8 is `--quantization fp8`.{_limits(result, record)}",
        "",
        table_row(titles),
        table_rule(len(titles)),
    ]
    for name, cell in cells.items():
        lines.append(
            table_row(
                [
                    name,
                    *_side(cell, "fusion", "vllm", "over"),
                    *_side(cell, "fp8", "vllm_fp8", "fp8_over"),
                ]
            )
        )
    return "\n".join(lines)


def _side(cell: Record, ours: str, theirs: str, over: str) -> list[str]:
    setting = cell[theirs]["label"].rpartition("vLLM, ")[2] if theirs in cell else "–"
    return [_figure(cell.get(ours)), _figure(cell.get(theirs)), setting, f"{cell[over]:.2f}×" if over in cell else "–"]


def _figure(found: Record | None) -> str:
    if found is None:
        return "–"
    conditions = f" ({found['sm_mhz']:.0f} MHz, {found['watts']:.0f} W)" if {"sm_mhz", "watts"} <= set(found) else ""
    return f"{found['ms']:.2f}{conditions}"


def _in_turn_text(result: Record, record: Record) -> str:
    names = [shape["name"] for shape in record["shapes"]]
    lines = [
        f"{record['model']}, {record['dtype']}, {_named(result)}, up to {result['rounds']} rounds, commit "
        f"{result['commit']}, {result['date'][:10]}. {_order(result, record)}{_limits(result, record)} "
        "Milliseconds, and the speed-up over the first row:",
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
        f"Share of the {result['product_tflops']:.0f} TFLOP/s of an 8192³ bfloat16 product in the same run (for fp8 "
        "too); largest relative error of an image to transformers in float32, and in brackets its ratio to that of "
        "transformers in bfloat16; peak memory with weights; milliseconds for batches of new sizes, and repeated:",
        "",
        table_row(["", *names, "error", "GiB", "unseen", "again"]),
        table_rule(5 + len(names)),
    ]
    for row in record["rows"]:
        shares = [_cell(row, name, "{peak_share:.0%}") for name in names]
        lines.append(table_row([row["label"], *shares, _error(row), _gib(row), *_unseen(row)]))
    return "\n".join([*lines, "", NOT_RUN])


def totals_text(result: Record) -> str:
    """Returns means over all towers of a run: against vLLM and against our own eager rung."""
    order = "in turn" if "sustain_s" in result else "vLLM afterwards, not in turn"
    in_turn = [f"{line} ({order})" for line in sentences(result["summary"])]
    return "\n".join(f"- {line}" for line in [*sustained_sentences(result["summary"]), *in_turn])


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
    """Writes a PNG with each row's speed-up over the first, one panel per tower; returns False without data."""
    panels = [record for result in encoder for record in result["archs"].values() if record["rows"]]
    if not panels:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(panels), 1, figsize=(12, 4 * len(panels)), squeeze=False, layout="constrained")
    for axis, record in zip(axes[:, 0], panels, strict=True):
        names = [shape["name"] for shape in record["shapes"]]
        rows = [row for row in record["rows"] if not row["name"].startswith(PEER_FP8_PREFIX)]
        width = 0.8 / len(rows)
        for place, row in enumerate(rows):
            cells = [row["cells"].get(name, {"speedup": math.nan}) for name in names]
            there = [n for n, cell in enumerate(cells) if math.isfinite(cell["speedup"] + cell.get("error", 0.0))]
            heights = [cells[number]["speedup"] for number in there]
            axis.bar([number + place * width for number in there], heights, width, label=row["label"])
        axis.set_xticks([number + 0.4 - width / 2 for number in range(len(names))], names)
        axis.set_ylabel(f"speed-up over {record['rows'][0]['label']}")
        axis.set_title(f"{record['model']}, {record['dtype']}")
        axis.legend(fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return True


def _cell(row: Record, shape: str, form: str) -> str:
    cell = row["cells"].get(shape)
    if cell is None:
        return "–"
    return form.format(**cell) if math.isfinite(cell.get("error", 0.0)) else "not finite"
