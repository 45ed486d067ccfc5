"""A chat, in one of three formats: checks its fields, decodes its images, and writes the body for vLLM, in which
references replace the images.
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
from deployments.ingress.http.image_parts import MEDIA_KEYS, MEDIA_TYPES, BodyFormat, ImagePart, image_parts
from deployments.ingress.http.request_body import LARGE_BYTES, Body, parse_body
from encoder.images.size import PixelBounds

MAX_BOUND_PIXELS = 2**40
"""Far above any image. Sizes are computed in floats, which a larger number might overflow."""
REFUSED_FIELDS = {
    "prompt_embeds": "embeddings cannot be sent",
    "media_io_kwargs": "how media is read cannot be chosen by a request",
    "return_mm_kwargs": "embeddings are not given out",
    "kv_transfer_params": "where the engine fetches from cannot be chosen by a request",
    "ec_transfer_params": "where the engine fetches from cannot be chosen by a request",
    "previous_response_id": "responses are not stored: one replica would have to keep them; send the earlier input",
    "background": "responses are not stored: one replica would have to keep them; stream the answer",
    "previous_input_messages": "send the earlier items in input",
}


@dataclass
class ChatRequest:
    """A parsed and checked request body, without the image files, which `images` hold.

    chat = ChatRequest.parse(chunks, limits, body_format=BodyFormat.CHAT, salt=None)
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
    def parse(
        cls, chunks: list[bytes], limits: IngressConfig, *, body_format: BodyFormat | None, salt: str | None
    ) -> ChatRequest:
        """Parses a body, decodes its images and clears `chunks`. `body_format`: None for a text-only route.

        `salt` separates tenants in vLLM's prefix cache; None for a client without key and tenant. Every route's body
        gets it, so that no route can lack it; vLLM ignores it where it has no use.

        Raises:
            ApiError: 400 or 413 for a body, a field or an image that is refused; 501 for images on a text-only route.
        """
        data = b"".join(chunks)
        chunks.clear()
        body, images, files = _parse(data, body_format, limits.max_completions_per_request)
        refuse_fields(body)
        bounds = pop_pixel_bounds(body if images else dict(body))
        if salt is not None:
            set_cache_salt(body, salt)
        if body_format is None and has_media([body.get("input"), body.get("messages")]):
            unsupported = "only text is supported on this route; send images to /v1/chat/completions"
            raise ApiError(501, unsupported, code="images_not_supported")
        _check_number(images, limits)
        decoded = [_decode(image, files, limits.max_image_bytes) for image in images]
        file_bytes = sum(len(image.file) for image in decoded if image.file is not None)
        return cls(decoded, bounds, max(len(data) - file_bytes // 3, file_bytes), body)

    @property
    def cache_salt(self) -> str | None:
        salt = self._body.get("cache_salt")
        return salt if isinstance(salt, str) else None

    def to_json(
        self, references: Sequence[ItemReference] = (), digests: Sequence[str] = ()
    ) -> tuple[bytes, str | None]:
        """Returns the body for the language model, with references instead of images, and its `conversation`.

        The parsed body is written, since another parser could read duplicate names of the original differently.
        `digests` has one entry per image. Raises ApiError 400 for a body that is nested too deeply.
        """
        for image, digest in zip(self.images, digests, strict=True):
            image.put_url(digest)
        key = conversation(self._body)
        for image, reference in zip(self.images, references, strict=True):
            image.put_url(reference.key)
        return body_to_json(self._body, self.num_bytes), key


def _check_number(images: Sequence[ImagePart], limits: IngressConfig) -> None:
    """Raises ApiError 400 for too many new images, or too many earlier ones."""
    num_new = sum(image.is_new for image in images)
    if num_new > (most := limits.max_images_per_request):
        raise ApiError(400, f"the request has {num_new} images, the limit is {most}", param=images[0].param)
    if (earlier := len(images) - num_new) > (most := limits.max_earlier_images_per_request):
        raise ApiError(400, f"the earlier turns have {earlier} images, the limit is {most}", param=images[0].param)


def _parse(
    data: bytes, body_format: BodyFormat | None, max_answers: int
) -> tuple[Body, list[ImagePart], Mapping[str, memoryview]]:
    """Returns the body, its images, and the base64 of those whose URL is a name (`cut_files`).

    The base64 is parsed only if such a name replaces anything but an image, or if an error would quote it.
    """
    body, files = parse_body(data, max_answers=max_answers, cut=body_format is not None)
    if body_format is None:
        return body, [], files
    try:
        images = image_parts(body, body_format, files)
        if sum(image.url in files for image in images) == len(files):
            return body, images, files
    except ApiError:
        if not files:
            raise
    body, files = parse_body(data, max_answers=max_answers, cut=False)
    return body, image_parts(body, body_format), files


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


def conversation(body: Body) -> str | None:
    """Returns a hash (64 hex characters) that all turns of a conversation share: of the messages or items up to the
    first user message, in which digests are the URLs of images, and the tenant's salt. Returns None for a body without.
    """
    messages = body.get("messages", body.get("input"))
    if not isinstance(messages, list) or not messages:
        return None
    users = (at for at, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user")
    opening = messages[: next(users, 0) + 1]
    names = ("cache_salt", "model", "system", "instructions", "tools")
    try:
        return hashlib.sha256(json.dumps([*map(body.get, names), opening]).encode()).hexdigest()
    except RecursionError:  # nested deeper than Python's recursion limit
        return None


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


def _decode(image: ImagePart, files: Mapping[str, memoryview], max_bytes: int) -> ImagePart:
    """Returns the image with the file of its `data:` URL decoded and the URL's text dropped. Other URLs are kept."""
    with raise_as_api_error(image.label, image.param):
        if image.url in files:
            file = decode_base64(files[image.url], max_bytes=max_bytes)
        elif is_data_url(image.url):
            file = decode_data_url(image.url, max_bytes=max_bytes)
        else:
            return image
    image.part.clear()  # frees the URL's text; `put_url` fills the part before it is read
    return dataclasses.replace(image, url="", file=file)


def body_to_json(body: Body, num_bytes: int = 0) -> bytes:
    """Returns `body` as JSON, of about `num_bytes`. Raises ApiError 400 for a body that is nested too deeply."""
    try:
        if num_bytes < LARGE_BYTES:
            return json.dumps(body).encode()
        return "".join(json.JSONEncoder().iterencode(body)).encode()  # slower, but lets other threads run
    except RecursionError as error:  # the parser accepts a few levels more
        raise ApiError(400, "the request body is nested too deeply") from error
