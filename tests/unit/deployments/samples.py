"""Images, an identity and rules small enough that sizes can be followed by hand: a token is 28x28 pixels."""

from __future__ import annotations

import io
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from PIL import Image

from configs.schema import IngressConfig
from deployments.ingress.fetch.fetcher import MediaFetcher
from deployments.ingress.http.image_parts import ImagePart
from deployments.ingress.image_jobs import RequestImages, build_encoder_jobs, fetch_images
from encoder.checkpoint.vision_config import VisionConfig
from encoder.images.generic_identity import Identity
from encoder.images.identity import EncoderIdentity
from encoder.images.size import ImageRules, PixelBounds

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
IDENTITY = EncoderIdentity("weights", VISION, "float32", RULES, image_token_id=7)

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


async def request_images(
    parts: Sequence[ImagePart],
    bounds: PixelBounds | None,
    identity: Identity,
    fetcher: MediaFetcher,
    limits: IngressConfig,
    *,
    salt: str | None = None,
) -> RequestImages:
    """What the ingress makes of a request's images."""
    return build_encoder_jobs(await fetch_images(parts, fetcher, limits), bounds, identity, limits, salt)
