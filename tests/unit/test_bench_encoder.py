"""The encoder benchmark, run for real on tiny towers on the CPU: the record is whole and agrees with itself."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks import bench_encoder, ladder, measure, peer_vllm, rungs
from benchmarks.ladder_text import ladder_table
from benchmarks.rungs import run_batches
from benchmarks.towers import SECTIONS, config_of, random_patches, random_tower, shapes_of, unseen_grids
from configs.encoder_config import EncoderConfig
from encoder.runner import TowerRunner
from encoder.vision_config import VisionConfig
from tests.programs import output_of, output_of_python

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a process, as a user runs it: the last line on stdout, which the file equals."""
    out = tmp_path_factory.mktemp("bench") / "tiny.json"
    told = output_of(
        [sys.executable, "benchmarks/bench_encoder.py", "--device", "cpu", "--tiny", "--only", "eager,cudagraph",
         "--peers", "transformers,vllm", "--rounds", "3", "--out", str(out), "--plot", str(out.with_suffix(".png")),
         "--commit", "abc"],
    )  # fmt: skip
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    assert json.loads(out.read_text()) == found
    assert Image.open(out.with_suffix(".png")).size == (1680, 540)
    assert "torch compile" not in told
    assert "transformers, eager" in told
    return found


def test_the_record_says_what_is_slower_than_eager(record: dict[str, Any]) -> None:
    for result in record["archs"].values():
        assert result["summary"]["labels"] == {"eager": "eager"}
        assert result["summary"]["vllm_best"] == {}
    assert record["summary"]["slower_than_eager"] == {}


def test_record_says_where_it_comes_from(record: dict[str, Any]) -> None:
    assert record["commit"] == "abc"
    assert record["command"][:2] == ["benchmarks/bench_encoder.py", "--device"]
    assert record["versions"]["torch"] == torch.__version__
    assert record["gpu"] is None
    assert record["tiny"] is True


@pytest.mark.parametrize("arch", sorted(SECTIONS))
def test_cells_agree_with_each_other(record: dict[str, Any], arch: str) -> None:
    result = record["archs"][arch]
    assert [row["name"] for row in result["rows"]] == ["eager", "transformers"]
    first, theirs = (row["cells"] for row in result["rows"])
    for shape in result["shapes"]:
        for cell in (first[shape["name"]], theirs[shape["name"]]):
            assert cell["low_ms"] <= cell["ms"] <= cell["high_ms"]
            assert cell["rounds"] == 3
            assert cell["speedup"] == pytest.approx(first[shape["name"]]["ms"] / cell["ms"])
            assert cell["tflops"] == pytest.approx(1e3 * shape["tflop"] / cell["ms"])
            assert cell["peak_share"] == pytest.approx(cell["tflops"] / record["product_tflops"])
            assert len(cell["errors"]) == shape["images"]
            assert cell["error"] == max(cell["errors"])
        # bfloat16 against float32 on the same weights: rounding, and no more than that.
        assert 1e-3 < first[shape["name"]]["error"] < 3e-2
        assert theirs[shape["name"]]["error_over_transformers"] == 1.0
        assert 0.5 < first[shape["name"]]["error_over_transformers"] < 1.5
    for row in result["rows"]:
        assert row["grids"]["batches"] == 2
        assert row["grids"]["cold_ms"] > 0
        assert row["grids"]["warm_ms"] > 0


def test_what_cannot_be_had_is_said(record: dict[str, Any]) -> None:
    for result in record["archs"].values():
        assert {entry["name"] for entry in result["skipped"]} == {"cudagraph", "vllm"}
        assert all(entry["reason"] for entry in result["skipped"])
        assert "left out: cudagraph" in ladder_table(result)


def test_the_runner_counts_what_was_measured(record: dict[str, Any]) -> None:
    for result in record["archs"].values():
        facts = result["rows"][0]["facts"]
        assert facts["forward"] == "eager"
        # Of each of three shapes: the first run, three to warm up, three rounds and one for the error; and of two cold
        # batches four runs each.
        assert facts["counts"]["eager_runs"] == {"graphs_off": 3 * (1 + 3 + 3 + 1) + 2 * 4}
        assert facts["counts"]["replays"] == 0


def test_images_come_back_in_their_order() -> None:
    """Whatever batches a plan makes of them."""
    config = config_of("qwen3_vl", tiny=True, dtype="float32")
    tower = random_tower(config, seed=0, dtype=torch.float32, device=CPU)
    small = EncoderConfig(fusion=False, encoder_cudagraph_token_budgets=(8, 24), warm_grids=())
    runner = TowerRunner.build(tower, small, progress=False)
    grids = [(1, 8, 12), (1, 4, 4), (1, 6, 4), (1, 2, 2)]
    assert len(runner.plan(grids)) > 1
    patches = random_patches(config, sum(t * h * w for t, h, w in grids), seed=1, device=CPU)
    found = run_batches(runner, patches, grids)
    expected = tower(patches, tower.prepare(grids)).split([h * w // 4 for _, h, w in grids])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_a_rung_that_fails_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str, tower: object) -> rungs.Rung:
        if name == "compile":
            raise RuntimeError("no luck")
        return rungs.make_rung(name, tower)  # type: ignore[arg-type]

    monkeypatch.setattr(ladder, "make_rung", broken)
    few = ["--device", "cpu", "--tiny", "--arch", "qwen3_vl", "--only", "eager,compile", "--rounds", "1"]
    assert bench_encoder.main(few) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["archs"]["qwen3_vl"]
    assert [row["name"] for row in result["rows"]] == ["eager"]
    assert result["skipped"] == [{"name": "compile", "reason": "failed: RuntimeError('no luck')"}]


def test_a_switch_that_is_not_there_leaves_its_rung_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = random_tower(config_of("qwen3_vl", tiny=True, dtype="float32"), seed=0, dtype=torch.float32, device=CPU)
    monkeypatch.setitem(rungs._SWITCHES, "eager", {"warp_drive": True})  # type: ignore[arg-type]
    with pytest.raises(rungs.RungUnavailableError, match="no switch warp_drive"):
        rungs.make_rung("eager", tower)


@pytest.mark.parametrize(
    ("arch", "tflop"),
    [("qwen3_vl", [0.166, 2.655, 5.768, 5.455, 20.634]), ("qwen2_5_vl", [0.326, 5.220, 10.568, 7.564, 29.843])],
)
def test_operations_are_those_of_the_published_table(arch: str, tflop: list[float]) -> None:
    config = config_of(arch, tiny=False, dtype="bfloat16")
    assert [round(shape.tflop, 3) for shape in shapes_of(config, tiny=False)] == tflop


def test_a_seed_gives_one_function_in_any_dtype() -> None:
    config = config_of("qwen3_vl", tiny=True, dtype="bfloat16")
    low = random_tower(config, seed=4, dtype=torch.bfloat16, device=CPU).state_dict()
    high = random_tower(config, seed=4, dtype=torch.float32, device=CPU).state_dict()
    other = random_tower(config, seed=5, dtype=torch.float32, device=CPU).state_dict()
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(low[name].float(), high[name])
    assert not torch.equal(other[name], high[name])


def test_unseen_grids_are_new_and_all_different() -> None:
    config = config_of("qwen2_5_vl", tiny=False, dtype="bfloat16")
    known = [grid for shape in shapes_of(config, tiny=False) for grid in shape.grids]
    pool = unseen_grids(config, known, tiny=False, seed=0)
    assert len(pool) == len(set(pool)) > 6 * 6 * 8  # six ways, six batches, eight images
    assert not set(pool) & set(known)
    assert (1, 32, 32) in known
    assert (1, 32, 32) in unseen_grids(config, [], tiny=False, seed=0)


def test_rounds_take_turns_and_stop_at_the_deadline() -> None:
    called: list[str] = []
    ways = {name: (lambda n, name=name: called.append(name)) for name in "ab"}
    late = measure.Deadline(0.0)
    times = measure.interleaved(ways, rounds=9, warm_ups=1, device=CPU, deadline=late)
    assert called == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert times["a"].rounds == measure.FEWEST_ROUNDS


def test_the_clock_is_read_every_few_rounds_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    read = iter([1980.0, 1500.0, 1700.0, 1600.0])
    monkeypatch.setattr(measure, "sm_mhz", lambda device: next(read))
    deadline = measure.Deadline(60.0)
    ways = {name: (lambda n: None) for name in "ab"}
    times = measure.interleaved(ways, rounds=9, warm_ups=0, device=CPU, deadline=deadline)
    assert {name: one.sm_mhz for name, one in times.items()} == {"a": 1550.0, "b": 1840.0}
    monkeypatch.undo()
    assert measure.sm_mhz(CPU) is None
    cell = {"ms": 1.0, "speedup": 1.0, "tflops": 1.0, "sm_mhz": times["a"].sm_mhz}
    record = {"model": "m", "dtype": "d", "shapes": [{"name": "x"}], "skipped": []}
    row = {"name": "a", "label": "a", "cells": {"x": cell}}
    assert [line.split() for line in ladder_table({**record, "rows": [row]}).splitlines()].count(["a", "1550"]) == 1
    assert "clock" not in ladder_table({**record, "rows": [{**row, "cells": {"x": {**cell, "sm_mhz": None}}}]})


def test_vllms_rows_are_like_the_others() -> None:
    record = {
        "shapes": [{"name": "x", "tflop": 2.0}],
        "rows": [{"cells": {"x": {"ms": 10.0, "tflops": 200.0, "peak_share": 0.25}}}],
    }
    (row,) = peer_vllm.rows({"graphs": {"x": {"ms": 5.0}}}, "compiled", record)
    assert row["name"] == "vllm compiled graphs"
    assert row["cells"]["x"] == {"ms": 5.0, "speedup": 2.0, "tflops": 400.0, "peak_share": 0.5}


def test_of_vllm_the_shapes_are_kept_that_it_got_to() -> None:
    record = {"shapes": [{"name": "x", "tflop": 2.0}, {"name": "y", "tflop": 1.0}], "rows": []}
    (row,) = peer_vllm.rows({"eager": {"x": {"ms": 5.0}}, "graphs": {}}, "launched", record)
    assert row["label"] == "vLLM, eager"
    assert list(row["cells"]) == ["x"]


def test_what_a_process_of_vllm_died_of_is_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    fails = "raise RuntimeError('out of memory')"
    assert peer_vllm._run([sys.executable, "-c", fails], 60.0) == "RuntimeError: out of memory"
    assert "Traceback" in capfd.readouterr().err
    assert peer_vllm._run([sys.executable, "-c", "print('ok')"], 60.0) is None
    assert peer_vllm._run([sys.executable, "-c", "import time; time.sleep(60)"], 0.5) == "cut short after 0 s"


@pytest.mark.parametrize("arch", sorted(SECTIONS))
def test_vllm_is_given_the_published_tower(arch: str, tmp_path: Path) -> None:
    path = peer_vllm.published_files(arch, tmp_path / arch)
    assert VisionConfig.from_checkpoint(path) == config_of(arch, tiny=False, dtype="bfloat16")
    config = json.loads((path / "config.json").read_text())
    text = config.get("text_config", config)
    assert text["hidden_size"] == SECTIONS[arch]["out_hidden_size"]
    rope = text.get("rope_parameters") or text["rope_scaling"]
    assert 2 * sum(rope["mrope_section"]) == text["hidden_size"] // text["num_attention_heads"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ladder", "--only", "eager"], "--only for some"),
        (["--only", "eager,fast"], "'fast' is not one of"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_encoder.parse(arguments)
    assert message in capsys.readouterr().err


def test_a_host_with_torch_alone_can_run_it() -> None:
    """Nothing that it imports needs what only the application needs."""
    absent = ("pydantic", "cachetools", "pebble", "ray", "vllm", "httpx", "starlette", "matplotlib")
    program = (
        f"import sys\nfor name in {absent!r}: sys.modules[name] = None\n"
        "import benchmarks.bench_encoder, benchmarks.gpu_session, benchmarks.peer_transformers"
    )
    output_of_python(program)


def test_nan_is_an_error_that_shows() -> None:
    from benchmarks.ladder import relative_error

    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.ones(1)))
