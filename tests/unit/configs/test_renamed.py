"""A configuration with a former key, policy or argument is refused with the present name, row by row."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from pydantic import ValidationError

from configs import reference
from configs.renamed import RENAMED
from configs.schema import AppConfig
from deployments import scaling
from deployments.cli import config_check
from deployments.common.names import IMPORT_PATH
from deployments.scaling.encoder_scaler import ScalingTargets
from deployments.scaling.llm_scaler import LLMTargets

POLICIES = {former: now for former, now in RENAMED.items() if former.startswith("deployments.")}
ARGUMENTS = {
    field.name: policy
    for policy, targets in (("EngineLoadPolicy", LLMTargets), ("VisualTokenPolicy", ScalingTargets))
    for field in fields(targets)
    if field.name in RENAMED.values()
}
SETTINGS = {former: now.partition(" ")[0] for former, now in RENAMED.items() if now not in ARGUMENTS}
PATHS = [setting.key for setting in reference.settings()]


def problems(application: dict[str, Any]) -> list[str]:
    hosts = {"http_options": {"host": "127.0.0.1"}}
    return config_check.problems({**hosts, "applications": [{"import_path": IMPORT_PATH, **application}]})


def nested(path: str, value: object) -> dict[str, Any]:
    key, _, rest = path.partition(".")
    return {key: nested(rest, value) if rest else value}


@pytest.mark.parametrize("former", [former for former in SETTINGS if former not in POLICIES])
def test_a_former_key_is_refused_with_its_present_name(former: str) -> None:
    now = SETTINGS[former]
    assert any(key == now or key.endswith(f".{now}") or key.startswith(f"{now}.") for key in PATHS), "no such setting"
    section = (
        next(key.removesuffix(f".{now}") for key in PATHS if key.endswith(f".{now}")) if "." not in now else "ingress"
    )
    args = nested(f"{section}.{former}", {} if former == "door" else 1)
    (found,) = problems({"args": args})
    assert found.startswith(f"applications[0].args.{section}: unknown key {former.partition('.')[0]!r}: ")
    assert f"{former} is now {RENAMED[former]}" in found
    with pytest.raises(ValidationError, match=f"{former} is now {now}"):
        AppConfig.model_validate(args)


@pytest.mark.parametrize("former", POLICIES)
def test_a_former_policy_is_refused_with_its_present_name(former: str) -> None:
    module, _, name = POLICIES[former].partition(":")
    assert (module, hasattr(scaling, name)) == (scaling.__name__, True)
    deployment = {"name": "Encoder", "autoscaling_config": {"policy": {"policy_function": former}}}
    (found,) = problems({"deployments": [deployment]})
    assert found.endswith(f"policy.policy_function: {former} is now {POLICIES[former]}")


@pytest.mark.parametrize("former", [former for former, now in RENAMED.items() if now in ARGUMENTS])
def test_a_former_argument_of_a_policy_is_refused_with_its_present_name(former: str) -> None:
    policy = ARGUMENTS[RENAMED[former]]
    wanted = {"policy_function": f"deployments.scaling:{policy}", "policy_kwargs": {former: 0.5}}
    name = "Encoder" if policy == "VisualTokenPolicy" else "LLM"
    (found,) = problems({"deployments": [{"name": name, "autoscaling_config": {"policy": wanted}}]})
    assert found.endswith(f"policy.policy_kwargs: {former} is now {RENAMED[former]}")


def test_every_row_is_tried() -> None:
    assert {*SETTINGS, *POLICIES} | {former for former, now in RENAMED.items() if now in ARGUMENTS} == set(RENAMED)
