"""The simulator of both deployments on cases whose outcome is known by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import simulate_proportion
from benchmarks.simulate_proportion import STEP_S, Arrivals, Machines, arrivals_of, compare, run

MACHINES = Machines(tokens_per_s=1000, at_once=10, answer_s=5, start_s=10, report_s=1)


def steady(seconds: float, *, tokens: float = 0, visual: float = 0, text: float = 0) -> Arrivals:
    """So much each second."""
    steps = round(seconds / STEP_S)
    return Arrivals(*(np.full(steps, per_s * STEP_S) for per_s in (tokens, visual, text)))


def missed(arrivals: Arrivals, encoders: int, llms: int) -> float:
    found = run(arrivals, MACHINES, (encoders, llms), target_s=2, scaler=None, gpus=8)
    hours = (encoders + llms) * len(arrivals.tokens) * STEP_S / 3600
    assert found["gpu_hours"] == pytest.approx(hours)
    return found["missed"]


def test_a_replica_of_each_does_what_its_speed_says() -> None:
    """An encoder 1000 tokens a second, a language model two requests a second."""
    assert missed(steady(200, tokens=950, visual=1.9), 1, 1) == 0
    assert missed(steady(200, tokens=1500, visual=1.5), 1, 1) > 0.8
    assert missed(steady(200, tokens=1500, visual=1.5), 2, 1) == 0
    assert missed(steady(200, text=3), 1, 1) > 0.8
    assert missed(steady(200, text=3), 1, 2) == 0


def test_text_does_not_wait_for_encoders() -> None:
    assert missed(steady(200, tokens=5000, visual=0.5, text=1.5), 1, 1) == pytest.approx(0.25, abs=0.02)


def test_gpus_are_shifted_to_where_they_are_needed() -> None:
    """Of eight GPUs the language models need six: half and half misses nearly all, and so does what never shifts."""
    found = compare(steady(1800, tokens=900, visual=1, text=10), MACHINES, gpus=8, target_s=2)
    assert found["half_fixed"]["missed"] > 0.9
    assert found["best_fixed"]["missed"] == 0
    assert found["all_in_use"]["missed"] < 0.5
    assert found["all_in_use"]["gpu_hours"] == pytest.approx(8 * 1800 / 3600, rel=0.01)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [
        {"t": 0.5, "images": [{"id": 1, "w": 448, "h": 448}]},
        {"t": 4.0, "images": []},
        {"t": 8.0, "images": [{"id": 1, "w": 448, "h": 448}]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_a_trace_keeps_as_many_gpus_busy_as_asked(trace: Path) -> None:
    """An image that was encoded before costs a language model's time alone."""
    found = arrivals_of(trace, "qwen3_vl", MACHINES, gpus=3, seconds=80)
    busy = found.tokens.sum() / 1000 + (found.visual.sum() + found.text.sum()) * 5 / 10
    assert busy == pytest.approx(3 * 80)
    assert found.visual.sum() == pytest.approx(2 * found.text.sum())
    assert found.tokens.sum() == pytest.approx(196 * found.text.sum())


def test_the_program_reports(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(trace), "--gpus", "3", "--turn-s", "20", "--rounds", "1", "--commit", "abc"]
    assert simulate_proportion.main(arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["benchmark"] == "simulate_proportion"
    assert report.keys() >= {"as_needed", "all_in_use", "best_fixed", "half_fixed"}
