"""The planner beside measurement: predictions hang on nothing but records, and are near what was measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.reports import plan as report_plan
from planner import overheads
from planner.overheads import OURS, RESULT_FILE, VLLM_ALONE

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
FAR = 0.25
"""Past it the model wants to be a better one."""


def test_predictions_are_near_what_was_measured() -> None:
    found = {one.what: one for one in report_plan.comparison(RESULTS)}
    rows = json.loads((RESULTS / RESULT_FILE).read_text())["rows"]
    for name, row in (("vLLM alone", VLLM_ALONE), ("ours", OURS)):
        one = found[f"{name}, ten at once: first token, mean"]
        assert one.measured == rows[row]["serving"]["ttft_ms"]["mean"]
    assert all(abs(one.error) <= FAR for one in found.values()), found


def test_ten_at_once_are_predicted_from_one_by_one_alone(tmp_path: Path) -> None:
    """What was measured of the open loop is no part of the prediction; what was measured of single requests is."""
    shutil.copytree(RESULTS, tmp_path / "results")
    file = tmp_path / "results" / RESULT_FILE
    record = json.loads(file.read_text())
    record["rows"][OURS]["serving"]["ttft_ms"] = {"mean": 1.0, "median": 1.0, "p99": 1.0}
    file.write_text(json.dumps(record))
    before, after = report_plan.comparison(RESULTS), report_plan.comparison(tmp_path / "results")
    assert [one.predicted for one in before] == [one.predicted for one in after]
    record["rows"][OURS]["latency_ttft_ms"]["mean"] *= 2
    file.write_text(json.dumps(record))
    slower = {one.what: one for one in report_plan.comparison(tmp_path / "results")}
    mean = "ours, ten at once: first token, mean"
    assert slower[mean].predicted > 1.5 * {one.what: one for one in before}[mean].predicted


def test_without_the_record_it_says_so(tmp_path: Path) -> None:
    assert report_plan.markdown(tmp_path) == ""
    with pytest.raises(ValueError, match=RESULT_FILE):
        overheads.read_overheads(tmp_path)
