"""A chat, in one of three formats: checks its fields, decodes its images, and writes the body for vLLM, in which
references replace the images.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs.schema import IngressConfig
from deployments.common.api_error import ApiError
from deployments.common.messages import ItemReference, VideoSampling
from deployments.ingress.http.image_parts import (
    MEDIA_KEYS,
    MEDIA_TYPES,
    BodyFormat,
    ImagePart,
    decode_images,
    image_parts,
)
from deployments.ingress.http.request_body import LARGE_BYTES, Body, parse_body
from encoder.images.size import PixelBounds

MAX_FPS = 240.0
MAX_BOUND_PIXELS = 2**40
"""Far above any image. Sizes are computed in floats, which a larger number might overflow."""


@dataclass
class ChatRequest:
    """A parsed and checked request body, without the image files, which `images` hold.

    chat = ChatRequest.parse(chunks, limits, body_format=BodyFormat.CHAT, salt=None)
    body, conversation = chat.to_json(references, digests)
    """

    images: list[ImagePart]
    """Images, sounds and videos of all messages, in order."""
    pixel_bounds: PixelBounds | None
    """Pixel bounds that the request sets for its images."""
    sampling: VideoSampling
    """How the request samples its videos."""
    num_bytes: int
    """Approximate bytes in memory: image files, and the body without their base64."""
    store: bool
    """Whether the response is to be stored, on the Responses route."""
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
        body, images = _parse(data, body_format, limits)
        if body_format is None and has_media([body.get("input"), body.get("messages")]):
            unsupported = "only text is supported on this route; send other media to /v1/chat/completions"
            raise ApiError(501, unsupported, code="images_not_supported")
        bounds = pop_pixel_bounds(body if images else dict(body))
        store = body_format is BodyFormat.RESPONSES and take_store(body)
        sampling = pop_video_sampling(body, limits.video.max_frames)
        if salt is not None:
            set_cache_salt(body, salt)
        file_bytes = sum(len(image.file) for image in images if image.file is not None)
        return cls(images, bounds, sampling, max(len(data) - file_bytes // 3, file_bytes), store, body)

    @property
    def cache_salt(self) -> str | None:
        salt = self._body.get("cache_salt")
        return salt if isinstance(salt, str) else None

    def set_response_id(self, response_id: str) -> None:
        """Sets the id of vLLM's response."""
        self._body["request_id"] = response_id

    def own_items(self, first: int) -> list[bytes]:
        """Returns the items of `input` from index `first` on as JSON, with their images as they came. Called after the
        last `to_json`, whose references they replace."""
        items = (input_items(self._body.get("input")) or [])[first:]
        own = set(map(id, _objects(items)))  # images of earlier turns are stored already
        for image in self.images:
            if id(image.part) in own:
                image.restore()
        return [body_to_json(item) for item in items]

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


def _parse(data: bytes, body_format: BodyFormat | None, limits: IngressConfig) -> tuple[Body, list[ImagePart]]:
    """Returns the body and its images, decoded as `decode_images` does.

    Their base64 is parsed only if a name that stands for it (`cut_files`) replaces anything but an image, or if an
    error would quote it.
    """
    max_answers = limits.max_completions_per_request
    body, files = parse_body(data, max_answers=max_answers, cut=body_format is not None)
    images: list[ImagePart] = []
    if body_format is not None:
        try:
            images = image_parts(body, body_format, files)
        except ApiError:
            if not files:
                raise
        if sum(image.url in files for image in images) != len(files):
            body, files = parse_body(data, max_answers=max_answers, cut=False)
            images = image_parts(body, body_format)
    return body, decode_images(images, files, limits)


def has_media(value: object) -> bool:
    """Whether `value` holds media at any depth. Used for text-only routes."""
    for inner in _objects(value):
        kind = inner.get("type")
        if (isinstance(kind, str) and kind in MEDIA_TYPES) or not MEDIA_KEYS.isdisjoint(inner):
            return True
    return False


def _objects(value: object) -> Iterator[Body]:
    """Yields the JSON objects in `value`, at any depth."""
    waiting = [value]  # not recursive: the JSON parser accepts deeper nesting than Python's recursion limit
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            yield inner
            waiting.extend(inner.values())
        elif isinstance(inner, list):
            waiting.extend(inner)


def set_cache_salt(body: Body, salt: str) -> None:
    """Sets `cache_salt`, which separates tenants in vLLM's prefix cache. The client's own salt only separates further.

    Raises:
        ApiError: 400 if the client's salt is not a string or is empty.
    """
    own = body.get("cache_salt")
    if own is not None and not (isinstance(own, str) and own):
        raise ApiError(400, "cache_salt must be a text that is not empty", param="cache_salt")
    body["cache_salt"] = hashlib.sha256(json.dumps([salt, own]).encode()).hexdigest()


def take_store(body: Body) -> bool:
    """Returns `store`, by default true as in OpenAI's API, and sets it to false for vLLM. Raises ApiError 400."""
    store = body.get("store")
    if not (store is None or isinstance(store, bool)):
        raise ApiError(400, "store must be true or false", param="store")
    body["store"] = False
    return store is not False


def input_items(value: object) -> list[Body] | None:
    """Returns the items of a Responses request's `input`, of which a text is one. None for anything else."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else None


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
    name = "mm_processor_kwargs"
    kwargs = body.pop(name, None)
    if kwargs is None:
        return None
    if not isinstance(kwargs, dict):
        raise ApiError(400, "mm_processor_kwargs must be an object", param=name)
    for other in kwargs.keys() - {"min_pixels", "max_pixels"}:
        place = "; it belongs in media_io_kwargs.video" if other in ("fps", "num_frames") else ""
        message = f"mm_processor_kwargs.{other}: only min_pixels and max_pixels can be chosen by a request{place}"
        raise ApiError(400, message, param=name)
    for key, value in kwargs.items():
        if not (type(value) is int and 1 <= value <= MAX_BOUND_PIXELS):
            message = f"mm_processor_kwargs.{key} must be an integer from 1 to {MAX_BOUND_PIXELS}, got {value!r}"
            raise ApiError(400, message, param=name)
    try:
        return PixelBounds(**kwargs)
    except ValueError as error:
        raise ApiError(400, f"{name}: {error}", param=name) from error


def pop_video_sampling(body: Body, max_frames: int) -> VideoSampling:
    """Removes `media_io_kwargs` and returns its settings for videos. vLLM gets no files to apply them to.

    Raises:
        ApiError: 400 for other media, other keys or invalid values.
    """
    name = "media_io_kwargs"
    kwargs = body.pop(name, None)
    if kwargs in (None, False):
        return VideoSampling()
    video = kwargs.get("video", {}) if isinstance(kwargs, dict) and kwargs.keys() <= {"video"} else None
    if not isinstance(video, dict) or not video.keys() <= {"fps", "num_frames"}:
        raise ApiError(400, f"{name}: only video.fps and video.num_frames can be chosen by a request", param=name)
    fps, num_frames = video.get("fps"), video.get("num_frames")
    is_number = isinstance(fps, int | float) and not isinstance(fps, bool)
    if fps is not None and not (is_number and 0 < fps <= MAX_FPS):
        raise ApiError(400, f"{name}.video.fps must be a number over 0 and up to {MAX_FPS:g}, got {fps!r}", param=name)
    if num_frames is not None and not (type(num_frames) is int and 1 <= num_frames <= max_frames):
        wanted = f"must be an integer from 1 to the limit, {max_frames}"
        raise ApiError(400, f"{name}.video.num_frames {wanted}, got {num_frames!r}", param=name)
    return VideoSampling(None if fps is None else float(fps), num_frames)


def body_to_json(body: Body, num_bytes: int = 0) -> bytes:
    """Returns `body` as JSON, of about `num_bytes`. Raises ApiError 400 for a body that is nested too deeply."""
    try:
        if num_bytes < LARGE_BYTES:
            return json.dumps(body).encode()
        return "".join(json.JSONEncoder().iterencode(body)).encode()  # slower, but lets other threads run
    except RecursionError as error:  # the parser accepts a few levels more
        raise ApiError(400, "the request body is nested too deeply") from error
