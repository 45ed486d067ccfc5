"""README's figures say what the results say, and nothing where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.report_ladder import headline, plot
from scripts import readme


def cell(ms: float, **more: float) -> dict[str, Any]:
    return {"ms": ms, "speedup": 10 / ms, "tflops": 400.0, "peak_share": 0.5, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Made-up results, to see how they are shown."""
    rows = [
        {"name": "eager", "label": "eager", "cells": {"x": cell(10.0, error=0.011, error_over_transformers=0.97)},
         "peak_memory_bytes": 3 * 2**30, "grids": {"cold_ms": 12.0, "warm_ms": 10.5}},
        {"name": "vllm", "label": "vLLM", "cells": {"x": cell(5.0)}},
    ]  # fmt: skip
    encoder = {
        "benchmark": "encoder", "tiny": False, "gpu": {"name": "A GPU", "driver": "1.2"}, "without_hopper": False,
        "versions": {"torch": "9.9", "numpy": "1"}, "rounds": 20, "product_tflops": 800.0, "commit": "abc",
        "date": "2030-01-02T00:00:00+00:00",
        "archs": {
            "a": {"model": "A tower", "dtype": "bfloat16", "shapes": [{"name": "x"}, {"name": "y"}], "rows": rows,
                  "summary": {"vllm_best": {"x": {"ms": 5.0, "row": "vllm"}}}}
        },
        "summary": {
            "labels": {"eager": "eager"}, "vllm_best_over": {"eager": {"geometric_mean": 0.5, "cells": 1}},
            "slower_than_eager": {"fusion": {"cells": 0, "of": 1}},
        },
    }  # fmt: skip
    three = {"mean": 1.0, "median": 2.0, "p99": 3.0}
    latency = {
        "benchmark": "latency",
        "rows": {
            "eager": {"gpu": "A GPU", "latency_ms": {"mean": 50.0}, "serving": {"ttft_ms": three, "itl_ms": None}},
            "none": {"gpu": None, "latency_ms": None, "serving": None},
        },
    }
    way = {"padded_over_real": 1.01, "replayed_share": 0.955, "total_ms": 5.0, "batches": 2}
    trace = {
        "fitted": way,
        "greedy": way | {"padded_over_real": 1.2},
        "time_over_the_better": 0.99,
        "eager_900": way | {"total_ms": 4.0},
    }
    budgets = {
        "benchmark": "fit_budgets", "arch": "qwen3_vl", "bounds": {"window": 16, "count": 8, "largest": 512},
        "costs": {"gpu": "A GPU", "file": "c.json"}, "traces": {"chat": trace},
    }  # fmt: skip
    took = {"forward": 1.0, "graphs_and_tables": 2.0, "ready_after_weights": 3.5, "first_image_after_weights": 3.6}
    starts = [
        {"rung": "fusion", "label": "fused", "capture": "lazy", "state": "warm", "seconds": took, "graphs": 4,
         "graph_bytes": 2**29},
        {"rung": "fusion", "label": "fused", "capture": "eager", "state": "warm", "error": "no time was left"},
    ]  # fmt: skip
    start = {
        "benchmark": "start", "tiny": False, "gpu": {"name": "A GPU"}, "model": "A tower", "commit": "abc",
        "date": "2030-01-02T00:00:00+00:00", "rows": starts,
    }  # fmt: skip
    load = {"images": [[448, 448]] * 4, "words": 100, "latency_tokens": 16, "commit": "abc", "gpu": "A GPU"}
    serving = {"ttft_ms": three, "tpot_ms": three, "itl_ms": three, "output_tokens_per_s": 99.6}
    side_by_side = {
        "benchmark": "latency", "tiny": False, "side_by_side": ["ours", "theirs"],
        "rows": {
            "ours": {**load, "latency_ms": {"mean": 20.0}, "serving": serving, "stages_ms": {"encode": 3.25}},
            "theirs": {**load, "latency_ms": {"mean": 40.0}, "serving": serving, "stages_ms": {}},
        },
    }  # fmt: skip
    tried = side_by_side | {"tiny": True}
    tiny, elsewhere = encoder | {"tiny": True}, encoder | {"gpu": None}
    for number, result in enumerate(
        (
            encoder,
            latency,
            budgets,
            tiny,
            elsewhere,
            {"gpu": "a cost table"},
            start,
            side_by_side,
            tried,
            start | {"tiny": True},
        )
    ):
        (tmp_path / f"{number}.json").write_text(json.dumps(result))
    return tmp_path


def test_every_figure_is_that_of_the_result(folder: Path) -> None:
    lines = report.markdown(report.results(folder)).splitlines()
    assert lines[0].startswith(
        "A tower, bfloat16, one A GPU (driver 1.2, torch 9.9), 20 interleaved rounds, commit abc, 2030-01-02."
    )
    assert "| eager | 10.00 (1.00×) | – |" in lines
    assert "| vLLM | 5.00 (2.00×) | – |" in lines
    assert "| eager | 50% | – | 1.1e-02 (0.97) | 3.00 | 12.00 | 10.50 |" in lines
    assert "| vLLM | 50% | – | – | – | – | – |" in lines
    assert "| vLLM's best of its ways | 5.00 | – |" in lines
    assert "- eager: 0.50 times as fast as vLLM's best of its ways (geometric mean of 1 cells)" in lines
    assert "| eager | A GPU | 50.0 (1.00×) | – | 1.0 / 2.0 / 3.0 | – | – | – |" in lines
    assert "| none | – | – | – | – | – | – | – |" in lines
    assert "| fused, `capture: lazy`, warm state folder | 1.0 | 2.0 | 3.5 | 3.6 | 4 | 0.50 |" in lines
    three = "1.0 / 2.0 / 3.0"
    assert f"| ours | A GPU | 20.0 (1.00×) | 3.2 | {three} | {three} | {three} | 100 |" in lines
    assert f"| theirs | A GPU | 40.0 (0.50×) | – | {three} | {three} | {three} | 100 |" in lines
    (head,) = (line for line in lines if "side by side" in line)
    assert "requests of 100 words and new pictures (4 × 448×448), 16 tokens an answer" in head
    assert "commit abc" in head
    assert sum(line.startswith("Seconds until an encoder serves") for line in lines) == 1
    assert "| chat | 1.010 | 1.200 | 95.5% | 0.990 | 1.250 |" in lines
    assert sum(line.startswith("A tower") for line in lines) == 1  # neither the tiny run nor the one without a GPU


def test_scaling_is_told_where_nothing_was_set_for_a_trace(tmp_path: Path) -> None:
    def outcome(missed: float, hours: float, **settings: float) -> dict[str, Any]:
        return {"missed": missed, "gpu_hours": hours, "settings": settings}

    rows = [
        {"ours": outcome(0.5, 3.0, busy_share=0.7)},
        {"ours": outcome(0.0012, 10.2), "serve_for_no_more": outcome(0.02, 9.9)},
    ]
    simulated = {
        "benchmark": "simulate", "replicas": 64, "swell": 0.6, "target_s": 1.0, "best_of": None, "commit": "abc",
        "date": "2030-01-02T00:00:00+00:00", "traces": {"chat": {"settings_swept": 128, "rows": rows}},
    }  # fmt: skip
    of_old = simulated | {"traces": {"chat": {"settings_swept": 9, "rows": rows[:1]}}}
    names = ("replica_seconds", "within_target", "delay_p50_s", "delay_p90_s")
    run = {"recorded": dict.fromkeys(names, 2.0), "predicted": dict.fromkeys(names, 2.1)}
    predicted = {
        "benchmark": "predict_run", "commit": "abc", "date": "2030-01-02T00:00:00+00:00",
        "runs": {"a_run": run | {"off_by": dict.fromkeys(names, 0.05)}},
    }  # fmt: skip
    for number, result in enumerate((simulated, of_old, predicted)):
        (tmp_path / f"{number}.json").write_text(json.dumps(result))
    lines = report.markdown(report.results(tmp_path)).splitlines()
    assert lines.count("| chat | 0.12%, 10 h | 2.00%, 10 h | none |") == 1
    assert sum("best of 128 settings" in line and "rises and falls by 60%" in line for line in lines) == 1
    assert not any("best of 9 settings" in line for line in lines)
    assert "| a_run | recorded | 2 | 2 | 2 | 2 |" in lines
    assert "|  | predicted | 2.1 (+5.0%) | 2.1 (+5.0%) | 2.1 (+5.0%) | 2.1 (+5.0%) |" in lines


def test_without_results_there_are_no_figures(tmp_path: Path) -> None:
    assert report.markdown(report.results(tmp_path)) == report.NOTHING
    assert plot([], tmp_path / "none.png") is False
    assert not (tmp_path / "none.png").exists()


def test_the_page_has_the_figures_of_the_results() -> None:
    text = readme.MEASUREMENTS.read_text()
    figures = {"figures": report.markdown(report.results())}
    assert text == readme.with_tables(text, figures)


def test_the_plot_is_a_picture(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot is made of the extra [bench]")
    out = tmp_path / "docs" / "plot.png"
    assert plot(report.results(folder)["encoder"], out) is True
    assert out.read_bytes().startswith(b"\x89PNG")


def test_committed_results_name_where_they_come_from() -> None:
    for kind, found in report.results().items():
        for result in found:
            for part in result["rows"].values() if kind == "latency" else [result]:
                assert part["commit"], kind
                assert part["command"], kind
                assert part["versions"], kind


def test_the_headline_is_of_towers_that_were_measured_beside_vllm(folder: Path) -> None:
    assert headline(report.results(folder)) == ""
    for path in folder.glob("*.json"):
        result = json.loads(path.read_text())
        if result.get("benchmark") == "encoder" and result["gpu"]:
            result["archs"]["a"]["rows"].append({"name": "fusion", "label": "fused", "cells": {"x": cell(4.0)}})
            path.write_text(json.dumps(result))
    said = headline(report.results(folder))
    assert said.startswith(
        "A tower on one A GPU, patches to embeddings: x in 4.0 ms (5.0); in brackets the best of vLLM"
    )
