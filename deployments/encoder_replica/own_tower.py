"""One of vitray's own towers as the encoder of a replica."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from configs.schema import AppConfig
from deployments.common.model_path import video_rules
from encoder.encoder import Encoder


def load_own_encoder(path: Path, config: AppConfig) -> Encoder:
    """Loads an encoder and runs it once, so that the first image does not wait for kernels to load."""
    encoder = Encoder.from_checkpoint(path, config.encoder)
    identity = encoder.identity
    videos = video_rules(config, path, identity.vision, identity.rules)
    encoder.identity = dataclasses.replace(identity, videos=videos)
    encoder.warm_up()
    return encoder
