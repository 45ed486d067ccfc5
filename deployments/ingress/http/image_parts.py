"""Finds the image parts of a request body in the formats of the Chat Completions, Responses and Messages APIs, refuses
other media and client-supplied embeddings, and replaces images by references in the form that vLLM's route takes.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from deployments.common.api_error import ApiError
from deployments.ingress.http.request_body import Body

DETAILS = ("auto", "low", "high", "original")
IMAGE_PARTS = ("image_url", "input_image")
TOOL_RESULT = "tool_result"
UNSUPPORTED_MEDIA = {
    "video_url": "video",
    "video": "video",
    "input_audio": "audio",
    "audio_url": "audio",
    "file": "files",
    "input_file": "files",
    "document": "documents",
    "container_upload": "files",
}
# Keys that vLLM reads as media, whatever the part's type.
MEDIA_KEYS = frozenset(
    {"image_url", "input_image", "image_pil", "image_embeds", "video_url", "video_embeds", "audio_url"}
    | {"input_audio", "audio_embeds", "prompt_embeds", "image", "video", "audio"}
)
MEDIA_TYPES = frozenset({*IMAGE_PARTS, *UNSUPPORTED_MEDIA, "image_embeds"})
MAX_UUID_CHARACTERS = 1024
TOOL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
MODEL_ITEMS = ("function_call", "custom_tool_call", "reasoning")
INPUT_ITEMS = ("message", *MODEL_ITEMS, *TOOL_OUTPUTS)
"""Types of the items of `input` that vLLM's Responses route reads."""


class PartTypes(NamedTuple):
    """What a list of content parts may hold."""

    text: tuple[str, ...]
    """Types of parts without media."""
    images: tuple[str, ...] = IMAGE_PARTS
    """Types of image parts, the usual one first."""
    file_keys: tuple[str, ...] = ()
    """Keys besides MEDIA_KEYS that name a file."""


class BodyFormat(Enum):
    """An API's format of conversations."""

    CHAT = PartTypes(("text", "input_text", "output_text", "refusal", "thinking", "reasoning"))
    RESPONSES = PartTypes(
        ("input_text", "output_text", "text", "refusal", "reasoning_text"),
        ("input_image", "image_url"),
        ("file_id", "file_url", "file_data"),
    )
    MESSAGES = PartTypes(
        (
            *("text", "thinking", "redacted_thinking", "tool_use", TOOL_RESULT),
            *("tool_reference", "tool_addition", "tool_removal"),
        ),
        ("image",),
        ("source",),
    )

    @property
    def field(self) -> str:
        """The field of a body that holds the conversation."""
        return "input" if self is BodyFormat.RESPONSES else "messages"


TOOL_RESULT_PARTS = BodyFormat.MESSAGES.value._replace(text=("text", "tool_reference"))


@dataclass(frozen=True)
class ImagePart:
    """An image part of a request body."""

    part: Body
    """The part's JSON object, which `put_url` changes in place."""
    url: str
    """Its URL; empty once a `data:` URL is decoded."""
    detail: str
    """One of DETAILS."""
    label: str
    """Name in error messages, such as "image 2 of 3 (messages[0].content[1])"."""
    file: bytes | None = None
    """The image file; None until its URL is decoded or fetched."""
    body_format: BodyFormat = BodyFormat.CHAT
    is_new: bool = True
    """Whether it is after the model's last answer. vLLM's prefix cache may cover the images before it."""

    @property
    def param(self) -> str:
        """The field of the body that holds the image, for errors."""
        return self.body_format.field

    def put_url(self, url: str) -> None:
        """Replaces the part by one that holds nothing but `url`."""
        self.part.clear()
        if self.body_format is BodyFormat.RESPONSES:
            self.part.update(type="input_image", image_url=url, detail="auto")
        elif self.body_format is BodyFormat.MESSAGES:
            self.part.update(type="image", source={"type": "url", "url": url})
        else:
            self.part.update(type="image_url", image_url={"url": url})


class _Found(NamedTuple):
    part: Body
    url: str
    detail: str
    path: str


def image_parts(body: Body, body_format: BodyFormat = BodyFormat.CHAT, files: Container[str] = ()) -> list[ImagePart]:
    """Returns the images of a request, in order. `files`: names that stand for base64 in `body` (`cut_files`).

    Raises:
        ApiError: 400 for unsupported media or a malformed part; it names the part, such as `input[2].content[1]`.
    """
    found = list(_walk(body, body_format, files))
    labels = [f"image {number} of {len(found)} ({image.path})" for number, (_, image) in enumerate(found, 1)]
    last_answer = _last_answer(body, body_format)
    return [
        ImagePart(image.part, image.url, image.detail, label, None, body_format, is_new=message > last_answer)
        for (message, image), label in zip(found, labels, strict=True)
    ]


def _last_answer(body: Body, body_format: BodyFormat) -> int:
    """Returns the index of the model's last message or item that others follow, -1 if there is none."""
    messages = body.get(body_format.field)
    answers = (
        number
        for number, message in enumerate(messages[:-1] if isinstance(messages, list) else [])
        if isinstance(message, dict) and (message.get("role") == "assistant" or message.get("type") in MODEL_ITEMS)
    )
    return max(answers, default=-1)


def _walk(body: Body, body_format: BodyFormat, files: Container[str]) -> Iterator[tuple[int, _Found]]:
    """Yields the images of all messages, or of all items of `input`, each with its message's index."""
    types = body_format.value
    if body_format is BodyFormat.MESSAGES:
        refused = "the system prompt takes no images"
        yield from ((-1, found) for found in _walk_parts(body.get("system"), "system", types, files, refused))
    messages = body.get(body_format.field)
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        if not isinstance(message, dict):
            continue
        path, role = f"{body_format.field}[{number}]", message.get("role")
        kind = message.get("type", "message") if body_format is BodyFormat.RESPONSES else "message"
        if kind not in INPUT_ITEMS:
            raise _refused(path, f": unknown item type {kind!r}; known types: {', '.join(INPUT_ITEMS)}")
        for key in ("content", "output") if body_format is BodyFormat.RESPONSES else ("content",):
            refusal = None
            if body_format is not BodyFormat.CHAT and not _takes_images(body_format, kind, role, key):
                refusal = f"{key} of {role or kind!r} takes no images"
            for found in _walk_parts(message.get(key), f"{path}.{key}", types, files, refusal):
                yield number, found


def _takes_images(body_format: BodyFormat, kind: str, role: object, key: str) -> bool:
    """Whether vLLM puts images at this place of a message or item into the prompt; it ignores others silently."""
    if kind in TOOL_OUTPUTS:
        return key == "output"
    without = ("assistant",) if body_format is BodyFormat.RESPONSES else ("assistant", "system")
    return kind == "message" and key == "content" and role not in without


def _walk_parts(
    parts: object, path: str, types: PartTypes, files: Container[str], refusal: str | None = None
) -> Iterator[_Found]:
    """Yields the images of `parts`, if it is a list, and those inside `tool_result`. `refusal`: why images are refused
    here; None if they are not."""
    for position, part in enumerate(parts if isinstance(parts, list) else []):
        if isinstance(part, str):
            continue
        where = f"{path}[{position}]"
        if not isinstance(part, dict):
            raise _refused(where, " must be an object with a type")
        kind = _check_part(part, where, types)
        if kind == TOOL_RESULT:
            yield from _walk_parts(part.get("content"), f"{where}.content", TOOL_RESULT_PARTS, files, refusal)
        elif kind in types.images:
            if refusal is not None:
                raise _refused(where, f": {refusal}", "unsupported_media")
            source = _base64_or_url(part, where, files) if "source" in types.file_keys else _image_url(part, where)
            yield _Found(part, *source, where)


def _check_part(part: Body, where: str, types: PartTypes) -> str:
    """Returns the type of a part. Raises ApiError 400 as `image_parts` does."""
    kind = part.get("type")
    known = f"known types: text, {types.images[0]}"
    if not isinstance(kind, str):
        raise _refused(where, f".type is missing; {known}")
    if kind in UNSUPPORTED_MEDIA:
        message = f": {UNSUPPORTED_MEDIA[kind]} is not supported yet; send text and images"
        raise _refused(where, message, "unsupported_media")
    if kind not in types.text and kind not in types.images:
        raise _refused(where, f": unknown part type {kind!r}; {known}")
    own = () if kind in types.text else ("image_url", kind) if kind in IMAGE_PARTS else ("source",)
    for key, value in part.items():
        if key not in own and (key in MEDIA_KEYS or (key in types.file_keys and value is not None)):
            raise _refused(where, f": a part of type {kind!r} cannot hold {key!r}")
    # A client's own name of an image is not used. A digest of file and tenant names every cache entry, so that neither
    # a wrong uuid nor another tenant's can name another image.
    uuid = part.get("uuid")
    if uuid is not None and not (isinstance(uuid, str) and len(uuid) <= MAX_UUID_CHARACTERS):
        raise _refused(where, f": uuid must be a text of at most {MAX_UUID_CHARACTERS} characters")
    return kind


def _image_url(part: Body, where: str) -> tuple[str, str]:
    """Returns URL and detail of an image part in OpenAI's formats."""
    value = part.get("image_url", part.get("input_image"))
    url, detail = (value.get("url"), value.get("detail")) if isinstance(value, dict) else (value, part.get("detail"))
    if not isinstance(url, str) or not url:
        raise _refused(where, ": image_url.url must be a data: or http(s) URL")
    if detail is None:
        detail = "auto"
    if detail not in DETAILS:
        raise _refused(where, f": detail must be one of {', '.join(DETAILS)}, got {detail!r}")
    return url, detail


def _base64_or_url(part: Body, where: str, files: Container[str]) -> tuple[str, str]:
    """Returns URL and detail of an image part in Anthropic's format; base64 becomes a `data:` URL."""
    source = part.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("base64", "url"):
        raise _refused(where, f".source: type must be base64 or url, got {kind!r}")
    value = source.get("data" if kind == "base64" else "url")
    if not isinstance(value, str) or not value:
        raise _refused(where, ".source: data must be base64, or url a data: or http(s) URL")
    return (value if kind == "url" or value in files else f"data:;base64,{value}"), "auto"


def _refused(where: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, where + message, param=where.partition("[")[0], code=code)
