"""The `vitray` command: what it prints, refuses and starts; and the check of configurations behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from configs import reference
from configs.encoder_config import EncoderConfig
from configs.resolve import ClusterFacts
from configs.schema import AppConfig
from deployments import app, check_config, check_policies, cli, haproxy, routes, scaling, vllm_compat

ROOT = Path(__file__).parent.parent.parent
VISUAL_WORK = {"policy_function": check_policies.VISUAL_WORK}
PROPORTION = {"policy_function": check_policies.PROPORTION}
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
        "import sys; from click.testing import CliRunner; from deployments import cli;"
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
    assert vitray("routes", "--markdown").output == routes.table() + "\n"


def test_settings_lists_every_field_with_its_meaning() -> None:
    listed = {setting.key: setting for setting in reference.settings()}
    assert set(listed) == set(leaves(AppConfig().model_dump()))
    assert listed["encoder_replica.cache_bytes"].default == "2147483648 (2 GiB)"
    assert listed["encoder_replica.num_gpus"].values == '"auto" or number ≥ 0'
    assert listed["ingress.fetch.http"].default == "false"
    assert listed["encoder.dtype"].values == '"auto", "float32", "bfloat16"'
    assert listed["llm.accelerator_type"].default == "null"
    verbose = "encoder_cudagraph_verbose"
    assert listed[f"encoder.{verbose}"].meaning == reference.field_docstrings(EncoderConfig)[verbose] != ""
    printed = vitray("settings").output
    assert all(setting.key in printed and setting.meaning in printed for setting in listed.values())
    assert vitray("settings", "--markdown").output == reference.markdown() + "\n"


def leaves(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of what is no group of settings; a mapping that is a setting's own default is empty."""
    return [
        name
        for key, value in values.items()
        for name in (leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key])
    ]


def test_checkpoint_is_made_and_kept(tmp_path: Path) -> None:
    out = str(tmp_path / "small")
    assert vitray("checkpoint", "--arch", "qwen3_vl", "--out", out).output == out + "\n"
    weights = tmp_path / "small" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert vitray("checkpoint", "--arch", "qwen3_vl", "--out", out).exit_code == 0
    assert weights.stat().st_mtime_ns == before


def test_checkpoint_refuses_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    result = vitray("checkpoint", "--arch", "qwen2_5_vl", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "name another folder" in result.output
    assert (tmp_path / "mine.txt").read_text() == "kept"
    assert vitray("checkpoint", "--arch", "llava", "--out", str(tmp_path)).exit_code == 2


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
            {"deployments__1__autoscaling_config__policy": VISUAL_WORK | {"policy_kwargs": {"target_delay": 1}}},
            "deployments[1].autoscaling_config.policy.policy_kwargs: VisualWork.__init__() got an unexpected keyword",
        ),
        (
            {"deployments__1__autoscaling_config__policy": VISUAL_WORK | {"policy_kwargs": {"busy_share": 2}}},
            "deployments[1].autoscaling_config.policy.policy_kwargs: busy_share is 2; it must be over 0 and at most 1",
        ),
        (
            {
                "deployments__2__autoscaling_config": {"max_replicas": 2, "policy": VISUAL_WORK},
                "deployments__2__num_replicas": None,
            },
            "deployments[2].autoscaling_config.policy.policy_function: deployments.scaling:VisualWork is for the",
        ),
        (
            {"deployments__1__autoscaling_config__policy": PROPORTION},
            "deployments[1].autoscaling_config.policy.policy_function: deployments.scaling:Proportion is for the app",
        ),
        (
            {"autoscaling_policy": VISUAL_WORK},
            "applications[0].autoscaling_policy.policy_function: deployments.scaling:VisualWork is for the deployment",
        ),
        (
            {
                "autoscaling_policy": PROPORTION | {"policy_kwargs": {"llm": {"target_requests": 0}}},
                "deployments__2__autoscaling_config": SCALES,
                "deployments__2__num_replicas": None,
            },
            "applications[0].autoscaling_policy.policy_kwargs: target_requests is 0; it must be over 0",
        ),
        (
            {"autoscaling_policy": PROPORTION},
            "autoscaling_policy: deployments.scaling:Proportion scales neither without an `autoscaling_config` of the "
            "deployment 'LLM'",
        ),
        ({"deployments__0__name": "Encodr"}, "deployments[0].name: no deployment 'Encodr'; there are Ingress,"),
        ({"args__modell": "auto"}, "applications[0].args: unknown key 'modell': did you mean 'model'?"),
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
            {"args__ingress__door": {"authentication": "keys"}},
            'applications[0].args.ingress.door: authentication: "keys" needs api_keys_file',
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
    assert len(check_config.problems(check_config.read_config(path))) == 3


def test_an_application_of_somebody_else_may_stand_beside_ours(tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.yaml")
    config = yaml.safe_load(path.read_text())
    config["applications"].append({"name": "other", "route_prefix": "/other", "import_path": "m:a", "args": {"any": 1}})
    assert check_config.problems(config) == []


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

    def refuse(engine_args: object, server_args: object) -> None:
        raise ValueError(f"llm.engine_args: {engine_args}")

    monkeypatch.setattr(vllm_compat, "check_args", refuse)
    monkeypatch.setattr(vllm_compat, "is_installed", lambda: True)
    refused = vitray("check-config", path)
    assert refused.exit_code == 1
    assert "applications[0].args.llm.engine_args: {'max_modle_len': 1}" in refused.output
    monkeypatch.setattr(vllm_compat, "is_installed", lambda: False)
    passed = vitray("check-config", path)
    assert (passed.exit_code, "were not checked" in passed.output) == (0, True)


def test_deployments_are_those_of_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "cluster_facts", lambda: ClusterFacts(has_gpu=False))
    monkeypatch.setattr(vllm_compat, "is_installed", lambda: False)
    ingress = app.build_app({})._bound_deployment
    below = [bound._bound_deployment.name for bound in ingress.init_kwargs.values()]
    assert (ingress.name, *below) == (scaling.INGRESS, scaling.LLM, scaling.ENCODER)
    assert (scaling.INGRESS, scaling.ENCODER, scaling.LLM) == check_config.DEPLOYMENTS


def test_a_policy_of_the_whole_application_is_in_order(tmp_path: Path) -> None:
    kwargs = {"encoder": {"busy_share": 0.4}, "llm": {"target_requests": 32}, "gpus": 8}
    changes = {"deployments__1__autoscaling_config": SCALES, "deployments__2__autoscaling_config": SCALES}
    policy = PROPORTION | {"policy_kwargs": kwargs}
    path = write_config(tmp_path / "config.yaml", autoscaling_policy=policy, **changes)
    config = check_config.read_config(path)
    config["applications"][0]["deployments"][2].pop("num_replicas")  # type: ignore[index]
    assert check_config.problems(config) == []


def test_serve_becomes_serve_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append([str(program), *arguments[1:]]))
    path = str(write_config(tmp_path / "config.yaml"))
    program = str(Path(sys.executable).with_name("serve"))
    assert vitray("serve", "--config", path, "--address", "local").exit_code == 0
    assert started == [[program, "run", "--app-dir", str(ROOT), "--address", "local", path]]


def test_serve_with_the_other_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment: list[dict[str, str]] = []
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"})
    monkeypatch.setattr(os, "execv", lambda *_: environment.append(dict(os.environ)))
    path = str(write_config(tmp_path / "config.yaml"))
    assert vitray("serve", "--config", path).exit_code == 0
    assert vitray("serve", "--config", path, "--haproxy").exit_code == 0
    for name in ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"):
        assert [name in each for each in environment] == [False, True]
    assert environment[1][haproxy.CLIENT_TIMEOUT] == "60"
    monkeypatch.setitem(os.environ, haproxy.CLIENT_TIMEOUT, "7")
    assert haproxy.environment(tmp_path.parent)[haproxy.CLIENT_TIMEOUT] == "7", "the operator's own"
    made = Path(environment[1]["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent
    assert made.is_dir()
    made.rmdir()
    refused = vitray("serve", "--config", path, "--haproxy", "--address", "10.0.0.1:6379")
    assert (refused.exit_code, len(environment)) == (2, 2)
    assert "docs/deploy.md" in refused.output
    with pytest.raises(ValueError, match="107 at most"):
        haproxy.environment(tmp_path / ("long" * 30))


def test_serve_starts_nothing_with_a_mistake_in_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(os, "execv", lambda *arguments: started.append(arguments))
    path = str(write_config(tmp_path / "config.yaml", args__modell="x"))
    assert vitray("serve", "--config", path).exit_code == 1
    assert started == []
    assert vitray("serve", "--config", path, "--no-check").exit_code == 0
    assert len(started) == 1


def test_default_configuration_is_the_working_directorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.default_config() == ROOT / "serve_config.yaml"
    (tmp_path / "serve_config.yaml").write_text("")
    assert cli.default_config() == Path("serve_config.yaml")
