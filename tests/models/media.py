"""Images, sounds and videos for `prove.py`, the same in every run."""

from __future__ import annotations

import base64
import io
import wave
from fractions import Fraction

import numpy as np
from PIL import Image

SQUARE = 32
RATE = 16_000


def image(seed: int, height: int = 192, width: int = 320) -> bytes:
    """A PNG of large coloured squares: towers with random weights hardly tell pictures of noise apart."""
    rng = np.random.default_rng(seed)
    colours = rng.integers(0, 255, (height // SQUARE + 1, width // SQUARE + 1, 3), dtype=np.uint8)
    pixels = np.kron(colours, np.ones((SQUARE, SQUARE, 1), np.uint8))[:height, :width]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def audio(seed: int, seconds: float = 1.5, rate: int = RATE) -> bytes:
    """A WAV file of one beating tone."""
    times = np.arange(int(seconds * rate)) / rate
    sound = np.sin(times * 2 * np.pi * (220 + 110 * seed)) * np.sin(times * 3)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((sound * 20_000).astype(np.int16).tobytes())
    return file.getvalue()


def video(seed: int, frames: int = 12, height: int = 96, width: int = 128) -> bytes:
    """A list of JPEG frames: a square that moves over large coloured squares."""
    still = Image.open(io.BytesIO(image(seed, height, width)))
    files = []
    for number in range(frames):
        frame = still.copy()
        frame.paste((255, 255, 255), (8 * number, 32, 8 * number + SQUARE, 32 + SQUARE))
        frame.save(file := io.BytesIO(), "JPEG", quality=90)
        files.append(base64.b64encode(file.getvalue()))
    return b",".join(files)


def clip(seed: int) -> bytes:
    """An MP4 file of three seconds at eight frames a second."""
    from tests.video_files import Clip

    return Clip(24, Fraction(8), 128, 96, seed=seed, block=SQUARE).encode()


def items(modality: str) -> list[bytes]:
    """Two items of different size, and one of the first's size."""
    if modality == "audio":
        return [audio(1), audio(2, 0.8, rate=44_100), audio(7)]
    if modality == "video":
        return [video(1), video(2, 6), video(7)]
    return [image(1), image(2, 128, 128), image(7)]
