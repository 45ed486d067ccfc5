"""A chat request: finds its images, refuses other media and client-supplied embeddings, and writes the body for vLLM,
in which references replace the images.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs.schema import IngressConfig
from deployments.common.api_error import ApiError
from deployments.common.messages import ItemReference
from deployments.ingress.http.data_url import decode_base64, decode_data_url, is_data_url, raise_as_api_error
from deployments.ingress.http.request_body import LARGE_BYTES, Body, parse_body
from encoder.images.size import PixelBounds

DETAILS = ("auto", "low", "high")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking", "reasoning")
IMAGE_PART = "image_url"
IMAGE_PARTS = (IMAGE_PART, "input_image")
UNSUPPORTED_MEDIA = {
    "video_url": "video",
    "video": "video",
    "input_audio": "audio",
    "audio_url": "audio",
    "file": "files",
}
# Keys that vLLM reads as media, whatever the part's type.
MEDIA_KEYS = frozenset(
    {"image_url", "input_image", "image_pil", "image_embeds", "video_url", "video_embeds", "audio_url"}
    | {"input_audio", "audio_embeds", "prompt_embeds", "image", "video", "audio"}
)
MEDIA_TYPES = frozenset({*IMAGE_PARTS, *UNSUPPORTED_MEDIA, "input_file", "image_embeds"})
MAX_BOUND_PIXELS = 2**40
"""Far above any image. Sizes are computed in floats, which a larger number might overflow."""
REFUSED_FIELDS = {
    "prompt_embeds": "embeddings cannot be sent",
    "media_io_kwargs": "how media is read cannot be chosen by a request",
    "return_mm_kwargs": "embeddings are not given out",
    "kv_transfer_params": "where the engine fetches from cannot be chosen by a request",
    "ec_transfer_params": "where the engine fetches from cannot be chosen by a request",
}


@dataclass(frozen=True)
class ImagePart:
    """An image part of a message."""

    part: Body
    """The part's JSON object, which `put_reference` changes in place."""
    url: str
    """Its URL; empty once a `data:` URL is decoded."""
    detail: str
    """One of DETAILS."""
    label: str
    """Name in error messages, such as "image 2 of 3"."""
    file: bytes | None = None
    """The image file; None until its URL is decoded or fetched."""


@dataclass
class ChatRequest:
    """A parsed and checked request body, without the image files, which `images` hold.

    chat = ChatRequest.parse(chunks, limits, takes_images=True, salt=None)
    body, conversation = chat.to_json(references, digests)
    """

    images: list[ImagePart]
    """Images of all messages, in order."""
    pixel_bounds: PixelBounds | None
    """Pixel bounds that the request sets for its images."""
    num_bytes: int
    """Approximate bytes in memory: image files, and the body without their base64."""
    _body: Body

    @classmethod
    def parse(cls, chunks: list[bytes], limits: IngressConfig, *, takes_images: bool, salt: str | None) -> ChatRequest:
        """Parses a body, decodes its `data:` URLs and clears `chunks`.

        `salt` separates tenants in vLLM's prefix cache; None for a client without key and tenant. Every route's body
        gets it, so that no route can lack it; vLLM ignores it where it has no use.

        Raises:
            ApiError: 400 or 413 for a body, a field or an image that is refused; 501 for images on a text-only route.
        """
        data = b"".join(chunks)
        chunks.clear()
        body, files = parse_body(data, max_answers=limits.max_completions_per_request, cut=takes_images)
        images = _images(body, files) if takes_images else []
        if images is None:
            body, files = parse_body(data, max_answers=limits.max_completions_per_request, cut=False)
            images = image_parts(body)
        refuse_fields(body)
        bounds = pop_pixel_bounds(body if images else dict(body))
        if salt is not None:
            set_cache_salt(body, salt)
        if not takes_images and has_media([body.get("input"), body.get("messages")]):
            unsupported = "only text is supported on this route; send images to /v1/chat/completions"
            raise ApiError(501, unsupported, code="images_not_supported")
        if len(images) > (max_images := limits.max_images_per_request):
            raise ApiError(400, f"the request has {len(images)} images, the limit is {max_images}", param="messages")
        decoded = [_decode(image, files, limits.max_image_bytes) for image in images]
        file_bytes = sum(len(image.file) for image in decoded if image.file is not None)
        return cls(decoded, bounds, max(len(data) - file_bytes // 3, file_bytes), body)

    def to_json(
        self, references: Sequence[ItemReference] = (), digests: Sequence[str] = ()
    ) -> tuple[bytes, str | None]:
        """Returns the body for the language model, with references instead of images, and its `conversation`.

        The parsed body is written, since another parser could read duplicate names of the original differently.
        `digests` has one entry per image. Raises ApiError 400 for a body that is nested too deeply.
        """
        for image, reference in zip(self.images, references, strict=True):
            put_reference(image, reference)
        key = conversation(
            self._body, {reference.key: digest for reference, digest in zip(references, digests, strict=True)}
        )
        return body_to_json(self._body, self.num_bytes), key


def image_parts(body: Body) -> list[ImagePart]:
    """Returns the images of all messages of a chat, in order.

    Raises:
        ApiError: 400 for unsupported media or a malformed part; it names the message and the part.
    """
    found: list[tuple[Body, str, str]] = []
    messages = body.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for position, part in enumerate(content if isinstance(content, list) else []):
            image = _parse_image_part(part, f"messages[{number}].content[{position}]")
            if image is not None:
                found.append((part, *image))
    total = len(found)
    return [ImagePart(part, url, detail, f"image {i + 1} of {total}") for i, (part, url, detail) in enumerate(found)]


def _images(body: Body, files: Mapping[str, memoryview]) -> list[ImagePart] | None:
    """Returns the images of a body in which names replace the URLs of `files`.

    Returns None if such a name replaces anything but an image's URL, or if an error would quote it: the original body
    must then be parsed.
    """
    try:
        images = image_parts(body)
    except ApiError:
        if not files:
            raise
        return None
    return images if sum(image.url in files for image in images) == len(files) else None


def has_media(value: object) -> bool:
    """Whether `value` holds media at any depth. Used for text-only routes."""
    waiting = [value]  # not recursive: the JSON parser accepts deeper nesting than Python's recursion limit
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
    """Raises ApiError 400 for fields by which a client could pass embeddings to vLLM or make it fetch something."""
    for name, reason in REFUSED_FIELDS.items():
        if body.get(name) not in (None, False):
            raise ApiError(400, f"{name}: {reason}", param=name, code="unsupported_field")


def set_cache_salt(body: Body, salt: str) -> None:
    """Sets `cache_salt`, which separates tenants in vLLM's prefix cache. The client's own salt only separates further.

    Raises:
        ApiError: 400 if the client's salt is not a string or is empty.
    """
    own = body.get("cache_salt")
    if own is not None and not (isinstance(own, str) and own):
        raise ApiError(400, "cache_salt must be a text that is not empty", param="cache_salt")
    body["cache_salt"] = hashlib.sha256(json.dumps([salt, own]).encode()).hexdigest()


def conversation(body: Body, digests: Mapping[str, str]) -> str | None:
    """Returns a hash (64 hex characters) that all turns of a conversation share: of the messages up to the first
    user message, with images as digests, and the tenant's salt. Returns None for a body without messages.

    `digests`: digest of each image by the key of its reference.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    users = (at for at, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user")
    opening = messages[: next(users, 0) + 1]
    common = [
        body.get("cache_salt"),
        body.get("model"),
        body.get("system"),
        body.get("tools"),
        _by_digest(opening, digests),
    ]
    try:
        return hashlib.sha256(json.dumps(common).encode()).hexdigest()
    except RecursionError:  # nested deeper than Python's recursion limit
        return None


def _by_digest(messages: Sequence[object], digests: Mapping[str, str]) -> list[object]:
    """Returns the messages with a digest instead of each image's key, which differs between requests."""
    return [
        [
            _digest_or_part(part, digests)
            for part in (message["content"] if isinstance(message["content"], list) else [message["content"]])
        ]
        if isinstance(message, dict) and "content" in message
        else message
        for message in messages
    ]


def _digest_or_part(part: object, digests: Mapping[str, str]) -> object:
    image = part.get(IMAGE_PART) if isinstance(part, dict) else None
    url = image.get("url") if isinstance(image, dict) else None
    return digests.get(url, part) if isinstance(url, str) else part


def put_reference(image: ImagePart, reference: ItemReference) -> None:
    """Replaces the image part by one whose URL is the reference's key."""
    image.part.clear()
    image.part.update(type=IMAGE_PART, image_url={"url": reference.key})


def pop_pixel_bounds(body: Body) -> PixelBounds | None:
    """Removes `mm_processor_kwargs` and returns its pixel bounds. vLLM gets no pixels to apply them to.

    Raises:
        ApiError: 400 for other keys or invalid values.
    """
    kwargs = body.pop("mm_processor_kwargs", None)
    if kwargs is None:
        return None
    if not isinstance(kwargs, dict):
        raise ApiError(400, "mm_processor_kwargs must be an object", param="mm_processor_kwargs")
    for key, value in kwargs.items():
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
        return PixelBounds(kwargs.get("min_pixels"), kwargs.get("max_pixels"))
    except ValueError as error:
        raise ApiError(400, f"mm_processor_kwargs: {error}", param="mm_processor_kwargs") from error


def _parse_image_part(part: object, where: str) -> tuple[str, str] | None:
    """Returns URL and detail of an image part, None for text. Raises ApiError 400 as `image_parts` does."""
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


def _decode(image: ImagePart, files: Mapping[str, memoryview], max_bytes: int) -> ImagePart:
    """Returns the image with the file of its `data:` URL decoded and the URL's text dropped. Other URLs are kept."""
    with raise_as_api_error(image.label):
        if image.url in files:
            file = decode_base64(files[image.url], max_bytes=max_bytes)
        elif is_data_url(image.url):
            file = decode_data_url(image.url, max_bytes=max_bytes)
        else:
            return image
    image.part.clear()  # frees the URL's text; `put_reference` fills the part before it is read
    return dataclasses.replace(image, url="", file=file)


def body_to_json(body: Body, num_bytes: int = 0) -> bytes:
    """Returns `body` as JSON, of about `num_bytes`. Raises ApiError 400 for a body that is nested too deeply."""
    try:
        if num_bytes < LARGE_BYTES:
            return json.dumps(body).encode()
        return "".join(json.JSONEncoder().iterencode(body)).encode()  # slower, but lets other threads run
    except RecursionError as error:  # the parser accepts a few levels more
        raise ApiError(400, "the request body is nested too deeply") from error
