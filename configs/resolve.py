"""Resolution of "auto" in the settings, done once by `resolve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import JsonValue

from configs.schema import AppConfig

PRESETS = Path(__file__).parent / "presets"
PROJECT_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class ClusterFacts:
    """Facts of a cluster on which "auto" depends."""

    has_gpu: bool
    """Whether a node has a GPU or the autoscaler can add one that has."""


def load_preset(name: str) -> AppConfig:
    """Returns the settings of `configs/presets/<name>.yaml`."""
    return AppConfig.model_validate(yaml.safe_load((PRESETS / f"{name}.yaml").read_text()))


def resolve(config: AppConfig, cluster: ClusterFacts) -> AppConfig:
    """Returns the settings with "auto" in `model` and `num_gpus` resolved.

    The operator's `engine_args` override the preset's key by key, and a named model is kept. Raises ValueError if
    `num_gpus` of the language model is too small for its parallel sizes.
    """
    preset = load_preset("gpu" if cluster.has_gpu else "laptop")
    engine_args: dict[str, JsonValue] = {**preset.llm.engine_args, **config.llm.engine_args}
    workers = _positive(engine_args, "tensor_parallel_size") * _positive(engine_args, "pipeline_parallel_size")

    encoder_gpus = config.encoder_replica.num_gpus
    if encoder_gpus == "auto":
        encoder_gpus = 1.0 if cluster.has_gpu else 0.0
    if config.encoder.implementation == "none":
        encoder_gpus = 0.0  # no encoder runs
    llm_gpus = config.llm.num_gpus
    if llm_gpus == "auto":
        llm_gpus = float(workers) if cluster.has_gpu else 0.0
    if 0 < llm_gpus < workers and workers > 1:
        raise ValueError(
            f"llm.num_gpus is {llm_gpus:g}, but tensor_parallel_size times pipeline_parallel_size of llm.engine_args "
            f"is {workers}"
        )
    if 0 < llm_gpus < 1:
        # vLLM reserves this fraction of the whole GPU; the encoder's share and both CUDA contexts must still fit.
        engine_args.setdefault("gpu_memory_utilization", round(0.95 * llm_gpus, 3))

    model = preset.model if config.model == "auto" else config.model
    return config.model_copy(
        update={
            "model": model,
            "encoder_replica": config.encoder_replica.model_copy(update={"num_gpus": encoder_gpus}),
            "llm": config.llm.model_copy(update={"num_gpus": llm_gpus, "engine_args": engine_args}),
        }
    )


def _positive(engine_args: dict[str, JsonValue], name: str) -> int:
    size = engine_args.get(name, 1)
    if type(size) is not int or size < 1:
        raise ValueError(f"llm.engine_args.{name} must be a positive integer, got {size!r}")
    return size
