"""The generic encoder of a replica: vLLM's processor in decode workers, vLLM's model class on the GPU thread."""

from __future__ import annotations

import json
from pathlib import Path

from configs.schema import AppConfig
from deployments.common.model_path import generic_engine_args
from deployments.encoder_replica.decode.prepare_pool import PreparePool
from deployments.vllm.architectures import vllm_version
from deployments.vllm.vllm_encoder import VllmEncoder
from encoder.checkpoint.fingerprint import checkpoint_fingerprint
from encoder.images.generic_identity import GenericIdentity


def load_generic_encoder(path: Path, config: AppConfig, pool: PreparePool) -> VllmEncoder:
    """Loads the checkpoint's towers, and counts the visual tokens of images of several sizes in `pool`."""
    arguments = generic_engine_args(config)
    settings = json.dumps([vllm_version(), arguments], sort_keys=True)
    encoder = VllmEncoder.from_checkpoint(path, config.encoder, arguments)
    encoder.identity = GenericIdentity(checkpoint_fingerprint(path), settings, pool.count_tokens())
    return encoder
