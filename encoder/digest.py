"""The digest that names an embedding. Needs the standard library alone, so that any process can compute it.

It must not know of tensors, Ray or requests.
"""

from __future__ import annotations

import hashlib

from encoder.image_load import DECODING_RULES_VERSION
from encoder.image_rules import PixelBounds

_DOMAIN = b"vitray embedding digest 1"


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
    """64 hexadecimal characters (SHA-256) over everything that decides an image's embedding, and the tenant's salt.

    `data`: the encoded bytes, or the RGB bytes of an image that has no others; then `shape` is its width and height.
    `bounds`: as asked for; None and bounds that ask for nothing are the same. `numerics`: dtype, fp8, the tower's
    switches, and the checkpoint's ImageRules. `weights`: the identity of the vision weights. `salt`: the tenant's, or
    None for what all may share; an empty salt is a salt. Every field is framed by its length, so that no two different
    calls hash the same bytes.
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
