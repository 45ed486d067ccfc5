"""Images, an identity and rules small enough that sizes can be followed by hand: a token is 28x28 pixels."""

from __future__ import annotations

import io
from collections.abc import Coroutine
from typing import Any, TypeVar

from PIL import Image

from encoder.identity import EncoderIdentity
from encoder.image_size import ImageRules
from encoder.vision_config import VisionConfig

RULES = ImageRules(min_pixels=28 * 28, max_pixels=28 * 28 * 100)
VISION = VisionConfig.from_dict(
    {
        "model_type": "qwen2_5_vl",
        "vision_config": {
            "hidden_size": 32,
            "depth": 1,
            "num_heads": 2,
            "intermediate_size": 40,
            "out_hidden_size": 8,
            "fullatt_block_indexes": [0],
        },
    }
)
IDENTITY = EncoderIdentity("weights", VISION, "float32", RULES)

T = TypeVar("T")


async def _it(result: T) -> T:
    if isinstance(result, BaseException):
        raise result
    return result


def at_once(*results: T) -> list[Coroutine[Any, Any, T]]:
    """What is awaited for each; an exception is raised."""
    return [_it(result) for result in results]


def png(width: int = 56, height: int = 56, colour: tuple[int, int, int] = (200, 30, 60)) -> bytes:
    """A PNG file of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()
