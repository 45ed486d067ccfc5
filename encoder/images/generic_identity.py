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
from encoder.images.load import DECODING_RULES_VERSION
from encoder.images.size import PixelBounds

MEASURED_SIDES = (32, 256, 1024, 4096)
"""Widths and heights in pixels of the images whose tokens an encoder counts at its start."""
MEASURED_FRAMES, MEASURED_SIDE = 16, 256
"""Number, width and height of the frames of the video by whose tokens those of any are estimated."""
MEASURED_SECONDS = (1, 10, 60)
"""Durations of the sounds whose tokens an encoder counts at its start."""


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
    """Visual tokens of images whose width (first index) and height are each of MEASURED_SIDES; empty if the model takes
    no images. They change no embedding: they are no part of the fingerprint."""
    in_engine: bool = False
    """Whether language models run the tower themselves: they get the image files, and nothing is computed outside."""
    audio_tokens: tuple[int, ...] = ()
    """Tokens of sounds of each of MEASURED_SECONDS; empty if no sounds are taken."""
    video_tokens: int = 0
    """Tokens of a video of MEASURED_FRAMES, by which the tokens of any are estimated; 0 if no videos are taken."""
    has_pixel_bounds: ClassVar[bool] = False
    """Whether requests may bound the pixels of resized images."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def modalities(self) -> tuple[str, ...]:
        """What the encoders take."""
        counts = {"image": self.token_counts, "audio": self.audio_tokens, "video": self.video_tokens}
        return tuple(modality for modality in counts if counts[modality])

    @cached_property
    def tower(self) -> str:
        """64 hex characters; a language model accepts only embeddings of its own checkpoint, or files."""
        if self.in_engine:
            return self.fingerprint
        return hashlib.sha256(json.dumps(["vllm", self.checkpoint]).encode()).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """64 hex characters over all that determines an image's embedding."""
        facts = ["engine", self.checkpoint] if self.in_engine else [self.tower, self.settings]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def digest(
        self,
        file: bytes,
        bounds: PixelBounds | None,
        salt: str | None = None,
        *,
        rules_version: str = DECODING_RULES_VERSION,
    ) -> str:
        """Returns the key of the embedding of an encoded file, 64 hex characters. `salt` separates tenants.

        `rules_version`: medium, version of its decoding rules and their settings; by default those of images."""
        return image_digest(
            file,
            rules_version=rules_version,
            bounds=bounds,
            numerics=self.fingerprint,
            weights=self.checkpoint,
            salt=salt,
        )

    def plan_image(self, digest: str, width: int, height: int, bounds: PixelBounds | None) -> tuple[int, None]:
        """Estimates the visual tokens of an image; there is no header: only vLLM's processor knows it.

        Interpolates linearly in both sides, which is exact between measured sizes for processors whose tokens are
        proportional to the image's area, or constant.
        """
        column, right = _interval(width)
        row, lower = _interval(height)
        near, far = (side[row] + lower * (side[row + 1] - side[row]) for side in self.token_counts[column : column + 2])
        return max(1, ceil(near + right * (far - near))), None

    def estimate_audio_tokens(self, seconds: float) -> int:
        """Estimates the tokens of a sound, linearly between the measured durations and beyond."""
        index = min(max(bisect_right(MEASURED_SECONDS, seconds) - 1, 0), len(MEASURED_SECONDS) - 2)
        (low, high), (few, many) = MEASURED_SECONDS[index : index + 2], self.audio_tokens[index : index + 2]
        return max(1, ceil(few + (seconds - low) / (high - low) * (many - few)))


Identity = EncoderIdentity | GenericIdentity


def identity_from_json(text: str) -> Identity:
    """Parses the output of `to_json` of either class; the result has the same fingerprint."""
    fields: dict[str, Any] = json.loads(text)
    if "token_counts" not in fields:
        return EncoderIdentity.from_json(text)
    images, sounds = tuple(map(tuple, fields["token_counts"])), tuple(fields.get("audio_tokens", ()))
    return GenericIdentity(**{**fields, "token_counts": images, "audio_tokens": sounds})


def _interval(side: int) -> tuple[int, float]:
    """Returns the index of the largest measured side up to `side`, and how far it is to the next one, 0 to 1."""
    index = min(max(bisect_right(MEASURED_SIDES, side) - 1, 0), len(MEASURED_SIDES) - 2)
    low, high = MEASURED_SIDES[index : index + 2]
    return index, min(max((side - low) / (high - low), 0.0), 1.0)
