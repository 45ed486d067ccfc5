"""The `vitray` command: what it prints, refuses and starts; and the check of configurations behind it."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from configs import reference
from configs.resolve import ClusterFacts
from configs.schema import AppConfig
from deployments import app
from deployments.cli import config_check
from deployments.cli import main as cli
from deployments.cli.config_option import default_config
from deployments.common import names, ray_private
from deployments.http_proxy import haproxy
from deployments.http_proxy import limits as proxy_bounds
from deployments.ingress.http import routes
from deployments.vllm import compat
from tests.programs import free_port

ROOT = Path(__file__).parents[4]
VISUAL_TOKEN_POLICY = {"policy_function": config_check.VISUAL_TOKEN_POLICY}
SCALES = {"max_replicas": 2}


def vitray(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


def write_config(path: Path, **changes: object) -> Path:
    """serve_config.yaml with `changes` at dotted places below its application; `top__` for places outside of it."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    for place, value in changes.items():
        names = place.split("__")
        target: Any = config["applications"][0]
        if names[0] == "top":
            target, names = config, names[1:]
        for name in names[:-1]:
            target = target[int(name)] if isinstance(target, list) else target[name]
        target[names[-1]] = value
    path.write_text(yaml.safe_dump(config))
    return path


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


def test_shipped_configuration_passes() -> None:
    result = vitray("check-config", str(ROOT / "serve_config.yaml"))
    assert (result.exit_code, "no mistakes" in result.output) == (0, True)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"top__http_option": {}}, "top level: unknown key 'http_option': did you mean 'http_options'? (Serve would"),
        ({"top__http_options__prot": 1}, "http_options: unknown key 'prot': did you mean 'port'?"),
        ({"top__http_options__port": "abc"}, "http_options.port: Input should be a valid integer"),
        ({"arg": {}}, "applications[0]: unknown key 'arg': did you mean 'args'?"),
        ({"deployments__0__num_replica": 1}, "deployments[0]: unknown key 'num_replica': did you mean 'num_replicas'?"),
        (
            {"deployments__1__autoscaling_config__min_replica": 1},
            "deployments[1].autoscaling_config: unknown key 'min_replica': did you mean 'min_replicas'?",
        ),
        (
            {"deployments__2__ray_actor_options": {"num_gpu": 1}},
            "deployments[2].ray_actor_options: unknown key 'num_gpu': did you mean 'num_gpus'?",
        ),
        (
            {
                "deployments__1__autoscaling_config__policy": VISUAL_TOKEN_POLICY
                | {"policy_kwargs": {"target_delay": 1}}
            },
            "deployments[1].autoscaling_config.policy.policy_kwargs: ScalingTargets.__init__() got an unexpected",
        ),
        (
            {
                "deployments__1__autoscaling_config__policy": VISUAL_TOKEN_POLICY
                | {"policy_kwargs": {"target_utilization": 2}}
            },
            "deployments[1].autoscaling_config.policy.policy_kwargs: target_utilization is 2; it must be over 0",
        ),
        (
            {
                "deployments__2__autoscaling_config": {"max_replicas": 2, "policy": VISUAL_TOKEN_POLICY},
                "deployments__2__num_replicas": None,
            },
            "deployments[2].autoscaling_config.policy.policy_function: deployments.scaling:VisualTokenPolicy is for",
        ),
        (
            {"autoscaling_policy": VISUAL_TOKEN_POLICY},
            "applications[0].autoscaling_policy.policy_function: deployments.scaling:VisualTokenPolicy is for",
        ),
        (
            {"args__encoder__implementation": "none"},
            "deployments[1]: remove this entry: with encoder.implementation: none there is no deployment 'Encoder'",
        ),
        ({"deployments__0__name": "Encodr"}, "deployments[0].name: no deployment 'Encodr'; there are Ingress,"),
        ({"args__modell": "auto"}, "applications[0].args: unknown key 'modell': did you mean 'model'?"),
        ({"args__ingress__hedge_after_s": 1}, "unknown key 'hedge_after_s': it was removed, images are no longer sent"),
        ({"args__llm__fallback": "local"}, "args.llm: unknown key 'fallback': it was removed, language models"),
        ({"args__encoder__dtpye": "auto"}, "applications[0].args.encoder: unknown key 'dtpye': did you mean 'dtype'?"),
        ({"args__encoder__dtype": "float8"}, "applications[0].args.encoder.dtype: Input should be 'auto', 'float32'"),
        ({"args__ingress__request_timeout_s": 0}, "args.ingress.request_timeout_s: Input should be greater than 0"),
        (
            {"args__llm__num_gpus": 0.5, "args__llm__engine_args": {"tensor_parallel_size": 2}},
            "applications[0].args: llm.num_gpus",
        ),
        (
            {"top__http_options__host": "0.0.0.0"},
            "applications[0].args: the server listens on 0.0.0.0 and has no API keys",
        ),
        (
            {"args__ingress__auth": {"mode": "keys"}},
            'applications[0].args.ingress.auth: mode: "keys" needs api_keys_file',
        ),
        (
            {
                "deployments": [
                    {"name": "Ingress", "max_queued_requests": 1},
                    {"name": "LLM", "max_queued_requests": 99},
                ]
            },
            "deployments[1].max_queued_requests: 99 is less than args.ingress.max_requests_waiting, 512",
        ),
        (
            {"deployments": [{"name": "Encoder", "max_queued_requests": 7}]},
            "max_queued_requests: 7 is less than args.ingress.max_images_in_flight, 1024; Serve would refuse",
        ),
        (
            {"deployments__1__autoscaling_config": {"min_replicas": 3, "max_replicas": 1}},
            "deployments[1].autoscaling_config: max_replicas (1) must be greater than or equal to min_replicas (3)",
        ),
        (
            {"deployments__1__autoscaling_config": {"min_replicas": -1}},
            "deployments[1].autoscaling_config.min_replicas: Input should be greater than or equal to 0",
        ),
        (
            {"deployments__2__num_replicas": "auto", "deployments__2__autoscaling_config": {"min_replicas": 101}},
            "deployments[2].autoscaling_config: max_replicas (100) must be greater than or equal to min_replicas (101)",
        ),
        (
            {"deployments__1__user_config": {"x": 1}},
            "deployments[1].user_config: no deployment takes it, and its replicas would not start; settings are",
        ),
        (
            {"args__ingress__request_timeout_s": 900},
            "http_options.request_timeout_s: 610 is not over applications[0].args.ingress.request_timeout_s, 900",
        ),
        (
            {"args__ingress__fetch": {"allowed_domains": ["https://example.org/"]}},
            "args.ingress.fetch: allowed_domains has 'https://example.org/', which no URL's host matches; write host",
        ),
        (
            {"deployments__1__autoscaling_config__policy": "deployments.scaling:VisualTokenPolicy"},
            "deployments[1].autoscaling_config.policy: Input should be a valid dictionary",
        ),
        (
            {"deployments__1__autoscaling_config__policy": {"policy_function": ["deployments.scaling"]}},
            "deployments[1].autoscaling_config.policy.policy_function",
        ),
        (
            {"deployments__1__autoscaling_config__policy": ""},
            "deployments[1].autoscaling_config.policy: Input should be a valid dictionary",
        ),
        (
            {"deployments__1__autoscaling_config__policy": VISUAL_TOKEN_POLICY | {"policy_kwargs": 5}},
            "deployments[1].autoscaling_config.policy.policy_kwargs: Input should be a valid dictionary",
        ),
        (
            {"autoscaling_policy": {"policy_function": ["a"]}},
            "applications[0].autoscaling_policy.policy_function: Input should be a valid string",
        ),
        (
            {"top__http_options__request_timeout_s": "600"},
            "http_options.request_timeout_s: 600 is not over applications[0].args.ingress.request_timeout_s, 600",
        ),
        ({"import_path": "mine:app"}, "applications: none has `import_path: deployments.app:build_app`"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    result = vitray("check-config", str(write_config(tmp_path / "config.yaml", **changes)))
    assert result.exit_code == 1
    assert "1 mistake\n" in result.output
    assert told in result.output


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.yaml", top__prxy=1, args__modell="x", args__encoder__dtpye=1)
    assert len(config_check.problems(config_check.read_config(path))) == 3


def test_an_application_of_somebody_else_may_stand_beside_ours(tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.yaml")
    config = yaml.safe_load(path.read_text())
    config["applications"].append({"name": "other", "route_prefix": "/other", "import_path": "m:a", "args": {"any": 1}})
    assert config_check.problems(config) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [("a: [", "not valid YAML"), ("- 1", "needs a list `applications:`"), ("applications: 3", "needs a list")],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    result = vitray("check-config", str(tmp_path / "config.yaml"))
    assert (result.exit_code, told in result.output) == (1, True)
    assert vitray("check-config", str(tmp_path / "missing.yaml")).exit_code == 2


def test_vllms_names_are_checked_where_vllm_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write_config(tmp_path / "config.yaml", args__llm__engine_args={"max_modle_len": 1}))

    def refuse(engine_args: object, server_args: object, *, own_tower: bool) -> None:
        raise ValueError(f"llm.engine_args: {engine_args}")

    monkeypatch.setattr(compat, "check_args", refuse)
    monkeypatch.setattr(compat, "is_installed", lambda: True)
    refused = vitray("check-config", path)
    assert refused.exit_code == 1
    assert "applications[0].args.llm.engine_args: {'max_modle_len': 1}" in refused.output
    monkeypatch.setattr(compat, "check_args", lambda *_, **__: None)
    stages = str(write_config(tmp_path / "stages.yaml", args__llm__engine_args={"pipeline_parallel_size": 2}))
    assert "only the first stage of a pipeline loads embeddings" in vitray("check-config", stages).output
    monkeypatch.setattr(compat, "is_installed", lambda: False)
    passed = vitray("check-config", path)
    assert (passed.exit_code, "were not checked" in passed.output) == (0, True)


def test_deployments_are_those_of_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "cluster_facts", lambda: ClusterFacts(has_gpu=False))
    monkeypatch.setattr(compat, "is_installed", lambda: False)
    ingress: Any = app.build_app({})._bound_deployment
    below = [bound._bound_deployment.name for bound in ingress.init_kwargs.values()]
    assert (ingress.name, *below) == (names.INGRESS, names.LLM, names.RESPONSE_STORE, names.ENCODER)
    assert (names.INGRESS, names.ENCODER, names.LLM) == names.DEPLOYMENTS


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
        ([{**ENCODERS, "ray_actor_options": {"num_cpus": 4}}], {}, 9.1),
        ([{**ENCODERS, "ray_actor_options": {"num_cpus": "4"}}], {}, 9.1),
        ([{**ENCODERS, "ray_actor_options": {"num_cpus": None}}], {}, 2.1),
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
    assert config_check.reserved_cpus(read) == pytest.approx(num_cpus)
    there = math.ceil(num_cpus)
    assert config_check.start_problems(read, there) == []
    [told] = config_check.start_problems(read, there - 1)
    assert f"reserve {num_cpus:g} CPUs, and this machine has {there - 1}" in told
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "execve", lambda *_: None)
    monkeypatch.setattr(ray_private, "num_cpus", lambda: there - 1)
    assert vitray("serve", "--config", str(path), "--no-haproxy").exit_code == 1
    checked = vitray("check", "--config", str(path), "--json")
    [line] = [line for line in json.loads(checked.output)["lines"] if line["name"] == "CPUs asked for"]
    assert line["failed"]


def test_default_configuration_is_the_working_directorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_config() == ROOT / "serve_config.yaml"
    (tmp_path / "serve_config.yaml").write_text("")
    assert default_config() == Path("serve_config.yaml")
