"""The check of configurations: each mistake is named with its place, whatever Serve accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.resolve import ClusterFacts
from deployments import app
from deployments.cli import config_check
from deployments.common import names
from deployments.vllm import compat
from tests.programs import free_port
from tests.unit.deployments.cli.commands import ROOT, vitray, write_config

VISUAL_TOKEN_POLICY = {"policy_function": config_check.VISUAL_TOKEN_POLICY}
SCALES = {"max_replicas": 2}


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
            {"deployments__1__ray_actor_options": {"num_cpus": 2}},
            "deployments[1].ray_actor_options: Serve would replace all that the application sets, such as GPUs; set",
        ),
        (
            {"args__ingress__min_image_side": 99_999},
            "applications[0].args.ingress: max_image_side is",
        ),
        *(
            (
                {"args__ingress__fetch__allowed_domains": [domain]},
                f"args.ingress.fetch: allowed_domains has {domain!r}, which no URL's host matches; write host",
            )
            for domain in (".example.org", "example.org:443")
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
        ({"top__http_options__port": 70_000}, "http_options.port: 70000 must be from 1 to 65535"),
        *(
            ({"route_prefix": prefix}, f"applications[0].route_prefix: {prefix!r} must begin with /")
            for prefix in ("v", "/v/", "//", "/{v}")
        ),
        (
            {"deployments": [{"name": "LLM"}, {"name": "Encoder"}, {"name": "LLM"}]},
            "applications[0].deployments[2].name: 'LLM' twice; Serve would merge the two entries",
        ),
        (
            {"args__encoder__warm_image_sizes": [[224, 224], [1, 201]]},
            "applications[0].args.encoder: warm_image_sizes: the shorter side of [1, 201] is 1, less than 1/200 of",
        ),
        ({"deployments": [None]}, "applications[0].deployments[0]: must be a mapping"),
        ({"deployments": ["Encoder"]}, "applications[0].deployments[0]: must be a mapping"),
        ({"deployments": 3}, "applications[0].deployments: Input should be a valid list"),
        ({"deployments": {"name": "Encoder"}}, "applications[0].deployments: Input should be a valid list"),
        *(
            ({"args__ingress__auth": {"mode": "none", "tenant_header": header}}, "auth.tenant_header: String should")
            for header in ("", "x tenant", "X-Tenant:", "x-tenant\n")
        ),
        ({"args__ingress__auth": {"mode": "keys", "api_keys_env": ""}}, "auth.api_keys_env: String should have"),
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
    [
        ("a: [", "not valid YAML"),
        ("- 1", "needs a list `applications:`"),
        ("applications: 3", "needs a list"),
        ("applications: []\na: 2024-02-30", "not valid YAML: day is out of range"),
        ("a: " + "[" * 2000, "not valid YAML"),
        ("applications:\n- args: {ingress: {auth: {}}, ingress: {}}", "key 'ingress' twice\n  in"),
        ("a: {[1]: 2, [1]: 3}", "not valid YAML"),
        ("applications: [{args: &a {llm: {engine_args: {x: *a}}}}]", "alias 'a' is inside the value that it names"),
        ("applications: []\na: &a [1, *a]", "alias 'a' is inside the value"),
        ("applications: &a [*a]", "alias 'a' is inside the value"),
        ("a: !!bool 7", "not valid YAML: a value does not fit its tag"),
        ('a: !!int ""', "not valid YAML: a value does not fit its tag"),
        ("a: !!timestamp abc", "not valid YAML: a value does not fit its tag"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    result = vitray("check-config", str(tmp_path / "config.yaml"))
    assert (result.exit_code, told in result.output) == (1, True)
    assert vitray("check-config", str(tmp_path / "missing.yaml")).exit_code == 2


def test_a_merged_mapping_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "applications: []\na: &a {x: 1, y: 1}\nb: {<<: *a, x: 2}\nc: {d: &d {<<: *a, x: 2}}\ne: {<<: *d}\n"
        "f: {<<: *a, <<: *d}\ng: {1: 2, '1': 3}"
    )
    read = config_check.read_config(path)
    assert read["b"] == read["c"]["d"] == read["e"] == {"x": 2, "y": 1}
    assert read["g"] == {1: 2, "1": 3}


def test_a_value_may_be_repeated_by_an_alias(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("applications: []\na: &a {x: &x [1], y: *x}\nb: [*a, *a, *x]")
    assert config_check.read_config(path)["b"] == [{"x": [1], "y": [1]}, {"x": [1], "y": [1]}, [1]]


def test_a_port_is_read_as_serve_reads_it(tmp_path: Path) -> None:
    """check-config and serve ended with a traceback for a port that Serve converts to an integer."""
    port = free_port()
    path = write_config(tmp_path / "config.yaml", top__http_options__port=f"{port}.0")
    config = config_check.read_config(path)
    assert config_check.problems(config) == []
    assert not any("http_options.port" in told for told in config_check.start_problems(config, 99, 0))


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
