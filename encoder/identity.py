"""What decides an embedding beside the image itself, and the digest made of both.

Free of torch, so that the HTTP ingress can compute digests. It must not know where images come from.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from PIL import Image

from encoder.digest import image_digest
from encoder.image_load import to_rgb
from encoder.image_size import ImageRules, PixelBounds
from encoder.vision_config import VisionConfig


@dataclass(frozen=True)
class EncoderIdentity:
    """Two encoders with equal identities give equal embeddings (up to rounding) for equal images."""

    weights: str
    """sha256 over the vision tensors, hex."""
    vision: VisionConfig
    """The tower's architecture: heads, windows and the like change embeddings without changing a weight."""
    dtype: str
    """The dtype the tower computes in, such as "bfloat16"."""
    rules: ImageRules
    """How the checkpoint wants images resized and normalised."""
    forward: str = "eager"
    """Which form of the tower computes, "eager", "compiled", "fused" or "fp8": they round in different places."""

    @cached_property
    def fingerprint(self) -> str:
        """64 hex characters over all fields."""
        return hashlib.sha256(
            json.dumps(
                [self.weights, asdict(self.vision), self.dtype, asdict(self.rules), self.forward], sort_keys=True
            ).encode()
        ).hexdigest()

    def digest(self, image: bytes | Image.Image, bounds: PixelBounds | None, salt: str | None = None) -> str:
        """64 hex characters: the key of this image's embedding. `salt` separates tenants.

        An encoded file counts byte by byte; a PIL image, which has no such bytes, by its RGB samples and its shape.
        """
        shape = None
        if isinstance(image, Image.Image):
            rgb = to_rgb(image)
            image, shape = rgb.tobytes(), rgb.size
        return image_digest(
            image, bounds=bounds, numerics=self.fingerprint, weights=self.weights, salt=salt, shape=shape
        )
