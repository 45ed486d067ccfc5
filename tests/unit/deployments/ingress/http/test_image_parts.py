"""The walk through a request body of each format: images found in order, everything refused that is not text or an
image.

One file, since every test makes a body of one of the same formats and walks through it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from configs.schema import AudioConfig, IngressConfig, VideoConfig
from deployments.common.api_error import ApiError
from deployments.ingress.http.chat_request import has_media, pop_pixel_bounds
from deployments.ingress.http.image_parts import (
    DETAILS,
    MAX_UUID_CHARACTERS,
    MEDIA_KEYS,
    BodyFormat,
    decode_images,
    image_parts,
)
from deployments.ingress.http.request_body import cut_files, refuse_fields
from tests.fuzz.bodies import (
    AUDIO_URL,
    BASE64,
    BODIES,
    IMAGE,
    INPUT_AUDIO,
    INPUT_IMAGE,
    MESSAGES,
    RESPONSES,
    SOURCE_URL,
    URL,
    VIDEO_URL,
    parts_in,
    tool_result,
)

TOOL_OUTPUT = "function_call_output"


def chat(*parts: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def refusal(body: dict[str, Any], body_format: BodyFormat = BodyFormat.CHAT) -> ApiError:
    with pytest.raises(ApiError) as refused:
        image_parts(body, body_format)
    assert refused.value.status == 400
    assert refused.value.param in ("messages", "input", "system")
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
    assert [image.label for image in found] == [
        "image 1 of 3 (messages[1].content[1])",
        "image 2 of 3 (messages[1].content[3])",
        "image 3 of 3 (messages[3].content[0])",
    ]
    assert [image.url for image in found] == [URL, URL, URL + "B"]
    assert [image.detail for image in found] == ["auto", "auto", "low"]
    assert found[2].part is body["messages"][3]["content"][0], "the part itself, for put_url"


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


@pytest.mark.parametrize("detail", DETAILS)
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


@pytest.mark.parametrize("kind", ["video", "file", "input_file", "document"])
def test_media_that_are_not_supported_are_named(kind: str) -> None:
    error = refusal(chat({"type": "text", "text": "x"}, {"type": kind, kind: {"url": URL}}))
    known = "known types: text, image_url, audio_url, input_audio, video_url"
    assert error.message == f"messages[0].content[1]: a part of type {kind!r} is not supported here; {known}"
    assert error.code == "unsupported_media"


def test_sounds_of_a_chat_are_found_in_both_spellings_and_numbered_apart() -> None:
    body = chat(dict(AUDIO_URL), dict(IMAGE), dict(INPUT_AUDIO), {"type": "text", "text": "x"})
    found = image_parts(body)
    assert [(part.modality, part.url, part.label) for part in found] == [
        ("audio", AUDIO_URL["audio_url"]["url"], "audio 1 of 2 (messages[0].content[0])"),
        ("image", URL, "image 1 of 1 (messages[0].content[1])"),
        ("audio", "data:;base64,AAAA", "audio 2 of 2 (messages[0].content[2])"),
    ]
    for part in found:
        part.put_url("vitray:t")
    sound = {"type": "audio_url", "audio_url": {"url": "vitray:t"}}
    image = {"type": "image_url", "image_url": {"url": "vitray:t"}}
    assert body == chat(sound, image, sound, {"type": "text", "text": "x"})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "audio_url"}, ": audio_url.url must be a data: or http(s) URL"),
        ({"type": "audio_url", "audio_url": URL}, ": audio_url.url must be a data: or http(s) URL"),
        ({"type": "audio_url", "audio_url": {"url": ""}}, ": audio_url.url must be a data: or http(s) URL"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, ": input_audio.data must be base64"),
        ({"type": "input_audio", "input_audio": {"data": 1}}, ": input_audio.data must be base64"),
        ({**AUDIO_URL, "image_url": {"url": URL}}, ": a part of type 'audio_url' cannot hold 'image_url'"),
        ({**INPUT_AUDIO, "audio_url": {"url": URL}}, ": a part of type 'input_audio' cannot hold 'audio_url'"),
    ],
)
def test_malformed_sounds_are_refused(part: dict[str, Any], message: str) -> None:
    assert refusal(chat(part)).message == f"messages[0].content[0]{message}"


@pytest.mark.parametrize("part", [AUDIO_URL, INPUT_AUDIO, VIDEO_URL])
def test_other_formats_take_no_sounds_and_videos(part: dict[str, Any]) -> None:
    responses = {"input": [{"role": "user", "content": [part]}]}
    for body, body_format in ((responses, RESPONSES), (chat(part), MESSAGES)):
        error = refusal(body, body_format)
        assert "is not supported here; send it to /v1/chat/completions" in error.message


@pytest.mark.parametrize("number", [1, 3])
def test_a_list_of_frames_is_kept_as_text(number: int) -> None:
    """Each frame is base64 of its own; the decode worker splits them."""
    text = ",".join(["/9j/" + "A" * 1100] * number)
    part = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{text}"}}
    (item,) = decode_images(image_parts(chat(dict(part))), {}, IngressConfig())
    assert (item.modality, item.file, item.url) == ("video", text.encode(), "")
    rest, files = cut_files(json.dumps(chat(part)).encode())
    (item,) = decode_images(image_parts(json.loads(rest), files=files), files, IngressConfig())
    assert item.file == text.encode()
    with pytest.raises(ApiError, match=r"video 1 of 1 .* the limit is 100"):
        decode_images(image_parts(chat(dict(part))), {}, IngressConfig(video=VideoConfig(max_bytes=100)))


def test_a_video_file_is_decoded_from_base64() -> None:
    (item,) = decode_images(image_parts(chat(dict(VIDEO_URL))), {}, IngressConfig())
    assert (item.modality, item.file) == ("video", bytes(3))


def test_sounds_have_limits_of_their_own() -> None:
    limits = IngressConfig(
        max_image_bytes=1, max_images_per_request=1, audio=AudioConfig(max_bytes=3, max_per_request=2)
    )
    two = image_parts(chat(dict(AUDIO_URL), dict(INPUT_AUDIO)))
    assert [part.file for part in decode_images(two, {}, limits)] == [bytes(3), bytes(3)]
    with pytest.raises(ApiError, match="the request has 3 sounds, the limit is 2"):
        decode_images(image_parts(chat(*(dict(AUDIO_URL) for _ in range(3)))), {}, limits)
    larger = {"type": "input_audio", "input_audio": {"data": "AAAAAA", "format": "mp3"}}
    with pytest.raises(ApiError, match=r"^audio 1 of 1 .*: the file has 4 bytes, the limit is 3$") as refused:
        decode_images(image_parts(chat(larger)), {}, limits)
    assert (refused.value.status, refused.value.code) == (413, "audio_too_large")


@pytest.mark.parametrize("kind", ["image_embeds", "audio_embeds", "image_pil", "prompt_embeds", "image", "x", ""])
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


@pytest.mark.parametrize("kind", BodyFormat.CHAT.value.text)
@pytest.mark.parametrize("key", sorted(MEDIA_KEYS))
def test_media_keys_cannot_hide_in_a_text_part(kind: str, key: str) -> None:
    error = refusal(chat({"type": kind, "text": "x", key: {"url": URL}}))
    assert error.message == f"messages[0].content[0]: a part of type {kind!r} cannot hold {key!r}"


@pytest.mark.parametrize("key", sorted(MEDIA_KEYS - {"image_url"}))
def test_media_keys_that_are_null_are_left_out(key: str) -> None:
    """Clients send fields that they do not set as null. vLLM takes such a key for an item named by `uuid`."""
    nulls = dict.fromkeys(MEDIA_KEYS)
    text, image = {"type": "text", "text": "x", **nulls, "uuid": "u"}, {**IMAGE, key: None}
    image_parts(chat(text, image))
    assert not MEDIA_KEYS & text.keys()
    assert key not in image


@pytest.mark.parametrize("key", sorted(MEDIA_KEYS - {"image_url"}))
def test_media_keys_cannot_hide_beside_an_image(key: str) -> None:
    assert f"cannot hold {key!r}" in refusal(chat({**IMAGE, key: "vitray:AAAA"})).message


@pytest.mark.parametrize("uuid", ["", "d" * 64, "d" * MAX_UUID_CHARACTERS])
def test_a_clients_uuid_is_accepted_and_not_passed_on(uuid: str) -> None:
    """vLLM would make it part of its prefix-cache key: a client that names another's would be answered about that
    image. Digest and salt name the image here, so nothing is lost."""
    body = chat({**IMAGE, "uuid": uuid})
    (image,) = image_parts(body)
    image.put_url("vitray:t")
    assert body == chat({"type": "image_url", "image_url": {"url": "vitray:t"}})


@pytest.mark.parametrize("uuid", ["d" * (MAX_UUID_CHARACTERS + 1), 0, {}, []])
def test_a_uuid_is_a_short_text(uuid: object) -> None:
    assert f"uuid must be a text of at most {MAX_UUID_CHARACTERS}" in refusal(chat({**IMAGE, "uuid": uuid})).message


def test_a_uuid_does_not_replace_an_image() -> None:
    for url in (None, {"url": None}):
        part = {"type": "image_url", "image_url": url, "uuid": "mine"}
        assert "image_url.url must be" in refusal(chat(part)).message


@pytest.mark.parametrize("value", [None, "", 1, [], {}, {"url": None}, {"url": ""}, {"url": 1}, {"url": [URL]}, [URL]])
def test_an_image_without_a_url_is_refused(value: object) -> None:
    assert "image_url.url must be" in refusal(chat({"type": "image_url", "image_url": value})).message


@pytest.mark.parametrize("detail", ["LOW", "", 1, [], {}, True])
def test_an_unknown_detail_is_refused(detail: object) -> None:
    error = refusal(chat({"type": "image_url", "image_url": {"url": URL, "detail": detail}}))
    assert f"auto, low, high, original, got {detail!r}" in error.message


def test_the_refusal_tells_where() -> None:
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": [{**IMAGE}, {"type": "x"}]}]}
    assert refusal(body).message.startswith("messages[1].content[1]: ")


def test_put_url_leaves_nothing_of_the_clients_part() -> None:
    body = chat({**IMAGE, "extra": "x"})
    (image,) = image_parts(body)
    image.put_url("vitray:t")
    assert body["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": "vitray:t"}}]
    assert image.url == URL, "a second try fetches it again"


def response(*items: object) -> dict[str, Any]:
    return {"input": list(items)}


def anthropic(*blocks: object, role: str = "user", **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}], **fields}


def test_images_of_a_response_in_messages_and_tool_outputs() -> None:
    body = response(
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}, {**INPUT_IMAGE}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{**INPUT_IMAGE}]},
        {"type": "custom_tool_call_output", "call_id": "a", "output": [{**IMAGE}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "z"}], "summary": []},
    )
    found = image_parts(body, RESPONSES)
    assert [image.label for image in found] == [
        "image 1 of 3 (input[1].content[1])",
        "image 2 of 3 (input[3].output[0])",
        "image 3 of 3 (input[4].output[0])",
    ]
    assert [(image.url, image.detail, image.param) for image in found[:2]] == [(URL, "low", "input")] * 2
    found[0].put_url("vitray:t")
    expected = {"type": "input_image", "image_url": "vitray:t", "detail": "auto"}
    assert body["input"][1]["content"] == [{"type": "input_text", "text": "x"}, expected]


def test_images_of_anthropics_messages_and_tool_results() -> None:
    body = anthropic(tool_result({"type": "text", "text": "x"}, {**BASE64}), {**SOURCE_URL}, system=[])
    first, second = image_parts(body, MESSAGES)
    assert first.label == "image 1 of 2 (messages[0].content[0].content[1])"
    assert second.label == "image 2 of 2 (messages[0].content[1])"
    assert (first.url, second.url) == ("data:;base64,AAAA", "https://a.example/x.png")
    first.put_url("vitray:t")
    expected = {"type": "image", "source": {"type": "url", "url": "vitray:t"}}
    assert body["messages"][0]["content"][0]["content"] == [{"type": "text", "text": "x"}, expected]


def test_base64_that_was_cut_out_keeps_its_name() -> None:
    (image,) = image_parts(anthropic({**BASE64}), MESSAGES, files={"AAAA"})
    assert image.url == "AAAA"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (response("x", {"role": "user", "content": [{**INPUT_IMAGE, "file_id": "f"}]}), "input[1].content[0]: a part"),
        (response({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}), "cannot hold 'file_id'"),
        (response({"role": "user", "content": [{"type": "input_file", "file_url": "x"}]}), "'input_file' is not"),
        (response({"role": "user", "content": [{"type": "input_text", "file_url": "x"}]}), "cannot hold 'file_url'"),
        (response({"role": "user", "content": [{"type": "input_audio"}]}), "'input_audio' is not supported here"),
        (response({"role": "assistant", "content": [INPUT_IMAGE]}), "content of 'assistant' takes no images"),
        (response({"type": "reasoning", "content": [INPUT_IMAGE]}), "content of 'reasoning' takes no images"),
        (response({"role": "user", "output": [INPUT_IMAGE]}), "output of 'user' takes no images"),
        (response({"type": TOOL_OUTPUT, "content": [INPUT_IMAGE]}), f"content of '{TOOL_OUTPUT}' takes no images"),
        (response({"type": "computer_call_output"}), "input[0]: unknown item type 'computer_call_output'"),
        (response({"type": "item_reference", "id": "x"}), "unknown item type 'item_reference'"),
        (response({"type": ["message"]}), "unknown item type ['message']"),
    ],
)  # fmt: skip
def test_what_a_response_does_not_take(body: dict[str, Any], told: str) -> None:
    error = refusal(body, RESPONSES)
    assert told in error.message
    assert error.param == "input"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            anthropic({"type": "document", "source": {}}),
            "content[0]: a part of type 'document' is not",
        ),
        (
            anthropic(tool_result({"type": "document"})),
            "content[0].content[0]: a part of type 'document'",
        ),
        (anthropic(tool_result({"type": "search_result"})), "content[0].content[0]: unknown part type 'search_result'"),
        (anthropic(tool_result(tool_result(BASE64))), "unknown part type 'tool_result'"),
        (anthropic(IMAGE), "unknown part type 'image_url'; known types: text, image"),
        (anthropic({"type": "text", "text": "x", "source": {}}), "a part of type 'text' cannot hold 'source'"),
        (anthropic({**BASE64, "image_url": URL}), "a part of type 'image' cannot hold 'image_url'"),
        (anthropic({"type": "image"}), "messages[0].content[0].source: type must be base64 or url, got None"),
        (anthropic({"type": "image", "source": {"type": "file", "file_id": "f"}}), "base64 or url, got 'file'"),
        (anthropic({"type": "image", "source": {"type": "base64", "data": 7}}), ".source: data must be base64"),
        (anthropic({"type": "image", "source": {"type": "base64", "url": URL}}), ".source: data must be base64"),
        (anthropic({"type": "image", "source": {"type": "url", "url": ""}}), "url a data: or http(s) URL"),
        (anthropic(BASE64, role="assistant"), "content of 'assistant' takes no images"),
        (anthropic(BASE64, role="system"), "content of 'system' takes no images"),
        (anthropic(tool_result(BASE64), role="assistant"), "content of 'assistant' takes no images"),
        (anthropic(system=[BASE64]), "system[0]: the system prompt takes no images"),
    ],
)
def test_what_anthropics_messages_do_not_take(body: dict[str, Any], told: str) -> None:
    assert told in refusal(body, MESSAGES).message


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_use", "id": "a", "name": "f", "input": {"image": URL, "source": "x"}},
        {"type": "thinking", "thinking": "x", "signature": "y"},
        {"type": "redacted_thinking", "data": "AAAA"},
        {"type": "tool_result", "tool_use_id": "a", "content": "x"},
        {"type": "tool_result", "tool_use_id": "a"},
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
    ],
)
def test_anthropics_text_has_no_images(block: dict[str, Any]) -> None:
    assert image_parts(anthropic(block, role="assistant"), MESSAGES) == []


@given(BODIES, st.sampled_from(BodyFormat))
@example(chat({"type": "image_url", "image_url": {"url": "\ud800"}}), BodyFormat.CHAT)
def test_no_body_makes_anything_but_an_answer_or_an_api_error(body: dict[str, Any], body_format: BodyFormat) -> None:
    """And every image of what passes is one that was found, once it is replaced."""
    has_media(body)
    try:
        refuse_fields(body)
        found = image_parts(body, body_format)
        pop_pixel_bounds(body)
    except ApiError:
        return
    for number, image in enumerate(found):
        image.put_url(f"vitray:{number}")
    for part in parts_in(body, body_format):
        if part.get("type") in body_format.value.images:
            assert "vitray:" in json.dumps(part)
    assert len(image_parts(body, body_format)) == len(found)
