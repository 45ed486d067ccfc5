"""The walk through a chat request: images found in order, everything refused that is not text or an image."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deployments.common.api_error import ApiError
from deployments.common.messages import ItemReference
from deployments.ingress.http import chat_request
from deployments.ingress.http.chat_request import (
    has_media,
    image_parts,
    pop_pixel_bounds,
    put_reference,
    refuse_fields,
)
from encoder.images.size import PixelBounds

URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}


def chat(*parts: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def refusal(body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as refused:
        image_parts(body)
    assert refused.value.status == 400
    assert refused.value.param == "messages"
    return refused.value


def test_images_of_all_messages_come_in_order_with_labels() -> None:
    body: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "You see pictures."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {**IMAGE}, "b", {**IMAGE}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": URL + "B", "detail": "low"}}]},
        ]
    }
    found = image_parts(body)
    assert [image.label for image in found] == ["image 1 of 3", "image 2 of 3", "image 3 of 3"]
    assert [image.url for image in found] == [URL, URL, URL + "B"]
    assert [image.detail for image in found] == ["auto", "auto", "low"]
    assert found[2].part is body["messages"][3]["content"][0], "the part itself, for put_reference"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": URL, "detail": None}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "input_image", "image_url": {"url": URL}, "uuid": None},
        {"type": "input_image", "input_image": {"url": URL}},
    ],
)
def test_the_spellings_of_an_image(part: dict[str, Any]) -> None:
    (found,) = image_parts(chat(part))
    assert (found.url, found.detail) == (URL, "auto")


@pytest.mark.parametrize("detail", ["auto", "low", "high"])
def test_detail_inside_or_beside_the_url(detail: str) -> None:
    inside = {"type": "image_url", "image_url": {"url": URL, "detail": detail}}
    beside = {"type": "input_image", "image_url": URL, "detail": detail}
    assert [image.detail for image in image_parts(chat(inside, beside))] == [detail, detail]


@pytest.mark.parametrize(
    "content",
    ["text", None, [], ["text"], [{"type": "text", "text": "x"}], [{"type": "thinking", "thinking": "x"}]],
)
def test_text_has_no_images(content: object) -> None:
    assert image_parts({"messages": [{"role": "user", "content": content}]}) == []


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("video_url", "video"),
        ("video", "video"),
        ("input_audio", "audio"),
        ("audio_url", "audio"),
        ("file", "files"),
    ],
)
def test_media_that_are_not_supported_are_named(kind: str, named: str) -> None:
    error = refusal(chat({"type": "text", "text": "x"}, {"type": kind, kind: {"url": URL}}))
    assert error.message.startswith(f"messages[0].content[1]: {named} ")
    assert error.code == "unsupported_media"


@pytest.mark.parametrize("kind", ["image_embeds", "audio_embeds", "image_pil", "prompt_embeds", "input_file", "x", ""])
def test_unknown_types_are_refused(kind: str) -> None:
    """A client may not send embeddings, nor name their keys."""
    error = refusal(chat({"type": kind, kind: "vitray:AAAA", "image_embeds": "vitray:AAAA"}))
    assert f"unknown part type {kind!r}" in error.message


@pytest.mark.parametrize(
    "part", [{"text": "x"}, {"image_url": {"url": URL}}, {"type": None}, {"type": 1}, {"type": []}]
)
def test_a_part_without_a_type_is_refused(part: dict[str, Any]) -> None:
    """vLLM guesses the type from the keys; a guess could be another than ours."""
    assert "type is missing" in refusal(chat(part)).message


@pytest.mark.parametrize("part", [None, 1, True, [IMAGE], [[IMAGE]]])
def test_a_part_that_is_no_object_is_refused(part: object) -> None:
    assert "messages[0].content[0] must be an object" in refusal(chat(part)).message


@pytest.mark.parametrize("kind", chat_request.TEXT_PARTS)
@pytest.mark.parametrize("key", sorted(chat_request.MEDIA_KEYS))
def test_media_keys_cannot_hide_in_a_text_part(kind: str, key: str) -> None:
    error = refusal(chat({"type": kind, "text": "x", key: {"url": URL}}))
    assert error.message == f"messages[0].content[0]: a part of type {kind!r} cannot hold {key!r}"


@pytest.mark.parametrize("key", sorted(chat_request.MEDIA_KEYS - {"image_url"}))
def test_media_keys_cannot_hide_beside_an_image(key: str) -> None:
    assert f"cannot hold {key!r}" in refusal(chat({**IMAGE, key: "vitray:AAAA"})).message


@pytest.mark.parametrize("uuid", ["d" * 64, "", 0, {}])
def test_a_client_cannot_choose_the_uuid(uuid: object) -> None:
    """It is part of vLLM's prefix-cache key: a client that names another's would be answered about that image."""
    assert "uuid cannot be chosen" in refusal(chat({**IMAGE, "uuid": uuid})).message


@pytest.mark.parametrize("value", [None, "", 1, [], {}, {"url": None}, {"url": ""}, {"url": 1}, {"url": [URL]}, [URL]])
def test_an_image_without_a_url_is_refused(value: object) -> None:
    assert "image_url.url must be" in refusal(chat({"type": "image_url", "image_url": value})).message


@pytest.mark.parametrize("detail", ["LOW", "", 1, [], {}, True])
def test_an_unknown_detail_is_refused(detail: object) -> None:
    error = refusal(chat({"type": "image_url", "image_url": {"url": URL, "detail": detail}}))
    assert f"auto, low, high, got {detail!r}" in error.message


def test_the_refusal_tells_where() -> None:
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": [{**IMAGE}, {"type": "x"}]}]}
    assert refusal(body).message.startswith("messages[1].content[1]: ")


def test_put_key_leaves_nothing_of_the_clients_part() -> None:
    body = chat({**IMAGE, "extra": "x"})
    (image,) = image_parts(body)
    put_reference(image, ItemReference("vitray:t", 0, "image 1 of 1"))
    assert body["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": "vitray:t"}}]
    assert image.url == URL, "a second try fetches it again"


@pytest.mark.parametrize(
    ("asked", "bounds"),
    [
        (None, None),
        ({}, PixelBounds()),
        ({"min_pixels": 100}, PixelBounds(100, None)),
        ({"max_pixels": 100}, PixelBounds(None, 100)),
        ({"min_pixels": 100, "max_pixels": 100}, PixelBounds(100, 100)),
    ],
)
def test_bounds_are_taken_out_of_the_body(asked: object, bounds: PixelBounds | None) -> None:
    body = {"model": "m", "mm_processor_kwargs": asked}
    assert pop_pixel_bounds(body) == bounds
    assert body == {"model": "m"}
    assert pop_pixel_bounds(body) is None


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ([], "must be an object"),
        ("min_pixels", "must be an object"),
        ({"size": 1}, "only min_pixels and max_pixels are supported, got 'size'"),
        ({"min_pixels": 0}, "min_pixels must be a positive integer, got 0"),
        ({"max_pixels": -5}, "max_pixels must be a positive integer, got -5"),
        ({"max_pixels": True}, "max_pixels must be a positive integer, got True"),
        ({"max_pixels": 1.5}, "max_pixels must be a positive integer, got 1.5"),
        ({"max_pixels": None}, "max_pixels must be a positive integer, got None"),
        ({"min_pixels": 101, "max_pixels": 100}, "min_pixels is 101; it must not be over max_pixels, 100"),
        ({"min_pixels": 10**400}, "min_pixels is over the limit of"),
        ({"max_pixels": 10**400}, "max_pixels is over the limit of"),
    ],
)
def test_bounds_are_checked(asked: object, told: str) -> None:
    """10**400 overflowed a float in the size arithmetic, which was answered with status 500."""
    with pytest.raises(ApiError) as refused:
        pop_pixel_bounds({"mm_processor_kwargs": asked})
    assert (refused.value.status, refused.value.param) == (400, "mm_processor_kwargs")
    assert told in refused.value.message


@pytest.mark.parametrize("name", ["prompt_embeds", "media_io_kwargs"])
def test_fields_that_carry_media_are_refused(name: str) -> None:
    with pytest.raises(ApiError) as refused:
        refuse_fields({name: {"image": {}}})
    assert (refused.value.status, refused.value.param) == (400, name)
    refuse_fields({name: None, "model": "m"})


@pytest.mark.parametrize(
    "value",
    [
        IMAGE,
        [{"content": [IMAGE]}],
        {"a": {"b": [[{"type": "input_image"}]]}},
        {"type": "input_file", "file_url": "https://example.com"},
        {"type": "message", "content": [{"type": "text", "image_embeds": "vitray:AAAA"}]},
        {"video_url": None},
    ],
)
def test_media_are_found_anywhere(value: object) -> None:
    assert has_media(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "image_url",
        1,
        [],
        {},
        {"type": "text", "text": "image_url"},
        [[["input_image"]]],
        {"type": [1]},
        {"type": {}},
    ],
)
def test_text_holds_no_media(value: object) -> None:
    """A type that is no string was looked up in a set, where a list is a TypeError: status 500."""
    assert not has_media(value)


def test_media_are_found_however_deep() -> None:
    """A recursive walk gave up at a depth that the JSON parser still reads, which was answered with status 500."""
    deep: object = IMAGE
    for _ in range(100_000):
        deep = [deep]
    assert has_media(deep)


NAMES = ["messages", "content", "role", "type", "text", "image_url", "url", "detail", "uuid", "mm_processor_kwargs"]
NAMES += ["min_pixels", "max_pixels", "prompt_embeds", *sorted(chat_request.MEDIA_KEYS)]
STRINGS = st.sampled_from([*NAMES, *chat_request.TEXT_PARTS, *chat_request.MEDIA_TYPES, URL, "low"]) | st.text(
    max_size=5
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=12,
)
PARTS = st.fixed_dictionaries(
    {}, optional={"type": STRINGS | JSON, "image_url": JSON, "text": JSON, "uuid": JSON, "detail": JSON}
)
MESSAGES = st.lists(st.fixed_dictionaries({"content": st.lists(PARTS | JSON, max_size=3) | JSON}) | JSON, max_size=3)
BODIES = st.fixed_dictionaries(
    {"messages": MESSAGES | JSON},
    optional={"mm_processor_kwargs": JSON | st.dictionaries(STRINGS, st.integers()), "prompt_embeds": JSON},
)


@given(BODIES)
@example(chat({"type": "image_url", "image_url": {"url": "\ud800"}}))
def test_no_body_makes_anything_but_an_answer_or_an_api_error(body: dict[str, Any]) -> None:
    """And what passes holds no medium but the images that were found, once their keys are put."""
    has_media(body)
    try:
        refuse_fields(body)
        found = image_parts(body)
        pop_pixel_bounds(body)
    except ApiError:
        return
    for number, image in enumerate(found):
        put_reference(image, ItemReference(f"t{number}", number, image.label))
        image.part.clear()
    for message in body["messages"] if isinstance(body["messages"], list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            assert not isinstance(part, dict) or chat_request.MEDIA_KEYS.isdisjoint(part)
    json.dumps(body)
