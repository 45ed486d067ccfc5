"""Finds the images in a chat request, refuses other media and everything that would let a client name an embedding,
and puts keys in the images' places.

Pure functions of the parsed body. This module must not know how images are fetched or encoded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.errors import ApiError
from deployments.wire import ImagePlace
from encoder.image_size import PixelBounds

Body = dict[str, Any]  # a JSON object; the walk below checks what it touches

DETAILS = ("auto", "low", "high")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking", "reasoning")
IMAGE_PARTS = ("image_url", "input_image")
UNSUPPORTED_MEDIA = {
    "video_url": "video",
    "video": "video",
    "input_audio": "audio",
    "audio_url": "audio",
    "file": "files",
}
# Keys that carry media for vLLM whatever the part's type says.
MEDIA_KEYS = frozenset(
    {"image_url", "input_image", "image_pil", "image_embeds", "video_url", "video_embeds", "audio_url"}
    | {"input_audio", "audio_embeds", "prompt_embeds", "image", "video", "audio"}
)
MEDIA_TYPES = frozenset({*IMAGE_PARTS, *UNSUPPORTED_MEDIA, "input_file", "image_embeds"})
MAX_BOUND_PIXELS = 2**40
"""Far over any image; the arithmetic of sizes is done in floats, which a larger number might overflow."""
REFUSED_FIELDS = {
    "prompt_embeds": "embeddings cannot be sent",
    "media_io_kwargs": "how media is read cannot be chosen by a request",
    "return_mm_kwargs": "embeddings are not given out",
    "kv_transfer_params": "where the engine fetches from cannot be chosen by a request",
    "ec_transfer_params": "where the engine fetches from cannot be chosen by a request",
}


@dataclass(frozen=True)
class ImagePart:
    """An image that a message holds."""

    part: Body
    """The part itself, replaced in place by `put_key`."""
    url: str
    detail: str
    label: str
    """ "image 2 of 3"."""


def image_parts(body: Body) -> list[ImagePart]:
    """The images of all messages of a chat, in order.

    Raises:
        ApiError: 400, naming the message and the part, for a medium that is not supported or a malformed part.
    """
    found: list[tuple[Body, str, str]] = []
    messages = body.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for position, part in enumerate(content if isinstance(content, list) else []):
            image = _image_of(part, f"messages[{number}].content[{position}]")
            if image is not None:
                found.append((part, *image))
    total = len(found)
    return [ImagePart(part, url, detail, f"image {i + 1} of {total}") for i, (part, url, detail) in enumerate(found)]


def holds_media(value: object) -> bool:
    """Whether a medium is named anywhere inside `value`; for routes that take none."""
    waiting = [value]  # not recursive: the JSON parser reads what is nested deeper than Python may call
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            kind = inner.get("type")
            if (isinstance(kind, str) and kind in MEDIA_TYPES) or not MEDIA_KEYS.isdisjoint(inner):
                return True
            waiting.extend(inner.values())
        elif isinstance(inner, list):
            waiting.extend(inner)
    return False


def refuse_fields(body: Body) -> None:
    """Raises ApiError 400 for fields through which a client could hand media to vLLM or send it to fetch something.

    What `mm_processor_kwargs` may hold is the same on routes and in requests without images.
    """
    pop_bounds(dict(body))
    for name, reason in REFUSED_FIELDS.items():
        if body.get(name) not in (None, False):
            raise ApiError(400, f"{name}: {reason}", param=name, code="unsupported_field")


def put_salt(body: Body, salt: str) -> None:
    """Keeps a tenant's prefixes apart in vLLM's cache; a salt of the client's own separates further, and never less.

    Raises:
        ApiError: 400 where the client's is no text.
    """
    own = body.get("cache_salt")
    if own is not None and not (isinstance(own, str) and own):
        raise ApiError(400, "cache_salt must be a text that is not empty", param="cache_salt")
    body["cache_salt"] = hashlib.sha256(json.dumps([salt, own]).encode()).hexdigest()


def conversation(body: Body) -> str | None:
    """What the turns of one conversation have in common, as 64 hex characters: all up to the first thing that a user
    said, images by their digests, and the tenant's salt. None where the body holds no messages."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    users = (at for at, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user")
    opening = messages[: next(users, 0) + 1]
    common = [body.get("cache_salt"), body.get("model"), body.get("system"), body.get("tools"), _by_digest(opening)]
    try:
        return hashlib.sha256(json.dumps(common).encode()).hexdigest()
    except RecursionError:  # nested deeper than Python may call
        return None


def _by_digest(messages: Sequence[object]) -> list[object]:
    """The messages with a digest in the place of each image's keys, which are new every time."""
    return [
        [
            part.get("uuid") if isinstance(part, dict) and "image_embeds" in part else part
            for part in (message["content"] if isinstance(message["content"], list) else [message["content"]])
        ]
        if isinstance(message, dict) and "content" in message
        else message
        for message in messages
    ]


def put_key(image: ImagePart, place: ImagePlace, digest: str) -> None:
    """Turns the part into one that names an embedding by its keys."""
    image.part.clear()
    image.part.update(
        type="image_embeds",
        image_embeds={"image_embeds": place.tokens_key, "image_grid_thw": place.grid_key},
        uuid=digest,
    )


def pop_bounds(body: Body) -> PixelBounds | None:
    """The pixel bounds that `mm_processor_kwargs` asks for, taken out of the body: vLLM has no pixels to apply them to.

    Raises:
        ApiError: 400 for anything else in there.
    """
    asked = body.pop("mm_processor_kwargs", None)
    if asked is None:
        return None
    if not isinstance(asked, dict):
        raise ApiError(400, "mm_processor_kwargs must be an object", param="mm_processor_kwargs")
    for key, value in asked.items():
        if key not in ("min_pixels", "max_pixels"):
            raise ApiError(
                400,
                f"mm_processor_kwargs: only min_pixels and max_pixels are supported, got {key!r}",
                param="mm_processor_kwargs",
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ApiError(
                400, f"mm_processor_kwargs.{key} must be a positive integer, got {value!r}", param="mm_processor_kwargs"
            )
        if value > MAX_BOUND_PIXELS:
            raise ApiError(
                400,
                f"mm_processor_kwargs.{key} is over the limit of {MAX_BOUND_PIXELS} pixels",
                param="mm_processor_kwargs",
            )
    try:
        return PixelBounds(asked.get("min_pixels"), asked.get("max_pixels"))
    except ValueError as error:
        raise ApiError(400, f"mm_processor_kwargs: {error}", param="mm_processor_kwargs") from error


def _image_of(part: object, where: str) -> tuple[str, str] | None:
    """URL and detail where `part` is an image, None where it is text."""
    if isinstance(part, str):
        return None
    if not isinstance(part, dict):
        raise ApiError(400, f"{where} must be an object with a type", param="messages")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise ApiError(400, f"{where}.type is missing; known types: text, image_url", param="messages")
    if kind in UNSUPPORTED_MEDIA:
        raise ApiError(
            400,
            f"{where}: {UNSUPPORTED_MEDIA[kind]} is not supported yet; send text and images",
            param="messages",
            code="unsupported_media",
        )
    if kind not in TEXT_PARTS and kind not in IMAGE_PARTS:
        raise ApiError(400, f"{where}: unknown part type {kind!r}; known types: text, image_url", param="messages")
    for key in part:
        if key in MEDIA_KEYS and not (kind in IMAGE_PARTS and key in ("image_url", kind)):
            raise ApiError(400, f"{where}: a part of type {kind!r} cannot hold {key!r}", param="messages")
    if kind in TEXT_PARTS:
        return None
    if part.get("uuid") is not None:
        raise ApiError(400, f"{where}: uuid cannot be chosen by a request", param="messages")
    value = part.get("image_url", part.get(kind))
    url, detail = (value.get("url"), value.get("detail")) if isinstance(value, dict) else (value, part.get("detail"))
    if not isinstance(url, str) or not url:
        raise ApiError(400, f"{where}: image_url.url must be a data: or http(s) URL", param="messages")
    if detail is None:
        detail = "auto"
    if detail not in DETAILS:
        raise ApiError(400, f"{where}: detail must be one of {', '.join(DETAILS)}, got {detail!r}", param="messages")
    return url, detail
