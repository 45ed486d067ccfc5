"""Identity of an encoder that runs vLLM's processor and model class, for checkpoints without image rules of ours.

Imports no torch, so that the HTTP ingress can compute digests.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil
from typing import Any, ClassVar

from encoder.images.identity import EncoderIdentity, image_digest
from encoder.images.size import PixelBounds

MEASURED_SIDES = (32, 256, 1024, 4096)
"""Widths and heights in pixels of the images whose tokens an encoder counts at its start."""


@dataclass(frozen=True)
class GenericIdentity:
    """Encoders with equal identities compute equal embeddings (up to rounding) for equal images.

    identity = GenericIdentity(checkpoint_fingerprint(path), settings, counts)
    num_tokens, _ = identity.plan_image(digest, 1280, 800, None)
    """

    checkpoint: str
    """`checkpoint_fingerprint`, 64 hex characters."""
    settings: str
    """vLLM's version and the arguments of its model class and processor, which change embeddings."""
    token_counts: tuple[tuple[int, ...], ...]
    """Visual tokens of images whose width (first index) and height are each of MEASURED_SIDES. They change no
    embedding: they are no part of the fingerprint."""
    has_pixel_bounds: ClassVar[bool] = False
    """Whether requests may bound the pixels of resized images."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @cached_property
    def tower(self) -> str:
        """64 hex characters; a language model accepts only embeddings of its own checkpoint."""
        return hashlib.sha256(json.dumps(["vllm", self.checkpoint]).encode()).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """64 hex characters over all that determines an image's embedding."""
        return hashlib.sha256(json.dumps([self.tower, self.settings]).encode()).hexdigest()

    def digest(self, image: bytes, bounds: PixelBounds | None, salt: str | None = None) -> str:
        """Returns the key of the embedding of an encoded file, 64 hex characters. `salt` separates tenants."""
        return image_digest(image, bounds=bounds, numerics=self.fingerprint, weights=self.checkpoint, salt=salt)

    def plan_image(self, digest: str, width: int, height: int, bounds: PixelBounds | None) -> tuple[int, None]:
        """Estimates the visual tokens of an image; there is no header: only vLLM's processor knows it.

        Interpolates linearly in both sides, which is exact between measured sizes for processors whose tokens are
        proportional to the image's area, or constant.
        """
        column, right = _interval(width)
        row, lower = _interval(height)
        near, far = (side[row] + lower * (side[row + 1] - side[row]) for side in self.token_counts[column : column + 2])
        return max(1, ceil(near + right * (far - near))), None


Identity = EncoderIdentity | GenericIdentity


def identity_from_json(text: str) -> Identity:
    """Parses the output of `to_json` of either class; the result has the same fingerprint."""
    fields: dict[str, Any] = json.loads(text)
    if "token_counts" not in fields:
        return EncoderIdentity.from_json(text)
    return GenericIdentity(**{**fields, "token_counts": tuple(map(tuple, fields["token_counts"]))})


def _interval(side: int) -> tuple[int, float]:
    """Returns the index of the largest measured side up to `side`, and how far it is to the next one, 0 to 1."""
    index = min(max(bisect_right(MEASURED_SIDES, side) - 1, 0), len(MEASURED_SIDES) - 2)
    low, high = MEASURED_SIDES[index : index + 2]
    return index, min(max((side - low) / (high - low), 0.0), 1.0)
