"""Request bodies at random, in the format of each API that takes images."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from deployments.common.messages import KEY_PREFIX
from deployments.ingress.http.image_parts import INPUT_ITEMS, MEDIA_KEYS, MEDIA_TYPES, BodyFormat

RESPONSES, MESSAGES = BodyFormat.RESPONSES, BodyFormat.MESSAGES
URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
INPUT_IMAGE = {"type": "input_image", "image_url": URL, "detail": "low", "file_id": None}
BASE64 = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
SOURCE_URL = {"type": "image", "source": {"type": "url", "url": "https://a.example/x.png"}, "cache_control": None}
LONG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 1100}}


AUDIO_URL: dict[str, Any] = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}
INPUT_AUDIO: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
VIDEO_URL: dict[str, Any] = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
FRAMES: dict[str, Any] = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,/9j/AAAA,/9j/AAAA"}}


def tool_result(*blocks: object) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": list(blocks)}


NAMES = ["messages", "content", "role", "type", "text", "image_url", "url", "detail", "uuid", "mm_processor_kwargs"]
NAMES += ["input", "output", "source", "data", "base64", "file_id", "system", "assistant", "user", *INPUT_ITEMS]
NAMES += ["min_pixels", "max_pixels", "prompt_embeds", *sorted(MEDIA_KEYS)]
TYPES = sorted({*MEDIA_TYPES, *(kind for one in BodyFormat for kind in (*one.value.text, *one.value.images))})
URLS = [URL, "http://169.254.169.254/", "data:,x", "file:///etc/passwd", KEY_PREFIX + "x" * 22]
STRINGS = st.sampled_from([*NAMES, *TYPES, *URLS, "low"]) | st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=12,
)
SOURCE = st.fixed_dictionaries(
    {"type": st.sampled_from(["base64", "url"]) | JSON}, optional={"data": JSON, "url": STRINGS | JSON}
)
ITEMS_OF_MEDIA: list[dict[str, Any]] = [
    IMAGE,
    INPUT_IMAGE,
    BASE64,
    SOURCE_URL,
    LONG,
    AUDIO_URL,
    INPUT_AUDIO,
    VIDEO_URL,
    FRAMES,
]
LEAF_PARTS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(ITEMS_OF_MEDIA).map(dict) | st.fixed_dictionaries(
    {"type": st.sampled_from(TYPES) | JSON},
    optional={
        "image_url": JSON,
        "audio_url": JSON,
        "input_audio": JSON,
        "video_url": JSON,
        "text": JSON,
        "uuid": JSON,
        "detail": JSON,
        "source": SOURCE | JSON,
        "content": JSON,
    },
)
PARTS = LEAF_PARTS | st.lists(LEAF_PARTS | JSON, max_size=2).map(lambda blocks: tool_result(*blocks)) | JSON
CONTENT = st.lists(PARTS, max_size=3) | JSON
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(INPUT_ITEMS) | JSON,
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": CONTENT,
        "output": CONTENT,
    },
)
ITEMS = st.lists(ITEM | JSON, max_size=3) | JSON
BODIES = st.fixed_dictionaries(
    {"messages": ITEMS, "input": ITEMS, "system": CONTENT},
    optional={
        "media_io_kwargs": JSON | st.fixed_dictionaries({"video": JSON}),
        "mm_processor_kwargs": JSON | st.dictionaries(STRINGS, st.integers()),
        "tools": JSON,
        "tool_choice": JSON,
        **dict.fromkeys(("prompt_embeds", "prompt", "cache_salt", "kv_transfer_params", "previous_response_id"), JSON),
    },
)


def objects(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def parts_in(body: dict[str, Any], body_format: BodyFormat) -> list[dict[str, Any]]:
    """The parts that vLLM could read."""
    keys = ("content", "output") if body_format is RESPONSES else ("content",)
    parts = [
        part for message in objects(body.get(body_format.field)) for key in keys for part in objects(message.get(key))
    ]
    results = [part for part in parts if body_format is MESSAGES and part.get("type") == "tool_result"]
    return parts + [inner for result in results for inner in objects(result.get("content"))]
