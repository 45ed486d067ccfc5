"""Identity of an encoder, which with the image determines an embedding, and the digest of both.

Imports no torch, so that the HTTP ingress can compute digests.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

from PIL import Image

from encoder.checkpoint.video_rules import VideoRules
from encoder.checkpoint.vision_config import VisionConfig
from encoder.images.load import DECODING_RULES_VERSION, to_rgb
from encoder.images.size import Grid, ImageRules, PixelBounds, image_grid, num_tokens
from encoder.item_header import ItemHeader, PromptRun, PromptUpdate

_DOMAIN = b"vitray embedding digest 1"


@dataclass(frozen=True)
class EncoderIdentity:
    """Encoders with equal identities compute equal embeddings (up to rounding) for equal images.

    digest = identity.digest(jpeg_bytes, bounds=None)
    """

    weights: str
    """SHA-256 of the vision tensors, 64 hex characters."""
    vision: VisionConfig
    """Architecture of the tower: heads, windows etc. change embeddings without changing a weight."""
    dtype: str
    """Compute dtype of the tower, such as "bfloat16"."""
    rules: ImageRules
    """The checkpoint's rules for resizing and normalising images."""
    forward: str = "eager"
    """Forward of the tower, "eager", "compiled", "fused" or "fp8": they round in different places."""
    image_token_id: int | None = None
    """Token of an image in prompts, which does not change embeddings: it is no part of the fingerprint. None without a
    checkpoint."""
    videos: VideoRules | None = None
    """The checkpoint's rules for sampling and resizing videos; None if no videos are taken."""
    in_engine: ClassVar[bool] = False
    has_pixel_bounds: ClassVar[bool] = True
    """Whether requests may bound the pixels of resized images."""

    @property
    def modalities(self) -> tuple[str, ...]:
        """What the encoders take."""
        return ("image", "video") if self.videos is not None else ("image",)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> EncoderIdentity:
        """Parses the output of `to_json`; the result has the same fingerprint."""
        fields: dict[str, Any] = json.loads(text)
        vision: dict[str, Any] = fields["vision"]
        tuples = {name: tuple(value) for name, value in vision.items() if isinstance(value, list)}
        videos = None if fields.get("videos") is None else VideoRules(**fields["videos"])
        parsed = {"vision": VisionConfig(**vision | tuples), "rules": ImageRules(**fields["rules"]), "videos": videos}
        return cls(**{**fields, **parsed})

    @cached_property
    def tower(self) -> str:
        """64 hex characters over the checkpoint's part of the identity. A language model accepts only embeddings of its
        own tower, whatever their dtype and forward.
        """
        return tower_fingerprint(self.weights, self.vision, self.rules)

    @cached_property
    def fingerprint(self) -> str:
        """64 hex characters over all fields that determine an embedding."""
        facts = [self.weights, asdict(self.vision), self.dtype, asdict(self.rules), self.forward]
        if self.videos is not None:
            facts.append(asdict(self.videos))
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def digest(
        self,
        image: bytes | Image.Image,
        bounds: PixelBounds | None,
        salt: str | None = None,
        *,
        rules_version: str = DECODING_RULES_VERSION,
    ) -> str:
        """Returns the key of an image's or a video's embedding, 64 hex characters. `salt` separates tenants.

        The digest covers the bytes of an encoded file, or the RGB samples and the size of a PIL image. `rules_version`:
        as in `GenericIdentity.digest`.
        """
        shape = None
        if isinstance(image, Image.Image):
            rgb = to_rgb(image)
            image, shape = rgb.tobytes(), rgb.size
        return image_digest(
            image,
            rules_version=rules_version,
            bounds=bounds,
            numerics=self.fingerprint,
            weights=self.weights,
            salt=salt,
            shape=shape,
        )

    def plan_image(self, digest: str, width: int, height: int, bounds: PixelBounds | None) -> tuple[int, ItemHeader]:
        """Returns the visual tokens of an image of `width` x `height` pixels, and its header. Raises ImageError."""
        grid = image_grid(width, height, self.rules, bounds)
        return num_tokens(grid, self.rules.merge_size), self.header(digest, grid)

    def header(self, digest: str, grid: Grid) -> ItemHeader:
        """Returns the header of an image, which equals that of vLLM's processor for the checkpoint.

        digest: `digest` of the image. grid: its grid in patches, `encoder.images.size.image_grid`.
        """
        if self.image_token_id is None:
            raise ValueError("the identity has no image_token_id: it was not made from a checkpoint")
        count = num_tokens(grid, self.rules.merge_size)
        runs = (PromptRun(self.image_token_id, count, True),)
        return ItemHeader(digest, "image", count, (PromptUpdate("replace", (self.image_token_id,), runs),), grid)


def tower_fingerprint(weights: str, vision: VisionConfig, rules: ImageRules) -> str:
    """Computes `EncoderIdentity.tower` from its parts."""
    return hashlib.sha256(json.dumps([weights, asdict(vision), asdict(rules)], sort_keys=True).encode()).hexdigest()


def image_digest(
    data: bytes,
    *,
    rules_version: str = DECODING_RULES_VERSION,
    bounds: PixelBounds | None,
    numerics: str,
    weights: str,
    salt: str | None,
    shape: tuple[int, int] | None = None,
) -> str:
    """Returns the SHA-256, 64 hex characters, of everything that determines an image's embedding, and of the salt.

    `data`: the encoded file, or the RGB bytes of a decoded image, whose width and height are `shape`. `bounds`: as
    requested; None equals bounds without values. `numerics`: `EncoderIdentity.fingerprint`. `weights`: hash of the
    vision weights. `salt`: the tenant's, or None for a digest that all share; an empty salt counts as a salt. Every
    field is framed by its length, so that different arguments never hash the same bytes.
    """
    bounds = bounds or PixelBounds()
    digest = hashlib.sha256()
    for field in (_DOMAIN, rules_version, bounds.min_pixels, bounds.max_pixels, numerics, weights, salt, shape, data):
        if field is None:
            digest.update(b"-")
            continue
        framed = field if isinstance(field, bytes) else (field if isinstance(field, str) else repr(field)).encode()
        digest.update(b"+%d:" % len(framed))
        digest.update(framed)
    return digest.hexdigest()
