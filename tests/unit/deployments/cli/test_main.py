"""The `vitray` command: what it prints, refuses and starts."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs import reference
from configs.schema import AppConfig
from deployments.cli import config_check
from deployments.cli import main as cli
from deployments.cli.config_option import default_config
from deployments.common import ray_private
from deployments.http_proxy import haproxy
from deployments.http_proxy import limits as proxy_bounds
from deployments.ingress.http import routes
from tests.programs import free_port
from tests.unit.deployments.cli.commands import ROOT, vitray, write_config


def test_make_clean_names_every_folder_of_python_files() -> None:
    """`make clean` left __pycache__ in planner, benchmarks and examples."""
    (cleaned,) = re.findall(r"^\tfind (.*) -name __pycache__", (ROOT / "Makefile").read_text(), re.MULTILINE)
    folders = {path.parent.name for path in ROOT.glob("*/*.py")}
    assert folders - {"build"} <= set(cleaned.split())


def test_help_says_what_each_command_does_and_loads_nothing_heavy() -> None:
    result = vitray("--help")
    assert result.exit_code == 0
    for name, command in cli.main.commands.items():
        assert command.help, name
        assert name in result.output
        assert f"vitray {name}" in command.help, f"{name} has no example"
    heavy = ["ray", "torch", "vllm", "pydantic", "transformers", "httpx", "numpy", "PIL", "yaml"]
    source = (
        "import sys; from click.testing import CliRunner; from deployments.cli import main as cli;"
        "assert CliRunner().invoke(cli.main, ['--help']).exit_code == 0;"
        f"assert not set({heavy}) & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], check=False, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_routes_lists_every_route() -> None:
    listed = vitray("routes").output
    for route in routes.ROUTES:
        assert f" {route.path} " in listed
        assert route.note in listed


def test_settings_lists_every_field_with_its_meaning() -> None:
    listed = {setting.key: setting for setting in reference.settings()}
    assert set(listed) == set(leaves(AppConfig().model_dump()))
    assert listed["encoder_replica.cache_bytes"].default == "2147483648 (2 GiB)"
    assert listed["encoder_replica.num_gpus"].values == '"auto" or number ≥ 0'
    assert listed["ingress.fetch.http"].default == "false"
    assert listed["encoder.dtype"].values == '"auto", "float32", "bfloat16"'
    assert listed["llm.accelerator_type"].default == "null"
    verbose = listed["encoder.encoder_cudagraph_verbose"]
    assert verbose.meaning == "Log every batch: images, tokens, budget, padding."
    printed = vitray("settings").output
    assert all(setting.key in printed and setting.meaning in printed for setting in listed.values())


def leaves(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of what is no group of settings; a mapping that is a setting's own default is empty."""
    return [
        name
        for key, value in values.items()
        for name in (leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key])
    ]


@pytest.mark.parametrize(
    ("option", "variable", "address"),
    [
        ([], None, "local"),
        ([], "", "local"),
        (["--address", "local"], "10.0.0.1:6379", "local"),
        ([], "10.0.0.1:6379", "10.0.0.1:6379"),
        ([], "auto", "auto"),
        (["--address", "10.0.0.2:6379"], "10.0.0.1:6379", "10.0.0.2:6379"),
    ],
)
def test_serve_becomes_serve_run(
    option: list[str], variable: str | None, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Always with an address: without one, Ray would join a cluster of `ray start` on this machine."""
    started: list[list[str]] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setattr(os, "execve", lambda program, arguments, _: started.append([str(program), *arguments[1:]]))
    path = str(write_config(tmp_path / "config.yaml", top__http_options__port=free_port()))
    program = str(Path(sys.executable).with_name("serve"))
    assert vitray("serve", "--config", path, *option, "--no-haproxy").exit_code == 0
    assert started == [[program, "run", "--app-dir", str(ROOT), "--address", address, path]]


def test_serve_starts_haproxy_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    path = str(write_config(tmp_path / "config.yaml", top__http_options__port=free_port()))

    def starts_with_haproxy(*arguments: str, **variables: str) -> bool:
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        monkeypatch.setattr(os, "environ", own | variables)
        monkeypatch.setattr(os, "execve", lambda *called: started.append(called[2]))
        assert vitray("serve", "--config", path, *arguments).exit_code == 0
        if haproxy.ENABLED not in started[-1]:
            return False
        Path(started[-1]["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent.rmdir()
        return True

    assert starts_with_haproxy()
    assert started[-1].items() >= (haproxy.SETTINGS | {proxy_bounds.VARIABLE: proxy_bounds.IMPORT_PATH}).items()
    assert Path(started[-1][haproxy.PROGRAM]).is_file()
    assert starts_with_haproxy("--haproxy", "--address", "local", **{haproxy.CLIENT_TIMEOUT: "7"})
    assert started[-1][haproxy.CLIENT_TIMEOUT] == "7", "the operator's own"
    assert not starts_with_haproxy("--no-haproxy")
    assert not starts_with_haproxy("--address", "10.0.0.1:6379")
    assert not starts_with_haproxy(RAY_ADDRESS="10.0.0.1:6379")
    refused = vitray("serve", "--config", path, "--haproxy", "--address", "10.0.0.1:6379")
    assert refused.exit_code == 2
    assert "docs/deploy.md" in refused.output
    monkeypatch.setattr(haproxy, "is_installed", lambda: False)
    assert not starts_with_haproxy()
    refused = vitray("serve", "--config", path, "--haproxy")
    assert (refused.exit_code, len(started)) == (1, 6)
    assert "not installed" in refused.output


def test_serve_starts_nothing_with_a_mistake_in_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    path = str(write_config(tmp_path / "config.yaml", args__modell="x"))
    assert vitray("serve", "--config", path, "--no-haproxy").exit_code == 1
    assert started == []
    assert vitray("serve", "--config", path, "--no-haproxy", "--no-check").exit_code == 0
    assert len(started) == 1


def test_serve_starts_nothing_on_a_port_that_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy's error stood in the middle of 173 lines, and requests went to the other server."""
    started: list[object] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        path = str(write_config(tmp_path / "config.yaml", top__http_options={"host": "127.0.0.1", "port": port}))
        refused = vitray("serve", "--config", path, "--no-haproxy")
        assert refused.exit_code == 1
        assert f"another process listens on port {port}" in refused.output
        assert started == []
        assert vitray("check-config", path).exit_code == 0, "it may be for another machine"
        assert vitray("serve", "--config", path, "--address", "10.0.0.1:6379").exit_code == 0


ENCODERS, LLMS = ({"name": name, "num_replicas": 2} for name in ("Encoder", "LLM"))
SCALED: dict[str, Any] = {"name": "Encoder", "autoscaling_config": {"min_replicas": 0, "max_replicas": 8}}
FROM_THREE = {"min_replicas": 0, "initial_replicas": 3, "max_replicas": 8}


@pytest.mark.parametrize(
    ("deployments", "args", "num_cpus"),
    [
        ([], {}, 1.6),
        ([ENCODERS], {}, 2.1),
        ([ENCODERS, LLMS], {}, 3.1),
        ([SCALED], {}, 1.1),
        ([{**SCALED, "autoscaling_config": FROM_THREE}], {}, 2.6),
        ([ENCODERS], {"encoder_replica": {"num_cpus": 4}}, 9.1),
        ([LLMS], {"encoder": {"implementation": "none"}, "llm": {"num_cpus": 0.75}}, 1.6),
    ],
)
def test_serve_starts_nothing_whose_cpus_are_not_there(
    deployments: list[object], args: dict[str, object], num_cpus: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two encoders on two cores: the ingress waited for a tenth of a core, and the server answered nothing."""
    settings = {"model": "auto", **args}
    changes: dict[str, object] = {"deployments": deployments, "args": settings, "top__http_options__port": free_port()}
    path = write_config(tmp_path / "config.yaml", **changes)
    read = config_check.read_config(path)
    there = math.ceil(num_cpus)
    assert ("CPUs", num_cpus, there) in config_check.reservations(read, there, 0)
    assert config_check.start_problems(read, there, 0) == []
    [told] = config_check.start_problems(read, there - 1, 0)
    assert f"reserve {num_cpus:g} CPUs, and this machine has {there - 1}" in told
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "execve", lambda *_: None)
    monkeypatch.setattr(ray_private, "num_cpus", lambda: there - 1)
    assert vitray("serve", "--config", str(path), "--no-haproxy").exit_code == 1
    checked = vitray("check", "--config", str(path), "--json")
    [line] = [line for line in json.loads(checked.output)["lines"] if line["name"] == "CPUs asked for"]
    assert line["failed"]


ON_ONE = {"encoder_replica": {"num_gpus": 0.2}, "llm": {"num_gpus": 0.8}}


@pytest.mark.parametrize(
    ("deployments", "args", "there", "num_gpus"),
    [
        ([], {}, 0, 0.0),
        ([], {}, 1, 2.0),
        ([], {"encoder": {"implementation": "none"}}, 1, 1.0),
        ([], {"llm": {"engine_args": {"tensor_parallel_size": 2}}}, 2, 3.0),
        ([], ON_ONE, 0, 1.0),
        ([], ON_ONE, 1, 1.0),
        ([ENCODERS], {**ON_ONE, "llm": {"num_gpus": 0.7}}, 1, 1.1),
    ],
)
def test_serve_starts_nothing_whose_gpus_are_not_there(
    deployments: list[object], args: dict[str, object], there: int, num_gpus: float, tmp_path: Path
) -> None:
    changes: dict[str, object] = {"deployments": deployments, "args": args, "top__http_options__port": free_port()}
    read = config_check.read_config(write_config(tmp_path / "config.yaml", **changes))
    assert ("GPUs", num_gpus, there) in config_check.reservations(read, 64, there)
    told = config_check.start_problems(read, 64, there)
    expected = f"the replicas reserve {num_gpus:g} GPUs, and this machine has {there}: some would wait for ever"
    assert [problem.startswith(expected) for problem in told] == [True] * (num_gpus > there)


def test_default_configuration_is_the_working_directorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_config() == ROOT / "serve_config.yaml"
    (tmp_path / "serve_config.yaml").write_text("")
    assert default_config() == Path("serve_config.yaml")
