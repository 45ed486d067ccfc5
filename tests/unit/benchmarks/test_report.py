"""The figures of README.md and docs/measurements.md are those of the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reports import comparison, report
from benchmarks.reports.ladder import encoder_text, plot
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
        "A tower, bfloat16, one A GPU (driver 1.2, torch 9.9), up to 20 rounds, commit abc, 2030-01-02."
    )
    assert "| eager | 10.00 (1.00×) | – |" in lines
    assert "| vLLM | 5.00 (2.00×) | – |" in lines
    assert "| eager | 50% | – | 1.1e-02 (0.97) | 3.00 | 12.00 | 10.50 |" in lines
    assert "| vLLM | 50% | – | – | – | – | – |" in lines
    assert "| vLLM's best configuration | 5.00 | – |" in lines
    mean = "- eager: 0.50 times as fast as vLLM's best configuration (geometric mean of 1 cells)"
    assert f"{mean} (vLLM afterwards, not in turn)" in lines
    assert "| eager | A GPU | 50.0 (1.00×) | – | 1.0 / 2.0 / 3.0 | – | – | – |" in lines
    assert "| none | – | – | – | – | – | – | – |" in lines
    assert "| fused, `capture: lazy`, warm state folder | 1.0 | 2.0 | 3.5 | 3.6 | 4 | 0.50 |" in lines
    three = "1.0 / 2.0 / 3.0"
    assert f"| ours | A GPU | 20.0 (1.00×) | 3.2 | {three} | {three} | {three} | 100 |" in lines
    assert f"| theirs | A GPU | 40.0 (0.50×) | – | {three} | {three} | {three} | 100 |" in lines
    (head,) = (line for line in lines if "side by side" in line)
    assert "requests of 100 words and new images (4 × 448×448), 16 tokens per answer" in head
    assert "commit abc" in head
    assert sum(line.startswith("Seconds until an encoder serves") for line in lines) == 1
    assert sum(line.startswith("A tower") for line in lines) == 1  # neither the tiny run nor the one without a GPU


def test_scaling_is_told_where_nothing_was_set_for_a_trace(tmp_path: Path) -> None:
    def outcome(missed: float, hours: float, **settings: float) -> dict[str, Any]:
        return {"missed": missed, "gpu_hours": hours, "settings": settings}

    rows = [
        {"ours": outcome(0.5, 3.0, target_utilization=0.7)},
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


def sustained(ms: float, **more: object) -> dict[str, Any]:
    return {"ms": ms, "sm_mhz": 1545.0, "watts": 690.4, **more}


@pytest.fixture
def alone(folder: Path) -> Path:
    """The same results, and one whose ways ran alone too."""
    path = folder / "0.json"
    result = json.loads(path.read_text())
    held_out = {"held_out": True, "fusion": sustained(2.0), "vllm": sustained(3.0, label="vLLM, eager"), "over": 1.5}
    cells = {
        "x": {
            "held_out": False, "fusion": sustained(4.0), "over": 1.25, "fp8": sustained(3.0), "fp8_over": 1.1,
            "vllm": sustained(5.0, label="vLLM, graphs, fitted budgets") | {"sm_mhz": 1710.0},
            "vllm_fp8": sustained(3.3, label="vLLM, fp8, eager"),
        },
        "y": held_out,
    }  # fmt: skip
    record = result["archs"]["a"] | {"model": "A tower, random weights"}
    record["summary"] = record["summary"] | {"sustained": cells}
    mean = {"geometric_mean": 1.37, "lowest": 1.25, "cells": 2}
    result |= {"sustain_s": 3.0, "settle_s": 0.3, "archs": {"a": record}, "versions": {"vllm": "0.26.0"}}
    result["summary"]["sustained"] = {"over": {"all": mean}}
    (folder / "alone.json").write_text(json.dumps(result))
    return folder


def test_what_ran_alone_comes_first_with_its_clock_and_power(alone: Path) -> None:
    text = report.markdown(report.results(alone))
    lines = text.splitlines()
    expected = (
        "| x | 4.00 (1545 MHz, 690 W) | 5.00 (1710 MHz, 690 W) | graphs, fitted budgets | 1.25× | "
        "3.00 (1545 MHz, 690 W) | 3.30 (1545 MHz, 690 W) | fp8, eager | 1.10× |"
    )
    assert expected in lines
    assert "| y | 2.00 (1545 MHz, 690 W) | 3.00 (1545 MHz, 690 W) | eager | 1.50× | – | – | – | – |" in lines
    assert "All configurations in turn, in random order." in text
    before, _, after = text.partition(expected)
    assert "**A tower, random weights, bfloat16**" in before
    assert "| eager | 10.00 (1.00×) | – |" in after


def test_ladders_without_turns_are_replaced(alone: Path) -> None:
    """Ours looked faster in runs in which vLLM was measured afterwards."""
    text = report.markdown(report.results(alone))
    assert "vLLM ran afterwards" not in text
    assert "vLLM ran afterwards" not in report.markdown(report.results())


def test_times_of_answers_that_are_not_finite_are_not_shown(alone: Path) -> None:
    result = json.loads((alone / "alone.json").read_text())
    record = result["archs"]["a"]
    record["rows"].append({"name": "vllm x", "label": "NaN", "cells": {"x": cell(1.0, error=float("nan"))}})
    assert "| NaN | not finite | – |" in encoder_text(result, record)


def test_the_readmes_rows_are_of_the_results() -> None:
    lines = comparison.markdown(report.RESULTS).splitlines()
    goodput = json.loads((report.RESULTS / comparison.TWO_GPUS).read_text())
    documents = [row for row in goodput["rows"] if row["trace"]["name"] == "documents"]
    row = max(documents, key=lambda row: row["trace"]["requests"] / row["trace"]["seconds"] * row["speed"])
    shares = {name: server["goodput_share"] for name, server in row["servers"].items()}
    ours, theirs = shares.pop("vitray"), max(shares.values())
    assert any(f"| {ours:.0%} | {theirs:.0%} |" in line for line in lines)
    assert all("[log](benchmarks/log/2026-11-2" in line for line in lines[2:])


def test_the_readmes_peer_is_the_best_one_and_its_threads_are_told() -> None:
    """vLLM is faster with one CPU thread for torch; results before that was known say so."""
    lines = comparison.markdown(report.RESULTS).splitlines()
    (documents,) = (line for line in lines if "documents at 0.909/s" in line)
    assert "| 93% | 80% | one GPU" in documents, "by the strictest SLO, vLLM with one thread"
    assert "SLO: TTFT 1 s, TPOT 50 ms" in documents
    assert "default threads" not in documents
    assert all("vLLM with torch's default threads" in line for line in lines if "two GPUs, one shared" in line)
    one_gpu, two_gpus = (line for line in lines if "4 × 640² and 400 tokens" in line)
    assert "15/s | 277, 20.1 ms | 408, 21.4 ms |" in one_gpu
    assert "35.8/s | 289, 27.1 ms | 502, 35.7 ms |" in two_gpus
    assert "steps of 4096 tokens, vLLM's of 8192" in two_gpus
    assert any("67.2/s | 277, 24.0 ms | 287, 38.3 ms |" in line for line in lines)
    assert not [line for line in lines if "client up to" in line]


def test_a_row_tells_that_its_client_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "goodput_4b_x2_steps_4096_h200.json"
    monkeypatch.setitem(comparison.LOGS, name, "log.md")
    lines = [*comparison._equal_rows(report.RESULTS, name, "two GPUs")]
    late = [line for line in lines if "client up to" in line]
    assert [line.split(" at ")[1][:6] for line in late] == ["68.5/s"], "of the shown servers, where the client was late"
    assert "client up to 168 ms late (p99)" in late[0]


def test_a_run_whose_peer_did_not_take_turns_says_so() -> None:
    for name in ("encoder_h200_qwen3_vl", "encoder_h200_qwen2_5_vl"):
        result = json.loads((report.RESULTS / f"{name}.json").read_text())
        (record,) = result["archs"].values()
        text = encoder_text(result, record)
        assert "vLLM ran afterwards in a separate process" in text
        assert "On an A100: not run." in text
    assert "interleaved" not in report.markdown(report.results())
