"""Resolves a model name to the folder or the hub name that a replica loads, and which encoder its items need.

A relative folder is looked up in the working directory first, then in this project's folder.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from configs.resolve import PROJECT_ROOT
from configs.schema import AppConfig
from deployments.common.messages import VideoSampling
from encoder.checkpoint.files import resolve_checkpoint
from encoder.checkpoint.fingerprint import checkpoint_fingerprint
from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.video_rules import VideoRules
from encoder.checkpoint.vision_config import VisionConfig, has_own_tower
from encoder.images.generic_identity import GenericIdentity

logger = logging.getLogger("ray.serve")

GENERIC_ENGINE_ARGS = (
    "dtype", "hf_overrides", "config_format", "tokenizer", "tokenizer_mode", "quantization", "max_model_len",
    "media_io_kwargs", "mm_processor_kwargs",
    "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
)  # fmt: skip
"""Keys of `llm.engine_args` that also concern vLLM's processor and towers."""


def local_model(model: str) -> str:
    """Returns the folder that `model` names, else `model` itself, a hub name."""
    for base in (Path.cwd(), PROJECT_ROOT):
        if (base / model / "config.json").is_file():
            return str(base / model)
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise FileNotFoundError(
            f"model {model!r}: no such checkpoint folder (a folder with a config.json), and not a hub name (owner/name)"
        )
    return model


def uses_own_tower(config: AppConfig) -> bool:
    """Whether the model's images are encoded by a tower of ours, else by vLLM's model class."""
    if config.encoder.implementation != "auto":
        return config.encoder.implementation == "vitray"
    return has_own_tower(resolve_checkpoint(local_model(config.model), weights=False))


def encoder_checkpoint(config: AppConfig) -> Path:
    """Returns the folder with the files of the model that its encoder reads, downloaded if it is a hub name."""
    return resolve_checkpoint(local_model(config.model), whole=not uses_own_tower(config))


def expected_tower(config: AppConfig) -> str:
    """Returns the identity of the towers whose embeddings the language model takes."""
    from encoder.towers.weights import tower_identity  # imports torch

    path = encoder_checkpoint(config)
    if uses_own_tower(config):
        return tower_identity(path)
    return GenericIdentity(checkpoint_fingerprint(path), "", ()).tower


def default_sampling(config: AppConfig) -> VideoSampling:
    """Returns how the operator samples videos by default, `media_io_kwargs.video` in `llm.engine_args`."""
    options = _video_options(config)
    return VideoSampling(**{key: options[key] for key in ("fps", "num_frames") if key in options})


def video_rules(config: AppConfig, path: Path, vision: VisionConfig, images: ImageRules) -> VideoRules | None:
    """Returns the rules by which one of our towers takes the checkpoint's videos; None, which is logged, if the
    checkpoint or the operator has settings for videos that are not supported."""
    unknown = sorted(_video_options(config).keys() - {"fps", "num_frames"})
    try:
        if unknown:
            raise ValueError(f"llm.engine_args sets {', '.join(unknown)}")
        return VideoRules.from_checkpoint(path, vision.architecture, images)
    except (ValueError, FileNotFoundError) as error:
        logger.warning("videos are refused: %s", error)
        return None


def _video_options(config: AppConfig) -> Mapping[str, Any]:
    media_io = config.llm.engine_args.get("media_io_kwargs")
    options = media_io.get("video") if isinstance(media_io, dict) else None
    return options if isinstance(options, dict) else {}


def generic_engine_args(config: AppConfig) -> dict[str, JsonValue]:
    """Returns arguments of vLLM's engine for its processor and towers in an encoder."""
    dtype = config.encoder.dtype
    given = config.llm.engine_args | ({} if dtype == "auto" else {"dtype": dtype})
    return {key: given[key] for key in GENERIC_ENGINE_ARGS if key in given}
