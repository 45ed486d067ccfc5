"""Finds the images of a request body in the formats of the Chat Completions, Responses and Messages APIs, and sounds
and videos in the first; refuses other media and embeddings, decodes `data:` URLs, and puts references in their places.

Over 400 lines because one walk over a body applies all formats' rules.
"""

from __future__ import annotations

import binascii
import dataclasses
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import pybase64

from configs.schema import IngressConfig
from deployments.common.api_error import ApiError
from deployments.ingress.http.request_body import Body

DETAILS = ("auto", "low", "high", "original")
IMAGE_PARTS = ("image_url", "input_image")
TOOL_RESULT = "tool_result"
CHAT_PARTS = {"audio_url": "audio", "input_audio": "audio", "video_url": "video"}
"""Modality by type of the parts that only chats have."""
UNSUPPORTED_MEDIA = (*CHAT_PARTS, "video", "file", "input_file", "document", "container_upload")
"""Types of parts that no format has here, or only chats."""
# Keys that vLLM reads as media, whatever the part's type.
MEDIA_KEYS = frozenset(
    {"image_url", "input_image", "image_pil", "image_embeds", "video_url", "video_embeds", "audio_url"}
    | {"input_audio", "audio_embeds", "prompt_embeds", "image", "video", "audio"}
)
MEDIA_TYPES = frozenset({*IMAGE_PARTS, *UNSUPPORTED_MEDIA, "image_embeds"})
FRAME_LIST = b"/9j/"
"""Beginning of a JPEG file in base64. A list of frames, `video/jpeg`, is such files with commas between them."""
PLURALS = {"image": "images", "audio": "sounds", "video": "videos"}
"""Names of modalities in error messages."""
MAX_UUID_CHARACTERS = 1024
TOOL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
MODEL_ITEMS = ("function_call", "custom_tool_call", "reasoning")
INPUT_ITEMS = ("message", *MODEL_ITEMS, *TOOL_OUTPUTS)
"""Types of the items of `input` that vLLM's Responses route reads."""


class MediaError(ValueError):
    """A file could not be loaded. The message is safe to show to the client."""


class MediaTooLargeError(MediaError):
    """A file has more bytes than the limit."""


class PartTypes(NamedTuple):
    """What a list of content parts may hold."""

    text: tuple[str, ...]
    """Types of parts without media."""
    images: tuple[str, ...] = IMAGE_PARTS
    """Types of image parts, the usual one first."""
    file_keys: tuple[str, ...] = ()
    """Keys besides MEDIA_KEYS that name a file."""
    others: Mapping[str, str] = {}
    """Modality by type of the parts with other media."""


class BodyFormat(Enum):
    """An API's format of conversations."""

    CHAT = PartTypes(("text", "input_text", "output_text", "refusal", "thinking", "reasoning"), others=CHAT_PARTS)
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
    """An image, a sound or a video in a request body."""

    part: Body
    """The part's JSON object, which `put_url` changes in place."""
    url: str
    """Its URL; empty once a `data:` URL is decoded."""
    detail: str
    """One of DETAILS; "auto" for other media."""
    label: str
    """Name in error messages, such as "image 2 of 3 (messages[0].content[1])"."""
    file: bytes | None = None
    """The file; None until its URL is decoded or fetched."""
    body_format: BodyFormat = BodyFormat.CHAT
    modality: str = "image"
    is_new: bool = True
    """Whether it is after the model's last answer. vLLM's prefix cache may cover the images before it."""

    @property
    def param(self) -> str:
        """The field of the body that holds the item, for errors."""
        return self.body_format.field

    def put_url(self, url: str) -> None:
        """Replaces the part by one that holds nothing but `url`."""
        self.part.clear()
        if self.body_format is BodyFormat.RESPONSES:
            self.part.update(type="input_image", image_url=url, detail="auto")
        elif self.body_format is BodyFormat.MESSAGES:
            self.part.update(type="image", source={"type": "url", "url": url})
        else:
            kind = f"{self.modality}_url"
            self.part.update({"type": kind, kind: {"url": url}})

    def restore(self) -> None:
        """Replaces the part of a Responses request by one as the client may have sent it."""
        url = self.url or f"data:;base64,{pybase64.b64encode(self.file or b'').decode()}"
        self.put_url(url)
        self.part["detail"] = self.detail


def image_parts(body: Body, body_format: BodyFormat = BodyFormat.CHAT, files: Container[str] = ()) -> list[ImagePart]:
    """Returns the media of a request, in order. `files`: names that stand for base64 in `body`, by
    `cut_files`.

    Raises:
        ApiError: 400 for unsupported media or a malformed part; it names the part, such as `input[2].content[1]`.
    """
    found = list(_walk(body, body_format, files))
    totals, seen = Counter(part.modality for _, part in found), Counter[str]()
    last_answer, parts = _last_answer(body, body_format), []
    for message, part in found:
        kind = part.modality
        seen[kind] += 1
        label = f"{kind} {seen[kind]} of {totals[kind]} ({part.label})"
        is_new = message > last_answer
        parts.append(dataclasses.replace(part, label=label, body_format=body_format, is_new=is_new))
    return parts


def _last_answer(body: Body, body_format: BodyFormat) -> int:
    """Returns the index of the model's last message or item that others follow, -1 if there is none."""
    messages = body.get(body_format.field)
    answers = (
        number
        for number, message in enumerate(messages[:-1] if isinstance(messages, list) else [])
        if isinstance(message, dict) and (message.get("role") == "assistant" or message.get("type") in MODEL_ITEMS)
    )
    return max(answers, default=-1)


def _walk(body: Body, body_format: BodyFormat, files: Container[str]) -> Iterator[tuple[int, ImagePart]]:
    """Yields the media of all messages, or of all items of `input`, each with its message's index. A label is only the
    path."""
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
) -> Iterator[ImagePart]:
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
        elif kind in types.others:
            yield ImagePart(part, _item_url(part, kind, where, files), "auto", where, modality=types.others[kind])
        elif kind in types.images:
            if refusal is not None:
                raise _refused(where, f": {refusal}", "unsupported_media")
            source = _base64_or_url(part, where, files) if "source" in types.file_keys else _image_url(part, where)
            yield ImagePart(part, *source, where)


def _check_part(part: Body, where: str, types: PartTypes) -> str:
    """Returns the type of a part. Raises ApiError 400 as `image_parts` does."""
    kind = part.get("type")
    known = "known types: " + ", ".join(("text", types.images[0], *types.others))
    if not isinstance(kind, str):
        raise _refused(where, f".type is missing; {known}")
    if kind in UNSUPPORTED_MEDIA and kind not in types.others:
        remedy = "send it to /v1/chat/completions" if kind in CHAT_PARTS else known
        raise _refused(where, f": a part of type {kind!r} is not supported here; {remedy}", "unsupported_media")
    if kind not in types.text and kind not in types.images and kind not in types.others:
        raise _refused(where, f": unknown part type {kind!r}; {known}")
    own = () if kind in types.text else (kind,) if kind in types.others else ("image_url", kind)
    own = ("source",) if kind in types.images and "source" in types.file_keys else own
    for key in [key for key in MEDIA_KEYS if key not in own and part.get(key, "") is None]:
        del part[key]  # vLLM takes it for an item that is named by `uuid`
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


def _item_url(part: Body, kind: str, where: str, files: Container[str]) -> str:
    """Returns the URL of a sound or video; base64 becomes a `data:` URL. The content determines its format."""
    value, key = part.get(kind), "data" if kind == "input_audio" else "url"
    url = value.get(key) if isinstance(value, dict) else None
    if not isinstance(url, str) or not url:
        raise _refused(where, f": {kind}.{key} must be {'base64' if key == 'data' else 'a data: or http(s) URL'}")
    return url if key == "url" or url in files else f"data:;base64,{url}"


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


def decode_images(
    images: Sequence[ImagePart], files: Mapping[str, memoryview], limits: IngressConfig
) -> list[ImagePart]:
    """Returns the media with the files of `data:` URLs decoded and these URLs dropped. Other URLs are kept.

    `files`: base64 by the names that `image_parts` knows. Raises ApiError 400 for too many new or earlier ones, 400 or
    413 for one that cannot be decoded.
    """
    new = Counter(image.modality for image in images if image.is_new)
    for kind, number in new.items():
        if number > (most := limits.max_new_items(kind)):
            raise ApiError(400, f"the request has {number} {PLURALS[kind]}, the limit is {most}", param=images[0].param)
    if (earlier := len(images) - new.total()) > (most := limits.max_earlier_images_per_request):
        raise ApiError(400, f"the earlier turns have {earlier} images, the limit is {most}", param=images[0].param)
    return [_decode(image, files, limits.max_file_bytes(image.modality)) for image in images]


def _decode(image: ImagePart, files: Mapping[str, memoryview], max_bytes: int) -> ImagePart:
    """Returns the image with the file of its `data:` URL decoded and the URL's text dropped. Other URLs are kept."""
    try:
        if (frames := _frame_list(image, files)) is not None:
            file = _check_size(frames, max_bytes)
        elif image.url in files:
            file = decode_base64(files[image.url], max_bytes=max_bytes)
        elif is_data_url(image.url):
            file = decode_data_url(image.url, max_bytes=max_bytes)
        else:
            return image
    except MediaError as error:
        raise media_error(image, error) from error
    image.part.clear()  # frees the URL's text; `put_url` fills the part before it is read
    return dataclasses.replace(image, url="", file=file)


def _frame_list(item: ImagePart, files: Mapping[str, memoryview]) -> bytes | None:
    """Returns the text of a video's list of frames; None if it is none."""
    if item.modality != "video":
        return None
    if item.url in files:
        text = files[item.url]
        return bytes(text) if text[: len(FRAME_LIST)] == FRAME_LIST else None
    head, _, rest = item.url.partition(",")
    is_list = is_data_url(head) and head.lower().endswith(";base64") and rest.startswith(FRAME_LIST.decode())
    return rest.encode("ascii", "replace") if is_list else None


def media_error(part: ImagePart, error: MediaError) -> ApiError:
    """Returns the client's error, which names the part: 413 for MediaTooLargeError, else 400."""
    if isinstance(error, MediaTooLargeError):
        return ApiError(413, f"{part.label}: {error}", param=part.param, code=f"{part.modality}_too_large")
    return ApiError(400, f"{part.label}: {error}", param=part.param, code=f"invalid_{part.modality}_url")


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def decode_data_url(url: str, *, max_bytes: int) -> bytes:
    """Returns the bytes of a `data:` URL in base64, with or without padding.

    Raises:
        MediaError: the URL is malformed.
        MediaTooLargeError: it has more than `max_bytes`, estimated before decoding.
    """
    head, _, payload = url.partition(",")
    if not head.lower().endswith("base64"):
        raise MediaError("the data: URL is not in base64")
    return decode_base64(payload.encode("ascii", "replace"), max_bytes=max_bytes)


def decode_base64(payload: bytes | memoryview, *, max_bytes: int) -> bytes:
    """Decodes the part after the comma, with or without padding. Raises as `decode_data_url` does."""
    num_bytes = len(payload) * 3 // 4 - 2  # padding takes at most 2
    if num_bytes > max_bytes:
        raise MediaTooLargeError(f"the file has {num_bytes} bytes or more, the limit is {max_bytes}")
    missing = -len(payload) % 4
    try:
        data = pybase64.b64decode(bytes(payload) + b"=" * missing if missing else payload, validate=True)
    except binascii.Error as error:
        if bytes(payload[:5]) == b"data:":
            raise MediaError("a field for base64 takes no data: prefix") from error
        raise MediaError("the file is not valid base64") from error
    return _check_size(data, max_bytes)


def _check_size(data: bytes, max_bytes: int) -> bytes:
    """Returns `data`. Raises MediaError if it is empty, MediaTooLargeError over `max_bytes`."""
    if len(data) > max_bytes:
        raise MediaTooLargeError(f"the file has {len(data)} bytes, the limit is {max_bytes}")
    if not data:
        raise MediaError("the data: URL is empty")
    return data
