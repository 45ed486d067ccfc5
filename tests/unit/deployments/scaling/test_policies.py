"""The policy as Serve calls it: from a context to a number, through Serve's own wrapper, and as bytes elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext
from ray.serve.schema import DeploymentSchema

from deployments.scaling.policies import EngineLoadPolicy, VisualTokenPolicy, visual_load
from tests.programs import output_of_python

ENCODER = DeploymentID("Encoder", "vitray")


def context(reports: list[dict[str, list[float]]], **changes: Any) -> AutoscalingContext:
    """`reports`: what each replica has reported, oldest first, by name."""
    raw: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
    for number, report in enumerate(reports):
        for name, reported in report.items():
            series = [TimeStampedValue(float(at), value) for at, value in enumerate(reported)]
            raw.setdefault(name, {})[ReplicaID(str(number), ENCODER)] = series
    values: dict[str, Any] = {
        "deployment_id": ENCODER,
        "deployment_name": "Encoder",
        "app_name": "vitray",
        "current_num_replicas": len(reports),
        "target_num_replicas": len(reports),
        "running_replicas": [],
        "total_num_requests": 0.0,
        "total_queued_requests": 0.0,
        "aggregated_metrics": None,
        "raw_metrics": lambda: raw,
        "capacity_adjusted_min_replicas": 0,
        "capacity_adjusted_max_replicas": 100,
        "policy_state": {},
        "last_scale_up_time": None,
        "last_scale_down_time": None,
        "current_time": 1000.0,
        "config": AutoscalingConfig(max_replicas=100, upscale_delay_s=0, downscale_delay_s=0),
    }
    return AutoscalingContext(**(values | changes))


def report(backlog: float, arriving: float, speed: float, image: float = 100.0) -> dict[str, list[float]]:
    """The first value of each is old and wrong."""
    now = {
        "backlog_tokens": backlog,
        "arriving_tokens_per_s": arriving,
        "tokens_per_s": speed,
        "tokens_per_image": image,
    }
    return {name: [1e12, value] for name, value in now.items()}


def test_the_newest_reports_of_all_replicas_count() -> None:
    ctx = context(
        [report(100, 10, 1000), report(300, 30, 3000, 200.0)], total_queued_requests=7.0, target_num_replicas=5
    )
    load = visual_load(ctx)
    assert (load.now_s, load.running_replicas, load.target_replicas) == (1000.0, 2, 5)
    assert (load.backlog_tokens, load.arriving_tokens_per_s, load.waiting_images) == (400, 40, 7)
    assert (load.tokens_per_s, load.tokens_per_image) == (2000, 150)


def test_a_replica_that_has_measured_nothing_says_nothing_about_speed() -> None:
    assert visual_load(context([report(0, 0, 1000), report(0, 0, 0, 0)])).tokens_per_s == 1000
    unknown = visual_load(context([report(0, 0, 0, 0), {"backlog_tokens": []}]))
    assert (unknown.tokens_per_s, unknown.tokens_per_image) == (None, None)
    assert visual_load(context([], raw_metrics=None)).backlog_tokens == 0


def test_asks_for_replicas_within_bounds() -> None:
    """2 × 4500 tokens within 2 s at 1000 a second: 5, one of them for what arrives."""
    policy = VisualTokenPolicy(target_encode_delay_s=2, target_utilization=0.5, max_scale_up_factor=10)
    reports = [report(4000, 250, 1000), report(4000, 0, 1000)]
    assert policy(context(reports)) == (5, {})
    assert policy(context(reports, capacity_adjusted_max_replicas=3)) == (3, {})


def configured(**policy: object) -> AutoscalingConfig:
    """As it comes from `deployments:` of serve_config.yaml."""
    deployment = DeploymentSchema.model_validate(
        {
            "name": "Encoder",
            "autoscaling_config": {
                "min_replicas": 0,
                "max_replicas": 100,
                "upscale_delay_s": 0,
                "downscale_delay_s": 0,
                "policy": {"policy_function": "deployments.scaling:VisualTokenPolicy", "policy_kwargs": policy},
            },
        }
    )
    config = deployment.autoscaling_config
    return config if isinstance(config, AutoscalingConfig) else AutoscalingConfig.model_validate(config)


def test_serves_configuration_makes_it() -> None:
    config = configured(
        target_encode_delay_s=2.0, target_utilization=0.5, max_scale_up_factor=10, scale_down_stabilization_s=0
    )
    policy = _apply_autoscaling_config(_resolve_policy_callable(config.policy))
    reports = [report(4000, 250, 1000), report(4000, 0, 1000)]
    wanted, state = policy(context(reports, config=config))
    assert wanted == 5
    idle = context([report(0, 0, 1000)] * 5, config=config, policy_state=state, current_time=1001.0)
    assert policy(idle)[0] == 1  # Serve takes the last one away in a step of its own
    alone = context([report(0, 0, 1000)], config=config, policy_state=state, current_time=1002.0)
    assert policy(alone)[0] == 0
    asked = context([], config=config, total_num_requests=1.0, current_time=1003.0)
    assert policy(asked)[0] == 1


def test_serves_configuration_refuses_unknown_arguments() -> None:
    with pytest.raises(TypeError, match="target_delay"):
        _resolve_policy_callable(configured(target_delay=2.0).policy)


def test_runs_where_the_code_is_not(tmp_path: Path) -> None:
    """Serve's controller gets the policy as bytes, and cannot import what came to the replicas as a `working_dir`."""
    pickled = tmp_path / "policy"
    pickled.write_bytes(configured(target_utilization=0.5).policy.get_serialized_policy_def() or b"")
    program = (
        "import sys\n"
        "class Never:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('deployments', 'configs', 'encoder'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Never())\n"
        "import pickle, types\n"
        "policy = pickle.loads(open(sys.argv[1], 'rb').read())(target_utilization=0.5)\n"
        "ctx = types.SimpleNamespace(capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=9,\n"
        "    raw_metrics={}, current_time=1.0, current_num_replicas=3, target_num_replicas=3,\n"
        "    total_queued_requests=0.0)\n"
        "print(policy(ctx))\n"
    )
    assert output_of_python(program, str(pickled), folder=tmp_path) == "(3, {})\n"


def test_keeps_its_memory_from_call_to_call() -> None:
    policy = cloudpickle.loads(cloudpickle.dumps(VisualTokenPolicy))(
        target_utilization=0.8, scale_down_stabilization_s=60
    )
    assert policy(context([report(0, 800, 1000)] * 5))[0] == 5
    assert policy(context([report(0, 0, 1000)] * 5, current_time=1050.0))[0] == 5
    assert policy(context([report(0, 0, 1000)] * 5, current_time=1061.0))[0] == 0


def engines(running: float, waiting: float, kv_cache_use: float) -> dict[str, list[float]]:
    now = {"engine_running_requests": running, "engine_waiting_requests": waiting, "kv_cache_use": kv_cache_use}
    return {name: [1e12, value] for name, value in now.items()}


def test_language_models_scale_on_what_their_engines_have_to_do() -> None:
    """10 run, 5 wait for room and 5 at the handles, 8 to a replica; then the cache: 1.2 for 10, 2.4 for 20, at 0.5."""
    policy = EngineLoadPolicy(target_requests=8, target_kv_cache_utilization=0.5, max_scale_up_factor=10)
    reports = [engines(6, 5, 0.2), engines(4, 0, 0.2)]
    assert policy(context(reports, deployment_name="LLM", total_queued_requests=5.0)) == (3, {})
    full = [engines(6, 5, 0.9), engines(4, 0, 0.3)]
    assert policy(context(full, deployment_name="LLM", total_queued_requests=5.0)) == (5, {})
