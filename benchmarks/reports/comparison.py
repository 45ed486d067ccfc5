"""README's results table: vitray and vLLM alone, from the newest run of each benchmark.

Each row states its conditions and links to the dated log entry of its run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ladder.summary import summary
from benchmarks.reports.tables import table_row, table_rule

LADDER = "ladder_h200.json"
TWO_GPUS = "goodput_x2_again_h200.json"
ONE_GPU = "goodput_shared_threads_h200.json"
EQUAL = "goodput_4b_threads_h200.json"
EQUAL_TWO_GPUS = "log/goodput_4b_x2_on_time_256_h200.json"
EQUAL_FOUR_IMAGES = "log/goodput_4b_x2_sequences_256_h200.json"
NEW_IMAGES = "serving_new_images_h200.json"
GENERIC = "log/serving_gemma3_one_place_h200.json"
LOGS = {
    LADDER: "2026-11-25-fair-ladder-three-towers.md",
    TWO_GPUS: "2026-11-23-goodput-two-gpus.md",
    ONE_GPU: "2026-11-27-equal-requests-haproxy.md",
    EQUAL: "2026-11-27-equal-requests-haproxy.md",
    EQUAL_TWO_GPUS: "2026-11-29-more-sequences.md",
    EQUAL_FOUR_IMAGES: "2026-11-29-more-sequences.md",
    NEW_IMAGES: "2026-11-28-new-images-again.md",
    GENERIC: "2026-11-29-generic-encoder-gpu.md",
}
"""The log entry that describes the run, by result file."""
_OURS = "vitray"
Record = Mapping[str, Any]


def markdown(folder: Path) -> str:
    """Returns a table with one row per workload, with our figure and the peer's."""
    lines = [table_row(["NVIDIA H200", "vitray", "vLLM 0.26 alone", "conditions"]), table_rule(4)]
    lines += _goodput_rows(folder, TWO_GPUS, "two GPUs, one shared with the encoder")
    lines += _goodput_rows(folder, ONE_GPU, "one GPU, shared with the encoder by fractions")
    lines += _equal_rows(folder, EQUAL, "one GPU, shared with the encoder")
    # The highest rates of the newest runs with a client on time at which requests do not pile up.
    lines += _equal_rows(folder, EQUAL_TWO_GPUS, "two GPUs, an encoder on each", {"1x640+400+150": 70.0})
    lines += _equal_rows(folder, EQUAL_FOUR_IMAGES, "two GPUs, an encoder on each", {"4x640+400+150": 36.0})
    lines += _tower_rows(folder)
    lines += _single_rows(folder)
    lines.append(_generic_row(folder))
    return "\n".join(lines)


def _goodput_rows(folder: Path, name: str, layout: str) -> Iterator[str]:
    """Yields the fastest rate of each trace, by the strictest SLO of the run."""
    result = json.loads((folder / name).read_text())
    slo = min(result["slos"], key=lambda one: one["ttft_ms"]) if "slos" in result else result["slo"]
    for row in _fastest(result["rows"]):
        trace, servers = row["trace"], row["servers"]
        shares = {kind: _share(server, slo) for kind, server in servers.items()}
        peers = [share for kind, share in shares.items() if kind != _OURS]
        threads = "" if 1 in result["fleet"].get("peer_threads", ()) else "; vLLM with torch's default threads"
        yield table_row(
            [
                f"requests within the SLO, {trace['name']} at {_rate(row):.3g}/s",
                f"{shares[_OURS]:.0%}",
                f"{max(peers):.0%}",
                f"{layout}; SLO: TTFT {slo['ttft_ms'] / 1000:g} s, TPOT {slo['tpot_ms']:g} ms; {trace['requests']} "
                f"requests{threads}, {result['date'][:10]} ({_log(name)})",
            ]
        )


def _fastest(rows: Sequence[Record]) -> list[Record]:
    """Returns the row of each trace with the most requests a second, in the order of the traces."""
    names = dict.fromkeys(row["trace"]["name"] for row in rows)
    return [max((row for row in rows if row["trace"]["name"] == name), key=_rate) for name in names]


def _rate(row: Record) -> float:
    """Returns the requests a second of a row."""
    rate: float = row["trace"]["requests"] / row["trace"]["seconds"] * row["speed"]
    return rate


def _share(server: Record, slo: Record) -> float:
    """Returns the share of a server's requests within an SLO, of which newer results have several."""
    share: float = server.get("goodput_shares", {}).get(
        f"{slo['ttft_ms']:g}:{slo['tpot_ms']:g}", server["goodput_share"]
    )
    return share


def _steps(result: Record) -> str:
    """Returns the token budgets of the language models' steps where they differ."""
    ours, theirs = result["fleet"]["batched_tokens"], result["fleet"]["peer_batched_tokens"]
    return "" if [ours] == list(theirs) else f", steps of {ours} tokens, vLLM's of {theirs[0]}"


def _equal_rows(folder: Path, name: str, layout: str, speeds: Mapping[str, float] | None = None) -> Iterator[str]:
    """Yields rows of requests of equal shape, beside vLLM's configuration with the earliest first token: those of
    `speeds` by trace, or the fastest of each shape."""
    result = json.loads((folder / name).read_text())
    rows = result["rows"]
    if speeds is not None:
        rows = [row for row in rows if speeds.get(row["trace"]["name"]) == row["speed"]]
    for row in _fastest(rows):
        images, side, prompt_tokens, _ = re.split("[x+]", row["trace"]["name"])
        if prompt_tokens != "400":
            continue
        peers = [server for kind, server in row["servers"].items() if kind != _OURS]
        pair = row["servers"][_OURS], min(peers, key=lambda server: server["ttft_ms"]["mean"])
        ours, theirs = (f"{one['ttft_ms']['mean']:.0f}, {one['tpot_ms']['mean']:.1f} ms" for one in pair)
        lag_ms = max(one["client"][lag]["p99"] for one in pair for lag in ("send_lag_ms", "loop_lag_ms"))
        late = "" if all(one["client"]["valid"] for one in pair) else f", client up to {lag_ms:.0f} ms late (p99)"
        yield table_row(
            [
                f"TTFT, TPOT, mean: {images} × {side}² and {prompt_tokens} tokens at {_rate(row):.3g}/s",
                ours,
                theirs,
                f"Qwen3-VL-4B, {layout}{_steps(result)}{late}, {result['date'][:10]} ({_log(name)})",
            ]
        )


def _tower_rows(folder: Path) -> Iterator[str]:
    """Yields rows of Qwen3-VL-8B alone, without shapes for which there is no valid run of vLLM alone."""
    result = json.loads((folder / LADDER).read_text())
    record = result["archs"]["qwen3_vl"]
    for shape, cell in summary(record)["sustained"].items():
        if "over" in cell and shape in ("16×224²", "1×1024²", "3×1240×1754"):
            ours, theirs = cell["fusion"], cell["vllm"]
            yield table_row(
                [
                    f"vision tower of Qwen3-VL-8B, {shape}",
                    f"{ours['ms']:.1f} ms",
                    f"{theirs['ms']:.1f} ms",
                    f"bfloat16, each alone for {result['sustain_s']:g} s, {ours['sm_mhz']:.0f} and "
                    f"{theirs['sm_mhz']:.0f} MHz, {result['date'][:10]} ({_log(LADDER)})",
                ]
            )


def _single_rows(folder: Path) -> Iterator[str]:
    """Yields rows of requests sent one at a time, beside vLLM's best configuration for each."""
    rows = json.loads((folder / NEW_IMAGES).read_text())["rows"]
    ours, peers = rows["cudagraph + layer fusion"], [row for row in rows.values() if row["rung"] is None]

    def best(figure: Callable[[Record], float]) -> list[str]:
        return [f"{figure(ours):.1f} ms", f"{min(map(figure, peers)):.1f} ms"]

    conditions = f"small language model, one GPU, behind HAProxy, {ours['date'][:10]} ({_log(NEW_IMAGES)})"
    again = best(lambda row: row["again_ms"]["median"])
    yield table_row(["latency of a repeated request, median", *again, f"one token, all caches warm; {conditions}"])
    latency = best(lambda row: row["latency_ms"]["mean"])
    yield table_row(["latency of a request with four new images of 448², mean", *latency, f"16 tokens; {conditions}"])


def _generic_row(folder: Path) -> str:
    """Returns the row of a model without a tower of vitray's, beside vLLM alone with its encoder's graphs."""
    ours, theirs = json.loads((folder / GENERIC).read_text())["rows"].values()
    ttfts = [f"{row['serving']['ttft_ms']['mean']:.0f} ms" for row in (ours, theirs)]
    conditions = f"Gemma-3-4B's tower, small language model, one GPU, {ours['date'][:10]} ({_log(GENERIC)})"
    return table_row(["TTFT, mean: ten requests at once, each with four new images of 448²", *ttfts, conditions])


def _log(name: str) -> str:
    return f"[log](benchmarks/log/{LOGS[name]})"
