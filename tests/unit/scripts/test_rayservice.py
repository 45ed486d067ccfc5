"""docs/rayservice.yaml: what Serve, our settings and Ray's own autoscaler for Kubernetes make of it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.serve.schema import ServeDeploySchema
from ray.util import accelerators

from configs.resolve import ClusterFacts, resolve
from configs.schema import AppConfig
from deployments import app
from deployments.cli import config_check

ROOT = Path(__file__).parents[3]
MANIFEST: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "rayservice.yaml").read_text())
CLUSTER: dict[str, Any] = MANIFEST["spec"]["rayClusterConfig"]
SERVE: dict[str, Any] = yaml.safe_load(MANIFEST["spec"]["serveConfigV2"])
(APPLICATION,) = SERVE["applications"]
LEAST_ACCELERATOR = 0.001
"""What Ray asks for of the resource that stands for a kind of GPU."""


@pytest.fixture(scope="module")
def node_types() -> dict[str, Any]:
    """As the autoscaler reads the groups."""
    cluster = {"metadata": {**MANIFEST["metadata"], "namespace": "default"}, "spec": CLUSTER}
    found: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    return found


def settings() -> AppConfig:
    return resolve(AppConfig.model_validate(APPLICATION["args"]), ClusterFacts(has_gpu=True))


def wanted(name: str) -> dict[str, float]:
    """The resources that a replica asks Ray for."""
    config = settings()
    if name == "Ingress":
        return {"CPU": config.ingress.num_cpus}
    options = app.resources(config.encoder_replica if name == "Encoder" else config.llm)
    asked = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
    if kind := options.get("accelerator_type"):
        asked[f"accelerator_type:{kind}"] = LEAST_ACCELERATOR
    return asked  # type: ignore[return-value]


def test_serve_and_our_settings_take_the_configuration() -> None:
    ServeDeploySchema.model_validate(SERVE)
    assert config_check.problems(SERVE) == []
    names = {deployment["name"] for deployment in APPLICATION["deployments"]}
    assert names == {"Ingress", "Encoder", "LLM"}


def test_a_mistake_in_it_would_show() -> None:
    broken = yaml.safe_load(MANIFEST["spec"]["serveConfigV2"])
    broken["applications"][0]["args"]["encoder_replica"]["acelerator_type"] = "A100"
    assert "accelerator_type" in "".join(map(str, config_check.problems(broken)))


def test_it_is_reachable_and_wants_keys_that_are_mounted() -> None:
    assert SERVE["http_options"]["host"] == "0.0.0.0"
    keys = Path(APPLICATION["args"]["ingress"]["auth"]["api_keys_file"])
    for group in CLUSTER["workerGroupSpecs"]:  # the ingress may be on any of them
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert str(keys.parent) in mounted
        assert set(mounted.values()) == volumes
        env = {one["name"]: one["value"] for one in container["env"]}
        assert env["HF_HOME"] in mounted


def test_versions_are_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = [entry for entry in project["dependencies"] if entry.startswith("ray[")]
    assert f">={CLUSTER['rayVersion'].rpartition('.')[0]}," in requirement
    specs = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
    images = {container["image"] for spec in specs for container in spec["template"]["spec"]["containers"]}
    assert images == {f"registry.example.org/vitray:{project['version']}"}
    assert CLUSTER["authOptions"]["mode"] == "token"


def test_the_head_node_may_be_lost() -> None:
    """Ray's state outlives it in a Redis, whoever writes into which owns the cluster: it has a password. A head that
    restarts has no replicas to lose."""
    options = CLUSTER["gcsFaultToleranceOptions"]
    assert options["redisAddress"]
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"].keys() == {"name", "key"}
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_every_group_is_read(node_types: dict[str, Any]) -> None:
    assert node_types.keys() == {"headgroup", "encoders", "language-models"}
    assert node_types["headgroup"]["resources"]["CPU"] == 0
    for group in CLUSTER["workerGroupSpecs"]:
        assert node_types[group["groupName"]]["max_workers"] == group["maxReplicas"]


@pytest.mark.parametrize("name", ["Encoder", "LLM"])
def test_each_deployment_has_a_group_of_its_own(node_types: dict[str, Any], name: str) -> None:
    """By the kind of GPU: one group and no other can hold it, at its smallest as well as at its largest."""
    asked = wanted(name)
    fitting = [
        group
        for group, node in node_types.items()
        if all(node["resources"].get(resource, 0) >= amount for resource, amount in asked.items())
    ]
    assert fitting == [{"Encoder": "encoders", "LLM": "language-models"}[name]]
    (deployment,) = [one for one in APPLICATION["deployments"] if one["name"] == name]
    scaling, group = deployment["autoscaling_config"], node_types[fitting[0]]
    per_node = min(int(group["resources"][resource] // amount) for resource, amount in asked.items() if amount >= 1)
    assert scaling["min_replicas"] <= group["min_workers"] * per_node
    assert scaling["max_replicas"] <= group["max_workers"] * per_node


def test_the_ingress_finds_room_beside_them(node_types: dict[str, Any]) -> None:
    (deployment,) = [one for one in APPLICATION["deployments"] if one["name"] == "Ingress"]
    free = sum(
        (node_types[group]["resources"]["CPU"] - wanted(name)["CPU"]) * node_types[group]["min_workers"]
        for name, group in (("Encoder", "encoders"), ("LLM", "language-models"))
    )
    assert deployment["num_replicas"] * wanted("Ingress")["CPU"] <= free


def test_kinds_of_gpus_are_rays_names() -> None:
    known = {value for name, value in vars(accelerators).items() if name.startswith("NVIDIA_")}
    for name in ("Encoder", "LLM"):
        (kind,) = [resource for resource in wanted(name) if resource.startswith("accelerator_type:")]
        assert kind.partition(":")[2] in known
