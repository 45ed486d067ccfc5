"""What an operator may choose: refusals naming the nearest key, "auto", presets, and the shipped serve_config.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from configs.encoder_config import MAX_ASPECT_RATIO, EncoderConfig
from configs.resolve import PRESETS, PROJECT_ROOT, ClusterFacts, load_preset, resolve
from configs.schema import AppConfig, unknown_key_message
from encoder.images import size

DEFAULTS = AppConfig()
LAPTOP = ClusterFacts(has_gpu=False)
GPU_CLUSTER = ClusterFacts(has_gpu=True)
LAPTOP_ENGINE_ARGS = {
    "enforce_eager": True,
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    "max_model_len": 8192,
    "max_num_seqs": 16,
}


def sections(section: Any = DEFAULTS, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all sections of the schema, the top included."""
    yield path
    for name, value in vars(section).items():
        if isinstance(value, (BaseModel, EncoderConfig)):
            yield from sections(value, (*path, name))


def section_at(path: tuple[str, ...]) -> Any:
    section: Any = DEFAULTS
    for name in path:
        section = getattr(section, name)
    return section


def keys_at(path: tuple[str, ...]) -> list[str]:
    return list(vars(section_at(path)))


def nested(path: tuple[str, ...], settings: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(path):
        settings = {name: settings}
    return settings


def config(**settings: Any) -> AppConfig:
    return AppConfig.model_validate(settings)


def test_sections_were_found() -> None:
    assert {
        (),
        ("encoder",),
        ("encoder_replica",),
        ("llm",),
        ("tcp",),
        ("ingress",),
        ("ingress", "audio"),
        ("ingress", "video"),
        ("ingress", "fetch"),
        ("ingress", "auth"),
        ("ingress", "rate_limit"),
    } == set(sections())


@pytest.mark.parametrize("path", list(sections()), ids=lambda path: ".".join(path) or "top")
def test_every_section_refuses_an_unknown_key_with_the_nearest_name(path: tuple[str, ...]) -> None:
    for known in keys_at(path):
        misspelt = known[:-1] + "_"
        with pytest.raises(ValidationError, match=f"unknown key '{misspelt}': did you mean '{known}'"):
            AppConfig.model_validate(nested(path, {misspelt: 1}))


@pytest.mark.parametrize("path", list(sections()), ids=lambda path: ".".join(path) or "top")
def test_a_key_near_to_none_is_answered_with_all_of_them(path: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as refused:
        AppConfig.model_validate(nested(path, {"zzzzzzzz": 1}))
    assert all(known in str(refused.value) for known in keys_at(path))


def test_unknown_key_without_a_near_name_lists_them_sorted() -> None:
    assert unknown_key_message("zzz", ["beta", "alpha"]) == "unknown key 'zzz': known keys: alpha, beta"


@pytest.mark.parametrize("path", list(sections()), ids=lambda path: ".".join(path) or "top")
def test_every_section_is_frozen(path: tuple[str, ...]) -> None:
    section = section_at(path)
    with pytest.raises((ValidationError, FrozenInstanceError), match=r"frozen|cannot assign"):
        setattr(section, next(iter(keys_at(path))), 1)


@pytest.mark.parametrize("budgets", [[4096, 2048], [2048, 2048], [1, 3, 2]])
def test_budgets_must_ascend(budgets: list[int]) -> None:
    with pytest.raises(ValidationError, match=r"must ascend without repeats, got \[") as refused:
        config(encoder={"encoder_cudagraph_token_budgets": budgets})
    assert str(budgets) in str(refused.value)


@pytest.mark.parametrize("budgets", [[], [0], [-1, 2]])
def test_budgets_must_be_there_and_positive(budgets: list[int]) -> None:
    with pytest.raises(ValidationError, match="encoder_cudagraph_token_budgets"):
        config(encoder={"encoder_cudagraph_token_budgets": budgets})


@pytest.mark.parametrize(
    ("path", "value", "limit"),
    [
        ("encoder_replica.num_gpus", -0.5, "0"),
        ("encoder_replica.num_gpus", "all", "auto"),
        ("encoder_replica.num_gpus", float("inf"), "finite"),
        ("encoder_replica.num_gpus", 1.5, "must be a whole number above 1, got 1.5"),
        ("llm.num_gpus", 0.00001, "must be 0 or at least 0.0001, got 1e-05"),
        ("llm.num_cpus", 0.00001, "must be 0 or at least 0.0001, got 1e-05"),
        ("ingress.num_cpus", 0.00001, "must be 0 or at least 0.0001, got 1e-05"),
        ("encoder_replica.num_cpus", 0.00001, "must be 0 or at least 0.0001, got 1e-05"),
        ("encoder_replica.pixel_shm_bytes", 10**15, "less than or equal to 17592186044416"),
        ("encoder_replica.embedding_shm_bytes", 10**24, "less than or equal to 17592186044416"),
        ("llm.receive_buffer_bytes", 10**24, "less than or equal to 17592186044416"),
        ("tcp.secret_file", "", "1 character"),
        ("encoder_replica.cache_bytes", -1, "0"),
        ("encoder_replica.max_queued_tokens", 0, "0"),
        ("encoder_replica.decode_timeout_s", float("nan"), "finite"),
        ("llm.num_gpus", -1, "0"),
        ("ingress.max_images_per_request", 0, "0"),
        ("ingress.request_timeout_s", 0, "0"),
        ("ingress.fetch.max_redirects", -1, "0"),
        ("encoder.dtype", "float16", "bfloat16"),
        ("model", "", "1 character"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_limit(path: str, value: object, limit: str) -> None:
    *section, name = path.split(".")
    with pytest.raises(ValidationError) as refused:
        AppConfig.model_validate(nested(tuple(section), {name: value}))
    assert path in str(refused.value)
    assert limit in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dtype": "float16"}, "dtype is 'float16'; it must be one of auto, float32, bfloat16"),
        ({"graph_capture": "later"}, "graph_capture is 'later'; it must be one of startup, on_demand, hybrid"),
        ({"cudagraph_mm_encoder": "yes"}, "cudagraph_mm_encoder is 'yes'; it must be auto, true or false"),
        ({"implementation": "hf"}, "implementation is 'hf'; it must be one of auto, vitray, vllm"),
        ({"implementation": "vllm", "fp8": True}, "fp8 is true, and implementation is 'vllm'"),
        ({"implementation": "none", "fp8": True}, "fp8 is true, and implementation is 'none'"),
        ({"implementation": "vllm", "fused_kernels": True}, "fused_kernels is true, and implementation is 'vllm'"),
        ({"encoder_cudagraph_token_budgets": "all"}, "is 'all'; it must be auto or a list"),
        ({"encoder_cudagraph_token_budgets": (4, 2)}, r"must ascend without repeats, got \[4, 2\]"),
        ({"encoder_cudagraph_max_images_per_batch": 0}, "is 0; it must be greater than 0"),
        ({"encoder_cudagraph_memory_bytes": -1}, "is -1; it must be greater than 0"),
        ({"staging_pinned_bytes": 1_000_000}, "staging_pinned_bytes is 1000000; it must be at least 1048576"),
        ({"warm_image_sizes": ((224, 0),)}, r"warm_image_sizes holds \[224, 0\]"),
        ({"warm_image_sizes": ((10, 2001),)}, r"side of \[10, 2001\] is 10, less than 1/200 of the longer"),
    ],
)
def test_an_encoders_settings_are_checked_without_pydantic_too(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EncoderConfig(**settings)


def test_warm_images_have_the_aspect_ratios_of_all_images() -> None:
    assert MAX_ASPECT_RATIO == size.MAX_ASPECT_RATIO
    assert EncoderConfig(warm_image_sizes=((10, 2000),)).warm_image_sizes == ((10, 2000),)


def test_an_encoders_settings_from_a_file_are_those_made_in_python() -> None:
    given = {
        "encoder_cudagraph_token_budgets": [64, 128],
        "warm_image_sizes": [[224, 448]],
        "cudagraph_mm_encoder": False,
    }
    made = EncoderConfig(
        encoder_cudagraph_token_budgets=(64, 128), warm_image_sizes=((224, 448),), cudagraph_mm_encoder=False
    )
    assert config(encoder=given).encoder == made


def test_auto_on_a_laptop() -> None:
    resolved = resolve(config(), LAPTOP)
    assert resolved.model == "models/scenes-8m"
    assert (resolved.encoder_replica.num_gpus, resolved.llm.num_gpus) == (0.0, 0.0)
    assert resolved.llm.engine_args == LAPTOP_ENGINE_ARGS


def test_auto_on_a_gpu_cluster() -> None:
    resolved = resolve(config(), GPU_CLUSTER)
    assert resolved.model == "Qwen/Qwen3-VL-8B-Instruct"
    assert (resolved.encoder_replica.num_gpus, resolved.llm.num_gpus) == (1.0, 1.0)
    assert "enforce_eager" not in resolved.llm.engine_args
    assert "gpu_memory_utilization" not in resolved.llm.engine_args, "a whole GPU keeps vLLM's own default"


@pytest.mark.parametrize("cluster", [LAPTOP, GPU_CLUSTER])
def test_a_named_model_is_never_replaced(cluster: ClusterFacts) -> None:
    assert resolve(config(model="Qwen/Qwen2.5-VL-72B-Instruct"), cluster).model == "Qwen/Qwen2.5-VL-72B-Instruct"


@pytest.mark.parametrize("cluster", [LAPTOP, GPU_CLUSTER])
def test_resolving_leaves_no_auto_and_changes_nothing_else(cluster: ClusterFacts) -> None:
    given = config(ingress={"max_images_per_request": 3}, encoder={"dtype": "float32"})
    resolved = resolve(given, cluster)
    assert "auto" not in (resolved.model, resolved.encoder_replica.num_gpus, resolved.llm.num_gpus)
    assert (resolved.ingress, resolved.encoder) == (given.ingress, given.encoder)
    assert given.llm.engine_args == {}, "the config given is not written into"
    assert resolve(resolved, cluster) == resolved


def test_the_operators_engine_args_win_key_by_key() -> None:
    resolved = resolve(config(llm={"engine_args": {"max_model_len": 1024, "seed": 3}}), LAPTOP)
    assert resolved.llm.engine_args == LAPTOP_ENGINE_ARGS | {"max_model_len": 1024, "seed": 3}


def test_encoder_and_llm_share_a_gpu_by_fractions() -> None:
    """vLLM's share is of the whole device: what is left must hold the encoder and both CUDA contexts."""
    resolved = resolve(config(encoder_replica={"num_gpus": 0.2}, llm={"num_gpus": 0.8}), GPU_CLUSTER)
    assert (resolved.encoder_replica.num_gpus, resolved.llm.num_gpus) == (0.2, 0.8)
    assert resolved.llm.engine_args["gpu_memory_utilization"] == 0.76


def test_the_operators_memory_share_wins_over_the_fractions() -> None:
    llm = {"num_gpus": 0.8, "engine_args": {"gpu_memory_utilization": 0.5}}
    assert resolve(config(llm=llm), GPU_CLUSTER).llm.engine_args["gpu_memory_utilization"] == 0.5


@pytest.mark.parametrize(
    ("engine_args", "num_gpus"),
    [({"tensor_parallel_size": 4}, 4.0), ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6.0)],
)
def test_auto_takes_a_gpu_for_every_worker_of_the_engine(engine_args: dict[str, int], num_gpus: float) -> None:
    llm = {"engine_args": engine_args}
    assert resolve(config(llm=llm), GPU_CLUSTER).llm.num_gpus == num_gpus
    assert resolve(config(llm=llm), LAPTOP).llm.num_gpus == 0.0


@pytest.mark.parametrize("num_gpus", [0.5, 1, 2])
@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_fewer_gpus_than_workers_are_refused(name: str, num_gpus: float) -> None:
    """Ray would hide the missing devices from vLLM, which would fail minutes later."""
    llm = {"num_gpus": num_gpus, "engine_args": {name: 3}}
    with pytest.raises(ValueError, match=rf"llm\.num_gpus is {num_gpus:g}, .* is 3"):
        resolve(config(llm=llm), GPU_CLUSTER)


@pytest.mark.parametrize("size", [0, -1, "two", 1.5, None, True])
@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_parallel_sizes_must_be_positive_integers(name: str, size: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got") as refused:
        resolve(config(llm={"engine_args": {name: size}}), GPU_CLUSTER)
    assert repr(size) in str(refused.value)


@pytest.mark.parametrize("preset", sorted(file.stem for file in PRESETS.glob("*.yaml")))
def test_presets_validate_and_say_what_they_were_tried_on(preset: str) -> None:
    assert load_preset(preset).model != "auto"
    assert (PRESETS / f"{preset}.yaml").read_text().startswith("# ")


def test_serve_config_validates_and_states_the_schemas_defaults() -> None:
    """A default that is written down must be the default, or deleting the line would change what runs."""
    (application,) = yaml.safe_load((PROJECT_ROOT / "serve_config.yaml").read_text())["applications"]
    args = application["args"]
    assert AppConfig.model_validate(args) == AppConfig()
    assert args["encoder"].keys() == set(keys_at(("encoder",)))


def test_serve_config_bounds_the_proxy_by_the_ingress() -> None:
    """The proxy must not cut a request off before the ingress tells the client why."""
    settings = yaml.safe_load((PROJECT_ROOT / "serve_config.yaml").read_text())
    assert settings["http_options"]["request_timeout_s"] > AppConfig().ingress.request_timeout_s
    assert {deployment["name"] for deployment in settings["applications"][0]["deployments"]} == {
        "Ingress",
        "Encoder",
        "LLM",
    }
