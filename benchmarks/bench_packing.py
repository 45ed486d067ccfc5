"""Padding of the active token budgets on a trace: `python benchmarks/bench_packing.py trace.jsonl`.

The packer of the configuration (`--config`, default: the encoder's default settings) packs images in windows, in order
of arrival; the duration of a batch comes from a recorded cost table. For each trace the JSON contains
`padded_over_real` (computed tokens of the replays over their real tokens), `replayed_share` (share of tokens that CUDA
graphs encode), `total_ms` and `batches`. The last line on stdout is JSON. Needs no GPU and no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import yaml

from benchmarks.record import ROOT, provenance, write
from benchmarks.trace.costs import read_image_costs, windows
from configs.encoder_config import EncoderConfig
from configs.schema import AppConfig
from encoder.graphs.budgets import resolve_budgets
from encoder.packing.cost_based import CostTable, ImageCost, plan_batches
from encoder.packing.greedy import Batch, pack
from planner.recorded_costs import for_budgets, read_costs
from planner.traces import RULES, TraceError

DEFAULT_COSTS = ROOT / "benchmarks" / "results" / "ladder_h200.json"


@dataclass(frozen=True)
class Outcome:
    """Totals of packing all windows."""

    padded_over_real: float
    """Token budgets of the replayed batches over their tokens."""
    replayed_share: float
    """Share of all tokens that replays encode."""
    total_ms: float
    """Duration of all batches according to the cost table."""
    batches: int


def outcome(table: CostTable, packed: Sequence[tuple[Sequence[ImageCost], Sequence[Batch]]]) -> Outcome:
    """Returns the totals of `packed`: each window of images with its batches."""
    real = padded = total = batches = 0
    ms = 0.0
    for window, made in packed:
        ms += table.total_ms(window, made)
        for batch in made:
            tokens = sum(window[index].num_tokens for index in batch.indices)
            total, batches = total + tokens, batches + 1
            if batch.budget is not None:
                real, padded = real + tokens, padded + batch.budget
    return Outcome(padded / real if real else 1.0, real / total, ms, batches)


def pack_trace(config: EncoderConfig, trace: Sequence[ImageCost], costs: CostTable) -> Outcome:
    """Packs the trace in windows of as many images as fit into a graph."""
    budgets = resolve_budgets(config.encoder_cudagraph_token_budgets, graphs=True)
    size = config.encoder_cudagraph_max_images_per_batch
    table = for_budgets(costs, budgets)
    packed: list[tuple[Sequence[ImageCost], Sequence[Batch]]] = []
    for window in windows(list(trace), size):
        if config.packing == "greedy":
            made: Sequence[Batch] = pack([image.num_tokens for image in window], budgets=budgets, max_images=size)
        else:
            made = plan_batches(window, table=table, max_images=size, max_tokens=max(budgets))
        packed.append((window, made))
    return outcome(table, packed)


def encoder_config(path: Path | None) -> EncoderConfig:
    """Returns the encoder's settings of the first application of a serve_config.yaml, or the defaults without one.

    Raises ValueError for a file that is no such configuration, and errors of the file system and of PyYAML.
    """
    if path is None:
        return EncoderConfig()
    config = yaml.safe_load(path.read_text())
    applications = config.get("applications") if isinstance(config, dict) else None
    if not isinstance(applications, list) or not applications or not isinstance(applications[0], dict):
        raise ValueError("needs a list `applications:`; serve_config.yaml in this repository is an example")
    return AppConfig.model_validate(applications[0].get("args") or {}).encoder


def recorded_costs(path: Path) -> dict[str, object]:
    """Returns the source of the costs: file, GPU name and commit."""
    found = json.loads(path.read_text())
    gpu = (found.get("gpu") or {}).get("name")
    return {"file": path.name, "gpu": gpu, "what": f"bench_encoder.py's cost tables, commit {found.get('commit')}"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Padding of the active token budgets on a trace of images.")
    parser.add_argument("traces", nargs="+", type=Path, metavar="trace.jsonl")
    parser.add_argument("--arch", choices=sorted(RULES), default="qwen3_vl")
    parser.add_argument("--config", type=Path, help="a serve_config.yaml (default: the encoder's default settings)")
    parser.add_argument("--costs", type=Path, default=DEFAULT_COSTS, help="recorded times (default: those of an H200)")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    options = parser.parse_args(arguments)
    try:
        config = encoder_config(options.config)
    except (OSError, ValueError, yaml.YAMLError, LookupError, AttributeError, RecursionError) as error:
        parser.error(f"--config {options.config}: no serve_config.yaml: {error}")
    try:
        costs = read_costs(options.costs, options.arch)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        parser.error(
            f"--costs {options.costs}: no result of bench_encoder.py with the costs of {options.arch}: {error}"
        )
    try:
        images = {path.stem: read_image_costs(path, RULES[options.arch]) for path in options.traces}
    except (TraceError, OSError) as error:
        raise SystemExit(f"{error}") from error
    report = {
        "benchmark": "packing",
        "arch": options.arch,
        "packing": config.packing,
        "budgets": list(resolve_budgets(config.encoder_cudagraph_token_budgets, graphs=True)),
        "max_images": config.encoder_cudagraph_max_images_per_batch,
        "costs": recorded_costs(options.costs),
        "traces": {name: asdict(pack_trace(config, of_trace, costs)) for name, of_trace in images.items()},
        **provenance(options.commit, arguments),
    }
    write(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
