"""The generic encoder of a replica: vLLM's processor in decode workers, vLLM's model class on the GPU thread."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import JsonValue

from configs.schema import AppConfig
from deployments.common.model_path import generic_engine_args
from deployments.encoder_replica.decode.prepare_pool import PreparePool
from deployments.vllm.architectures import model_support, vllm_version
from deployments.vllm.vllm_encoder import VllmEncoder, VllmTower
from encoder.checkpoint.fingerprint import checkpoint_fingerprint
from encoder.graphs.budgets import EAGER_BUDGETS
from encoder.images.generic_identity import GenericIdentity


def load_generic_encoder(path: Path, config: AppConfig, pool: PreparePool) -> VllmEncoder:
    """Loads the checkpoint's towers, counts the tokens of images of several sizes, of sounds and of a video in `pool`,
    encodes a small item of each modality, and measures the graphs."""
    arguments = generic_engine_args(config)
    settings = json.dumps([vllm_version(), arguments], sort_keys=True)
    # Budgets of graphs end at it. It changes no embedding, so that it is not in the identity.
    given = config.llm.engine_args.get("max_num_batched_tokens")
    bound: dict[str, JsonValue] = {}
    if isinstance(given, int):
        bound["max_num_batched_tokens"] = min(given, EAGER_BUDGETS[-1])
    encoder = VllmEncoder(VllmTower(path, config.encoder, arguments | bound), config.encoder)
    images, sounds, videos = pool.count_tokens()
    architectures = json.loads((path / "config.json").read_text()).get("architectures") or []
    if any(model.without_videos for model in model_support(only=architectures)):
        videos = 0
    encoder.identity = GenericIdentity(
        checkpoint_fingerprint(path), settings, images, audio_tokens=sounds, video_tokens=videos
    )
    encoder.warm_up(encoder.identity.modalities, pool.prepare_at_start)
    return encoder
