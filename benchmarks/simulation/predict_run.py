"""Compares the simulator's prediction with a recorded run: `python benchmarks/simulation/predict_run.py
benchmarks/results/run_surge.json`.

The record (`benchmarks/simulation/record_run.py`) contains the times of the requests and the behaviour of the replicas:
speed, start-up time, report interval, and the time of an image outside the device. With these the run is repeated in a
virtual clock (`benchmarks/simulation/image_fleet.py`) with the policy's real code. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from ray.serve.config import AutoscalingConfig

from benchmarks.record import provenance, write
from benchmarks.simulation.image_fleet import ImageFleet, ImageModel, Prediction, Request
from configs.renamed import RENAMED
from deployments.scaling.policies import VisualTokenPolicy

WINDOW_S = 5.0
"""Length of the windows by which the requests of a surge are grouped."""


@dataclass(frozen=True)
class Answer:
    """A request of the record."""

    at_s: float
    image_tokens: tuple[int, ...]
    status: int
    delay_s: float
    retry_after: bool


@dataclass(frozen=True)
class Record:
    """A run as `benchmarks/simulation/record_run.py` writes it."""

    model: ImageModel
    policy: Mapping[str, float]
    min_replicas: int
    max_replicas: int
    pieces: Sequence[tuple[float, float]]
    """Seconds, and requests per second."""
    replicas: Sequence[tuple[float, int, int, int]]
    """Time of each change, and the starting, running and stopping replicas from then on; the last row is the end."""
    requests: Sequence[Answer]

    @classmethod
    def read(cls, path: Path) -> Record:
        told = json.loads(path.read_text())
        rows = [row.split() for row in told["replicas"]]
        requests = [row.split() for row in told["requests"]]
        return cls(
            ImageModel(**told["model"]),
            {RENAMED.get(key, key): value for key, value in told["policy"].items()},
            told["min_replicas"],
            told["max_replicas"],
            told["pieces"],
            [(float(at), int(starting), int(running), int(stopping)) for at, starting, running, stopping in rows],
            [
                Answer(float(at), tuple(map(int, tokens.split(","))), int(status), float(delay), after == "1")
                for at, tokens, status, delay, after in requests
            ],
        )

    @property
    def answered(self) -> list[Answer]:
        return [one for one in self.requests if one.status == 200]

    @property
    def ended_s(self) -> float:
        return self.replicas[-1][0]

    @property
    def target_s(self) -> float:
        return self.policy["target_encode_delay_s"]

    def replica_seconds(self) -> float:
        """Returns replica-seconds of all replicas that hold a device: starting, running and stopping ones."""
        return sum((after[0] - row[0]) * sum(row[1:]) for row, after in itertools.pairwise(self.replicas))


def predicted(record: Record) -> Prediction:
    """Repeats the answered requests of the record."""
    bounds = {"min_replicas": record.min_replicas, "max_replicas": record.max_replicas, "look_back_period_s": 5}
    at_once = {"upscale_delay_s": 0, "downscale_delay_s": 0, "metrics_interval_s": 1}
    config = AutoscalingConfig.model_validate(bounds | at_once)
    fleet = ImageFleet(record.model, VisualTokenPolicy(**record.policy), config, replicas=record.replicas[0][2])
    return fleet.run([Request(one.at_s, one.image_tokens) for one in record.answered], record.ended_s)


def figures(delays_s: Sequence[float], replica_s: float, target_s: float) -> dict[str, float]:
    delays = np.array(delays_s)
    return {
        "replica_seconds": round(replica_s, 1),
        "within_target": round(float((delays <= target_s).mean()), 4),
        "delay_p50_s": round(float(np.percentile(delays, 50)), 3),
        "delay_p90_s": round(float(np.percentile(delays, 90)), 3),
        "delay_p99_s": round(float(np.percentile(delays, 99)), 3),
    }


def compare(record: Record) -> dict[str, dict[str, float]]:
    """Returns the figures of both runs, and the relative error of each predicted one."""
    found = predicted(record)
    real = figures([one.delay_s for one in record.answered], record.replica_seconds(), record.target_s)
    made = figures(found.delays_s, found.replica_seconds(record.ended_s), record.target_s)
    off_by = {name: round(made[name] / real[name] - 1, 3) for name in real}
    return {"recorded": real, "predicted": made, "off_by": off_by}


def surge(record: Record) -> dict[str, float | None]:
    """Returns when there was capacity for the record's busiest piece, and when its requests were answered in time.

    Values are seconds from the piece's start. There is capacity when as many replicas run as its tokens need. Requests
    that arrived within WINDOW_S of each other are in time if nine of ten take at most the target; `in_time_s` is the
    end of the first such window that begins after there was capacity, and `late_windows_after` counts later windows
    that are not in time.
    """
    began = np.cumsum([0.0, *(seconds for seconds, _ in record.pieces)]).tolist()
    at = max(range(len(record.pieces)), key=lambda number: record.pieces[number][1])
    first, last = began[at], began[at + 1]
    tokens = sum(sum(one.image_tokens) for one in record.requests if first <= one.at_s < last)
    needed = tokens / (last - first) / record.model.tokens_per_s
    capacity = next((row[0] for row in record.replicas if row[0] >= first and row[2] >= needed), None)
    windows: list[tuple[float, bool]] = []
    for start in np.arange(record.ended_s if capacity is None else capacity, record.ended_s, WINDOW_S).tolist():
        delays = [one.delay_s for one in record.answered if start <= one.at_s < start + WINDOW_S]
        if delays:
            windows.append((start + WINDOW_S, float(np.percentile(delays, 90)) <= record.target_s))
    in_time = next((end for end, fits in windows if fits), None)
    sheds = [one for one in record.requests if one.status in (429, 503)]
    return {
        "replicas_needed": round(needed, 2),
        "capacity_s": None if capacity is None else round(capacity - first, 1),
        "in_time_s": None if in_time is None else round(in_time - first, 1),
        "late_windows_after": sum(not fits for end, fits in windows if in_time is not None and end > in_time),
        "answered": len(record.answered),
        "shed": len(sheds),
        "shed_without_retry_after": sum(not one.retry_after for one in sheds),
        "lost": len(record.requests) - len(record.answered) - len(sheds),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What the simulator predicts of recorded runs.")
    parser.add_argument("records", nargs="+", type=Path, metavar="run.json")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    options = parser.parse_args(arguments)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    runs: dict[str, Any] = {}
    for path in options.records:
        record = Record.read(path)
        runs[path.stem] = {**compare(record), "surge": surge(record)}
        for name, row in runs[path.stem].items():
            print(f"{path.stem:20} {name:10} {row}")
    write({"benchmark": "predict_run", "runs": runs, **provenance(options.commit, arguments)}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
