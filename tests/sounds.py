"""Audio files in each accepted format."""

from __future__ import annotations

import io

import numpy as np
import soundfile

FORMATS = {"WAV": "PCM_16", "FLAC": "PCM_16", "OGG": "VORBIS", "MP3": "MPEG_LAYER_III"}
"""Encoding by container."""


def tone(
    container: str = "WAV", *, seconds: float = 1.5, rate: int = 16_000, channels: int = 1, subtype: str = ""
) -> bytes:
    times = np.arange(int(seconds * rate)) / rate
    wave = 0.5 * np.sin(times * 2 * np.pi * 330) * np.sin(times * 3)
    samples = np.stack([wave * (1 - 0.5 * channel) for channel in range(channels)], axis=1)
    soundfile.write(file := io.BytesIO(), samples, rate, format=container, subtype=subtype or FORMATS[container])
    return file.getvalue()
