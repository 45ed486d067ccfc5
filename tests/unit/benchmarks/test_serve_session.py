"""The end-to-end session: what it plans, the configurations and commands it writes, and what it makes of the answers.

Nothing here starts Ray or vLLM; servers are played by a small one over real HTTP, or by programs that end at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer

from benchmarks import bench_serving, bench_start
from benchmarks.bench_serving import Load, Options, requests, rotate_names, rows, run_with_timeout, warm
from benchmarks.ladder import rungs
from benchmarks.ladder.steps import MINUTES
from benchmarks.peers import vllm_tower
from benchmarks.record import ROOT
from benchmarks.serving import plan as serving_plan
from benchmarks.serving import serve_session, servers
from benchmarks.serving.checkpoint import make_published
from benchmarks.serving.latency_client import Answer
from benchmarks.serving.latency_figures import overheads
from benchmarks.serving.plan import Served, engine_args, list_servers, serve_config, vllm_command, vllm_environment
from configs.resolve import ClusterFacts, resolve
from configs.schema import AppConfig
from deployments.cli.config_check import problems
from deployments.vllm import compat
from encoder.checkpoint.vision_config import VisionConfig
from encoder.towers.weights import load_tower
from tests.programs import output_of_python
from tests.threaded import serving
from training.checkpoints import make_checkpoint

LOAD = Load(((32, 24),), 5, 3, 4, 2, 6, float("inf"), again=2, again_side=32)
GPU = ClusterFacts(has_gpu=True)


@pytest.mark.parametrize("tiny", [False, True])
def test_each_step_is_a_program_that_understands_its_options(tmp_path: Path, tiny: bool) -> None:
    start, serving = serve_session.steps(tmp_path, commit="abc", rungs="eager,fusion", tiny=tiny)
    for step, module in ((start, bench_start), (serving, bench_serving)):
        assert (ROOT / step.command[1]).is_file()
        asked = module.parse([part.replace(MINUTES, "1.5") for part in step.command[2:]])
        assert (asked.minutes, asked.commit, asked.tiny) == (1.5, "abc", tiny)
        assert asked.out == tmp_path / f"{step.name}.json"
    assert bench_serving.parse(list(serving.command[4:])).rungs == ("eager", "fusion")


def test_a_step_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_session.main([str(tmp_path), "--only", "serving,lunch"])
    assert "--only names lunch; the steps here: start, serving" in capsys.readouterr().err


def test_every_rung_that_the_encoder_has_is_served_and_vllm_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rungs._SWITCHES, "compile", {"warp_drive": True})
    served, skipped = list_servers(("eager", "compile", "fusion"), gpu=True, peers=True)
    assert [one.name for one in served] == [
        "eager",
        "fusion",
        "fusion-llm-eager",
        "fusion-asking",
        "vllm",
        "vllm-graphs",
        "vllm-1thread",
        "vllm-4api",
    ]
    assert [one.llm_graphs for one in served] == [True, True, False, True, True, True, True, True]
    assert len({one.label for one in served}) == len(served)
    assert skipped == [{"name": "compile", "reason": "the encoder has no switch warp_drive"}]
    without, _ = list_servers(("eager",), gpu=False, peers=False)
    assert [one.name for one in without] == ["eager"]


@pytest.mark.parametrize("gpu", [True, False])
def test_the_configuration_is_one_that_the_application_takes(tmp_path: Path, gpu: bool) -> None:
    served, _ = list_servers(gpu=gpu, peers=True)
    config = serve_config(served, tmp_path, gpu=gpu, port=8123)
    assert problems(yaml.safe_load(yaml.safe_dump(config))) == []
    assert config["http_options"]["request_timeout_s"] > serving_plan.REQUEST_TIMEOUT_S
    applications = {one["name"]: one for one in config["applications"]}
    assert list(applications) == [one.name for one in served if one.rung is not None]
    total = 0.0
    for name, application in applications.items():
        assert application["route_prefix"] == f"/{name}"
        found = resolve(AppConfig.model_validate(application["args"]), GPU if gpu else ClusterFacts(has_gpu=False))
        assert isinstance(found.encoder_replica.num_gpus, float)
        assert isinstance(found.llm.num_gpus, float)
        total += found.encoder_replica.num_gpus + found.llm.num_gpus
        if gpu:
            share = found.llm.engine_args["gpu_memory_utilization"]
            assert share == pytest.approx(0.95 * serving_plan.LLM_SHARE)
        for key, value in rungs.switches_of(re.sub("-(llm-eager|asking)$", "", name)).items():
            assert getattr(found.encoder, key) == value
        # The first image starts an encoder, alone on the GPU then.
        scaling = next(d for d in application["deployments"] if d["name"] == "Encoder")["autoscaling_config"]
        assert (scaling["min_replicas"], scaling["initial_replicas"], scaling["max_replicas"]) == (0, 0, 1)
    peers = sum(one.rung is None for one in served) * serving_plan.LLM_SHARE if gpu else 0.0
    assert total + peers <= (1.0 if gpu else 0.0)


def test_a_model_without_a_tower_of_ours_has_vllms_class_and_graphs(tmp_path: Path) -> None:
    served, _ = list_servers(("eager", "cudagraph"), gpu=True, peers=True, generic=True)
    config = serve_config(served, tmp_path, gpu=True, port=8123)
    encoders = {one["name"]: one["args"]["encoder"] for one in config["applications"]}
    assert encoders == {
        name: {"implementation": "vllm", "cudagraph_mm_encoder": name == "cudagraph"} for name in ("eager", "cudagraph")
    }
    assert problems(yaml.safe_load(yaml.safe_dump(config))) == []
    graphs = engine_args(next(one for one in served if one.name == "vllm-graphs"), gpu=True)["compilation_config"]
    assert graphs["cudagraph_mm_encoder"] is True
    assert "encoder_cudagraph_token_budgets" not in graphs, "those of Qwen's tower"


def test_all_language_models_are_alike_but_for_the_switch(tmp_path: Path) -> None:
    served = {one.name: one for one in list_servers(gpu=True, peers=True)[0]}
    plain = engine_args(served["eager"], gpu=True)
    assert engine_args(served["vllm"], gpu=True) == plain
    graphs = engine_args(served["vllm-graphs"], gpu=True)
    assert graphs["compilation_config"]["cudagraph_mm_encoder"] is True
    assert graphs["compilation_config"]["cudagraph_mode"] == plain["compilation_config"]["cudagraph_mode"]
    assert {**graphs, "compilation_config": None} == {**plain, "compilation_config": None}
    launched = engine_args(served["fusion-llm-eager"], gpu=True)
    assert launched.pop("enforce_eager") is True
    assert {**plain, "compilation_config": None} == {**launched, "compilation_config": None}


def test_vllm_alone_is_started_by_its_module_with_its_own_names(tmp_path: Path) -> None:
    served = {one.name: one for one in list_servers(gpu=True, peers=True)[0]}
    command = vllm_command(served["vllm-graphs"], tmp_path, gpu=True, port=8200)
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    command.remove("--disable-uvicorn-access-log")
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options["--model"] == str(tmp_path)
    assert options["--served-model-name"] == serving_plan.MODEL
    assert json.loads(options["--limit-mm-per-prompt"]) == {"image": 16, "video": 0}
    assert json.loads(options["--compilation-config"])["encoder_cudagraph_token_budgets"] == vllm_tower.BUDGETS
    assert float(options["--gpu-memory-utilization"]) == serving_plan.LLM_SHARE
    on_cpu = vllm_command(served["vllm"], tmp_path, gpu=False, port=8200)
    assert "--enforce-eager" in on_cpu
    assert "True" not in on_cpu
    assert vllm_environment(served["vllm-graphs"]) == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert vllm_environment(served["vllm-1thread"]) == {"VLLM_USE_V2_MODEL_RUNNER": "0", "OMP_NUM_THREADS": "1"}
    assert vllm_environment(served["vllm"]) == {}
    several = vllm_command(served["vllm-4api"], tmp_path, gpu=True, port=8200)
    assert several[1:6] == ["-m", "benchmarks.peers.vllm_serve", "serve", "--api-server-count", "4"]
    assert several[6:] == vllm_command(served["vllm"], tmp_path, gpu=True, port=8200)[3:]


@pytest.mark.slow
def test_vllm_understands_the_options_that_it_is_given(tmp_path: Path) -> None:
    """By its own parser; names are those of vLLM on the GPU as far as both versions have them."""
    pytest.importorskip("vllm", reason="vLLM's parser is vLLM's")
    served = {one.name: one for one in list_servers(gpu=True, peers=True)[0]}
    command = vllm_command(served["vllm-graphs"], tmp_path, gpu=True, port=8200)
    found = compat.lookup("make_arg_parser")(compat.lookup("FlexibleArgumentParser")()).parse_args(command[3:])
    assert (found.kv_cache_memory_bytes, found.max_num_seqs) == (2 * 1024**3, 32)
    assert found.compilation_config


def test_rounds_share_the_text_one_by_one_and_no_picture_comes_twice() -> None:
    rounds = [requests(LOAD, number) for number in (-1, 0, 1)]

    def parts(body: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = body["messages"][0]["content"]
        return found

    assert len({parts(body)[0]["text"] for latency, _ in rounds for body in latency}) == 1
    texts = [parts(body)[0]["text"] for _, opened in rounds for body in opened]
    assert len(set(texts)) == len(texts)
    pictures = [parts(body)[1]["image_url"]["url"] for pair in rounds for bodies in pair for body in bodies]
    assert len(set(pictures)) == len(pictures) == 3 * (LOAD.latency_requests + LOAD.prompts)
    assert {body["max_tokens"] for _, opened in rounds for body in opened} == {6}


def test_each_server_is_first_in_turn() -> None:
    assert [rotate_names(["a", "b", "c"], number) for number in range(3)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
    ]
    assert rotate_names([], 4) == []


def test_what_takes_too_long_is_given_up() -> None:
    async def slow() -> int:
        await asyncio.sleep(60)
        return 1

    async def quick() -> int:
        return 2

    began = time.monotonic()
    assert run_with_timeout(slow(), 0.0) is None
    assert time.monotonic() - began < 30
    assert run_with_timeout(quick(), 5.0) == 2


class Handler(BaseHTTPRequestHandler):
    """Answers /health, and any chat with two words and where the time went."""

    def do_GET(self) -> None:
        self._answer(b"", {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": "word "}}]}] * 2
        events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        timing = 'preprocess;dur=2.0, encode;dur=3.5, cache;desc="0/1"'
        self._answer(text.encode(), {"content-type": "text/event-stream", "server-timing": timing})

    def _answer(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "content-length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Silent."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}"


def test_answers_of_all_rounds_come_together(url: str) -> None:
    served, other = Served("eager", "Eager", "eager"), Served("vllm", "vLLM", None)
    asked = Options()
    assert run_with_timeout(warm(url, asked, LOAD), 30) is True
    for number in range(2):
        run_with_timeout(bench_serving.measure(url, asked, LOAD, number, requests(LOAD, number)), 30)
    made = rows([served, other], {"eager": asked, "vllm": Options()}, {"eager": 12.0}, {"commit": "abc"})
    assert list(made) == ["Eager"]  # nothing is said of what was not measured
    row = made["Eager"]
    assert (row["latency_requests"], row["latency_failed"]) == (2 * LOAD.latency_requests, 0)
    assert row["stages_ms"] == {"preprocess": 2.0, "encode": 3.5}
    assert row["serving"]["successful"] == 2 * LOAD.prompts
    assert row["serving"]["duration_s"] == pytest.approx(asked.serving_s)
    assert (row["ready_s"], row["commit"], row["rung"]) == (12.0, "abc", "eager")
    assert row["first_answer_s"] > 0
    assert (row["again_requests"], row["again_failed"], row["again_stages_ms"]["encode"]) == (2 * LOAD.again, 0, 3.5)
    alone = {**row, "rung": None, "again_ms": {"median": row["again_ms"]["median"] - 4.25}}
    assert "+4.25 ms over vLLM alone" in overheads({"Eager": row, "vLLM": alone})


def test_failures_are_counted() -> None:
    asked = Options(latency=[Answer(200, "", [0.1], 0.2, 1, 1), Answer(503, "full")], serving=[Answer(503, "full")])
    asked.serving_s = 1.0
    row = rows([Served("a", "A", "eager")], {"a": asked}, {}, {})["A"]
    assert (row["latency_requests"], row["latency_failed"], row["serving"]["failed"]) == (1, 1, 1)


def test_a_server_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    """And what it said last is told, and kept."""
    program = "import sys; print('ValueError: no such tower'); sys.exit(3)"
    peer = servers.Peer("vllm", [sys.executable, "-c", program], servers.peer_port(0))
    with servers.Servers(None, [peer], gpu=False, logs=tmp_path / "logs") as started:
        began = time.monotonic()
        assert started.wait(60.0) == {}
        assert time.monotonic() - began < 30
        assert started.last_words("vllm") == "ValueError: no such tower"
    assert "no such tower" in (tmp_path / "logs" / "vllm.log").read_text()


def test_all_that_is_started_has_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer, and the application behind `serve run`."""
    given: list[Mapping[str, str]] = []

    class Noting:
        started = ended = False

        def __init__(self, config: object, environment: Mapping[str, str]) -> None:
            given.append(environment)

        def start(self) -> None:
            """Nothing."""

    monkeypatch.setattr(servers, "LocalApp", Noting)
    config = {"http_options": {"port": 1}, "applications": []}
    peer = servers.Peer("vllm", [sys.executable, "-c", "import os; raise ValueError(os.environ['PART'])"], 2)
    logs, variables = tmp_path / "logs", {"PART": "a half"}
    with servers.Servers(config, [peer], gpu=False, logs=logs, variables=variables) as started:
        started.wait(60.0)
    assert "ValueError: a half" in (logs / "vllm.log").read_text()
    assert [environment["PART"] for environment in given] == ["a half"]


def test_nobody_is_waited_for_where_one_has_ended(tmp_path: Path) -> None:
    """Half a machine's time went by before a comparison whose servers had failed to start was given up."""
    sleeps, ends = ([sys.executable, "-c", code] for code in ("import time; time.sleep(600)", "raise SystemExit(3)"))
    members = [servers.Peer("sleeps", sleeps, 1), servers.Peer("ends", ends, 2)]
    with servers.Servers(None, members, gpu=False, logs=tmp_path) as started:
        began = time.monotonic()
        assert started.wait(120.0) == {}
        assert time.monotonic() - began < 60


def test_a_server_that_answers_is_ready_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "health").write_text("")
    port = servers.peer_port(0)
    peer = servers.Peer("vllm", [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"], port)
    monkeypatch.setattr(servers, "ROOT", tmp_path)
    with servers.Servers(None, [peer], gpu=False, logs=tmp_path / "logs") as started:
        assert list(started.wait(60.0)) == ["vllm"]
        process = started._peers["vllm"]
    assert process.poll() is not None


def test_the_checkpoint_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small tower: every tensor that a tower needs is there and is used."""
    from benchmarks.serving import checkpoint as serving_checkpoint

    monkeypatch.setattr(
        serving_checkpoint, "published_files", lambda arch, folder, **_: make_checkpoint(arch, folder, dtype="bfloat16")
    )
    for arch in ("qwen3_vl", "qwen2_5_vl"):
        folder = make_published(arch, tmp_path / arch)
        tower = load_tower(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
        grids = [(1, 4, 4)]
        patches = torch.randn(16, VisionConfig.from_checkpoint(folder).patch_dim, dtype=torch.bfloat16)
        tokens = tower(patches, tower.prepare(grids))
        assert bool(tokens.isfinite().all())
        assert float(tokens.float().std()) > 0.01
        head = load_file(folder / "model.safetensors")["lm_head.weight"]
        spoken = [
            Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token(int(i)) for i in head.any(1).nonzero()
        ]
        assert len(spoken) > 52
        assert all(word is not None and word.isascii() and word.isalpha() for word in spoken)


@pytest.mark.slow
def test_starts_are_measured_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_start, "STARTS", bench_start.STARTS[1:3])
    monkeypatch.setattr(bench_start, "_with_bytecode", _with_bytecode_as_it_is)
    out = tmp_path / "start.json"
    assert bench_start.main(["--tiny", "--rungs", "eager", "--out", str(out), "--commit", "abc"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(out.read_text()) == report
    assert [(row["capture"], row["state"]) for row in report["rows"]] == list(bench_start.STARTS)
    for row in report["rows"]:
        seconds = row["seconds"]
        assert seconds["ready_after_weights"] == pytest.approx(
            seconds["from_checkpoint"] - seconds["weights"] + seconds["warm_up"]
        )
        assert seconds["first_image_after_weights"] > seconds["ready_after_weights"]
        assert row["process_s"] > seconds["from_checkpoint"]


def _with_bytecode_as_it_is(_: Path) -> dict[str, str]:
    """Compiling torch's modules anew takes longer than all else of a start."""
    return dict(os.environ)


def test_a_start_keeps_its_bytecode_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    kept = bench_start._with_bytecode(Path("/state"))
    assert kept["PYTHONPYCACHEPREFIX"] == "/state/bytecode"
    assert "PYTHONDONTWRITEBYTECODE" not in kept
    assert kept["PATH"] == os.environ["PATH"]


def test_a_start_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_start, "_with_bytecode", _with_bytecode_as_it_is)
    found = bench_start._child(tmp_path, {"fused_kernels": True}, tmp_path / "state", tmp_path / "found.json")
    assert found["error"].startswith("1: ")


def test_options_of_a_start_are_checked_and_its_child_imports_torch_later() -> None:
    with pytest.raises(SystemExit):
        bench_start.parse(["--rungs", "eager,fast"])
    program = "import sys, benchmarks.bench_start as b; b.parse(['--child', '1']); assert 'torch' not in sys.modules"
    output_of_python(program)


@pytest.mark.parametrize("arguments", [["--rungs", "eager,fast"], ["--rounds", "0"], ["--side", "0"]])
def test_bad_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench_serving.parse(arguments)
