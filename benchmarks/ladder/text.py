"""A tower's record as text: one row per rung, one column per shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.ladder.summary import PEER_BEST

GIB = 2**30
Record = Mapping[str, Any]


def ladder_table(record: Record) -> str:
    """Returns milliseconds with the ratio to the first row, then each other figure, as blocks of columns."""
    names = [shape["name"] for shape in record["shapes"]]
    rows = record["rows"]
    lines = ["", f"{record['model']}, {record['dtype']}", *_sustained(record)]
    blocks = [
        ("ms (times as fast as the first row)", lambda c: f"{c['ms']:.2f} ({c['speedup']:.2f})"),
        ("TFLOP/s (share of the product's peak)", _rate),
        ("relative error to transformers in float32, the worst image (over transformers' own)", _error),
    ]
    if any(cell.get("sm_mhz") for row in rows for cell in row["cells"].values()):
        blocks.append(("the multiprocessors' clock after a run, MHz", _clock))
    for place, (title, shown) in enumerate(blocks):
        cells = [[r["label"], *(_cell(r, n, shown) for n in names)] for r in rows]
        if place == 0:
            cells += _against_vllm(record, names)
        lines += ["", *columns([title, *names], cells)]
    extra = [[row["label"], _memory(row), _seconds(row), *_unseen(row)] for row in rows]
    lines += [
        "",
        *columns(["other", "peak GiB", "start s / first runs too", "unseen sizes, ms", "the same again, ms"], extra),
    ]
    lines += [_agreement(row) for row in rows if (row.get("facts") or {}).get("fp8")]
    lines += [f"skipped: {entry['name']}: {entry['reason']}" for entry in record["skipped"]]
    return "\n".join(lines)


def _sustained(record: Record) -> list[str]:
    """Returns the sustained runs, a line per shape; empty without any."""
    found = (record.get("summary") or {}).get("sustained")
    if not found:
        return []
    lines = []
    for shape, cell in found.items():
        figures = [_figure(cell.get(name)) for name in ("fusion", "vllm", "fp8", "vllm_fp8")]
        ratios = [f"{cell[over]:.2f}" if over in cell else "-" for over in ("over", "fp8_over")]
        setting = cell.get("vllm", {}).get("row", "-")
        lines.append([shape, figures[0], figures[1], ratios[0], figures[2], figures[3], ratios[1], setting])
    header = ["alone: ms @ MHz, W", "fused", "vLLM's best", "ratio", "fp8", "vLLM's best fp8", "ratio", "vLLM's row"]
    return ["", *columns(header, lines)]


def _figure(found: Record | None) -> str:
    if not found:
        return "-"
    clock = f" @ {found['sm_mhz']:.0f}, {found['watts']:.0f}" if "watts" in found and "sm_mhz" in found else ""
    return f"{found['ms']:.2f}{clock}"


def _against_vllm(record: Record, names: Sequence[str]) -> list[list[str]]:
    """Returns vLLM's best configuration, and the speed of each of our rungs relative to it; empty without vLLM."""
    found = record.get("summary") or {}
    best = found.get("vllm_best")
    if not best:
        return []
    made = [[PEER_BEST, *(f"{best[name]['ms']:.2f}" if name in best else "-" for name in names)]]
    labels = {row["name"]: row["label"] for row in record["rows"]}
    for rung, ratios in found["vllm_best_over"].items():
        made.append([f"  over {labels[rung]}", *(f"{ratios[name]:.2f}" if name in ratios else "-" for name in names)])
    return made


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the first column left, the others right."""
    widths = [max(len(line[place]) for line in [header, *rows]) for place in range(len(header))]
    return [
        "  ".join(
            text.ljust(width) if place == 0 else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [header, *rows]
    ]


def _cell(row: Record, shape: str, shown: Any) -> str:  # noqa: ANN401 # a function of a cell
    cell = row["cells"].get(shape)
    return "-" if cell is None else shown(cell)


def _rate(cell: Record) -> str:
    share = cell.get("peak_share")
    return f"{cell['tflops']:.0f}" + (f" ({share:.0%})" if share is not None else "")


def _clock(cell: Record) -> str:
    return f"{cell['sm_mhz']:.0f}" if cell.get("sm_mhz") else "-"


def _error(cell: Record) -> str:
    if "error" not in cell:
        return "-"
    ratio = cell.get("error_over_transformers")
    return f"{cell['error']:.2e}" + (f" ({ratio:.2f})" if ratio is not None else "")


def _memory(row: Record) -> str:
    return f"{row['peak_memory_bytes'] / GIB:.2f}" if "peak_memory_bytes" in row else "-"


def _unseen(row: Record) -> list[str]:
    grids = row.get("grids") or {}
    return [f"{grids[key]:.2f}" if grids.get(key) is not None else "-" for key in ("cold_ms", "warm_ms")]


def _agreement(row: Record) -> str:
    found = row["facts"]["fp8"]
    return (
        f"{row['label']} ({found['layers']}), worst of the trial images: error to float32 {found['error']:.2e}, "
        f"{found['over_bfloat16']:.2f} times its error in bfloat16"
    )


def _seconds(row: Record) -> str:
    return f"{row['start_s']:.1f} / {row['build_s']:.1f}" if "start_s" in row else "-"
