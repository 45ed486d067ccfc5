"""What is bound and with which resources, how a model's name is read, and errors in OpenAI's shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve import Application

from configs.resolve import PROJECT_ROOT, ClusterFacts, load_preset
from configs.schema import AppConfig, EncoderReplicaConfig, LLMConfig
from deployments import app as app_module
from deployments.app import build_app, resources
from deployments.common.api_error import ApiError, error_head_and_body
from deployments.common.model_path import local_model
from encoder.graphs import compile_caches


def bound(monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], *, has_gpu: bool = False) -> dict[str, Any]:
    """The deployments of the application by name."""
    monkeypatch.setattr(app_module, "cluster_facts", lambda: ClusterFacts(has_gpu=has_gpu))
    found: dict[str, Any] = {}

    def visit(application: Application) -> None:
        node: Any = application._bound_deployment
        found[node.name] = node
        for argument in [*node.init_args, *node.init_kwargs.values()]:
            if isinstance(argument, Application):
                visit(argument)

    visit(build_app(args))
    return found


def test_four_deployments_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bound(monkeypatch, {"ingress": {"stored_responses_bytes": 7, "stored_responses_ttl_s": 8}})
    store = found.pop("ResponseStore")
    assert store.init_args == (7, 8.0)
    assert store._deployment_config.num_replicas == 1
    assert found.keys() == {"Ingress", "Encoder", "LLM"}
    for deployment in found.values():
        (config,) = [argument for argument in deployment.init_args if isinstance(argument, AppConfig)]
        assert config.model == load_preset("laptop").model, "resolved, and the same for all"


def test_without_encoders_two_deployments_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    args: dict[str, Any] = {"encoder": {"implementation": "none"}}
    args["llm"] = {"engine_args": {"mm_processor_cache_gb": 1}}
    args["ingress"] = {"stored_responses_bytes": 0}
    found = bound(monkeypatch, args, has_gpu=True)
    assert found.keys() == {"Ingress", "LLM"}
    config = found["LLM"].init_args[0]
    assert (config.encoder_replica.num_gpus, config.llm.num_gpus) == (0, 1)


def test_an_update_cuts_no_answer_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve ends a replica after 20 s by itself: what a client waited for longer ended in a 500."""
    found = bound(monkeypatch, {"ingress": {"request_timeout_s": 700}})
    assert found["Ingress"]._deployment_config.graceful_shutdown_timeout_s == 710
    assert found["LLM"]._deployment_config.graceful_shutdown_timeout_s == 710


def test_encoder_and_llm_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"encoder_replica": {"num_gpus": 0.2, "accelerator_type": "A100"}, "llm": {"num_gpus": 0.8}}
    found = bound(monkeypatch, args, has_gpu=True)
    encoder, llm = found["Encoder"].ray_actor_options, found["LLM"].ray_actor_options
    assert (encoder["num_gpus"], encoder["accelerator_type"]) == (0.2, "A100")
    assert llm["num_gpus"] == 0.8
    assert "accelerator_type" not in llm
    assert found["Ingress"].ray_actor_options.get("num_gpus", 0) == 0


def test_resources_name_an_accelerator_only_where_one_is_asked_for() -> None:
    assert resources(LLMConfig(num_gpus=2, num_cpus=3)) == {"num_cpus": 3, "num_gpus": 2}
    named = resources(EncoderReplicaConfig(num_gpus=1, num_cpus=0, accelerator_type="H100"))
    assert named == {"num_cpus": 0, "num_gpus": 1, "accelerator_type": "H100"}


def test_an_encoders_compilers_keep_their_kernels_in_its_folder() -> None:
    found = resources(EncoderReplicaConfig(num_gpus=1), compile_caches.environment("/state"))["runtime_env"]
    assert isinstance(found, dict)
    variables = found["env_vars"]
    assert variables["TRITON_CACHE_DIR"] == "/state/triton"
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == "/state/inductor"
    assert variables["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert "runtime_env" not in resources(EncoderReplicaConfig(num_gpus=1), compile_caches.environment(None))


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"modle": "x"}, "did you mean 'model'"),
        ({"llm": {"engine_args": {"max_modle_len": 1}}}, "did you mean 'max_model_len'"),
        ({"llm": {"engine_args": {"tool_call_parser": "x"}}}, r"belongs under llm\.server_args"),
        ({"llm": {"engine_args": {"tensor_parallel_size": 0}}}, "positive integer"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], told: str
) -> None:
    with pytest.raises((ValidationError, ValueError), match=told):
        bound(monkeypatch, args)


def test_a_checkpoint_is_found_in_the_working_directory_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "checkpoints" / "tiny-qwen3-vl"
    here.mkdir(parents=True)
    (here / "config.json").write_text("{}")
    assert local_model("checkpoints/tiny-qwen3-vl") == str(here)
    assert local_model(str(here)) == str(here)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-VL-8B-Instruct", "owner/model.with-dots_1"])
def test_a_hub_name_stays_as_it_is(name: str) -> None:
    assert local_model(name) == name


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "~/missing", "missing", "a/b/c", "../x"])
def test_a_folder_that_is_missing_is_told(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="no such checkpoint folder") as refused:
        local_model(name)
    assert repr(name) in str(refused.value)


def test_the_model_without_a_gpu_is_in_a_fresh_clone() -> None:
    """Its name could be a hub's: were the folder missing, it would be looked for there."""
    model = load_preset("laptop").model
    assert local_model(model) == str(PROJECT_ROOT / model)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (503, "overloaded_error"),
        (500, "server_error"),
        (418, "invalid_request_error"),
    ],
)
def test_errors_have_openais_shape(status: int, kind: str) -> None:
    head, body = error_head_and_body(ApiError(status, "what \u00fc happened \ud800", param="messages", code="c"))
    assert head.status == status
    assert dict(head.headers) == {b"content-type": b"application/json"}
    assert json.loads(body)["error"] == {
        "message": "what \u00fc happened \ud800",
        "type": kind,
        "param": "messages",
        "code": "c",
    }


def test_an_error_can_say_when_to_come_back() -> None:
    head, _ = error_head_and_body(ApiError(503, "busy", retry_after_s=5))
    assert dict(head.headers)[b"retry-after"] == b"5"
