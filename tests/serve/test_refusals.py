"""What a client gets wrong is told to it and to no one else: status, OpenAI's shape, which image, which limit."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from PIL import Image

from tests.serve import pictures
from tests.serve.application import MAX_BODY_BYTES, MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, MAX_IMAGES, MAX_VISUAL_TOKENS
from tests.serve.asking import TIMEOUT_S, WITH_KEY, ask, post
from tests.serve.conversations import MODEL, Body, about, chat, image, text, user
from tests.serve.errors import error_of
from tests.serve.pictures import data_url, encoded, picture

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
GOOD = pictures.url(250, 97, 61)
PNG = encoded(picture(251, 64, 64))
JPEG = encoded(picture(252, 200, 160), "JPEG")

BAD_IMAGES = {
    "no image at all": data_url(b"GIF89a, or so it says", "GIF"),
    "text": data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
    "a header and nothing else": data_url(PNG[:40]),
    "a truncated jpeg": data_url(JPEG[: len(JPEG) // 2], "JPEG"),
    "a truncated png": data_url(PNG[: len(PNG) * 2 // 3]),
    "broken base64": "data:image/png;base64,!!!!" + base64.b64encode(PNG).decode(),
    "nothing": "data:image/png;base64,",
    "no comma": "data:image/png;base64",
    "too long and narrow": pictures.url(253, 2010, 10),
    "another scheme": "file:///etc/passwd",
    "no scheme": "etc/passwd",
    "fetching, which is switched off": "http://127.0.0.1:1/x.png",
    "fetching by https, which is switched off": "https://127.0.0.1:1/x.png",
    "our own way of naming embeddings": "vitray:AAAAAAAAAAAAAAAAAAAAAA",
}


def asked(*parts: object, **fields: object) -> Body:
    return chat({"role": "user", "content": [*parts, text("What is it?")]}, **fields)


@pytest.mark.parametrize("image_url", BAD_IMAGES.values(), ids=BAD_IMAGES)
def test_a_bad_image_is_named(base_url: str, image_url: str) -> None:
    body = asked(image(GOOD), image(image_url), image(GOOD))
    error = error_of(post(base_url, CHAT, body), 400)
    assert "image 2 of 3" in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "messages"


def test_a_bad_image_is_named_when_the_answer_would_stream_and_when_tokens_are_counted(qwen3: str) -> None:
    """Tokens are counted by an image's header: what is cut off later does not show."""
    for path, name, fields in ((CHAT, "a truncated jpeg", {"stream": True}), ("/tokenize", "no image at all", {})):
        messages = asked(image(BAD_IMAGES[name]), image(GOOD))["messages"]
        error = error_of(post(qwen3, path, {"model": MODEL, "messages": messages, **fields}), 400)
        assert "image 1 of 2" in error["message"]


def test_bad_images_fail_only_their_own_requests(base_url: str) -> None:
    good = {seed: about(pictures.url(seed, 97, 61)) for seed in range(260, 268)}
    alone = {seed: ask(base_url, body) for seed, body in good.items()}
    fresh = {seed: about(pictures.url(seed + 20, 97, 61)) for seed in good}  # not in the cache yet
    bad = [asked(image(pictures.url(seed)), image(url)) for seed, url in enumerate(BAD_IMAGES.values(), 300)]
    with ThreadPoolExecutor(16) as pool:
        refused = [pool.submit(post, base_url, CHAT, body) for body in bad]
        answered = {seed: pool.submit(ask, base_url, body) for seed, body in good.items()}
        encoded_now = [pool.submit(ask, base_url, body) for body in fresh.values()]
    for response in refused:
        assert "image 2 of 2" in error_of(response.result(), 400)["message"]
    for seed, answer in answered.items():
        assert answer.result()["choices"][0]["token_ids"] == alone[seed]["choices"][0]["token_ids"]
    for answer in encoded_now:
        assert len(answer.result()["choices"][0]["token_ids"]) == 12


UNSUPPORTED_PARTS = {
    "video": {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    "audio": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    "audio by url": {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
    "a file": {"type": "file", "file": {"file_data": "AAAA"}},
    "embeddings": {"type": "image_embeds", "image_embeds": {"image_embeds": "AAAA", "image_grid_thw": "AAAA"}},
    "embeddings by a key of ours": {"type": "image_embeds", "image_embeds": "vitray:AAAAAAAAAAAAAAAAAAAAAA"},
    "embeddings with no data": {"type": "image_embeds", "image_embeds": None, "uuid": "0" * 64},
    "an image's name for the cache that is no text": {**image(GOOD), "uuid": 7},
    "an image by its name alone": {"type": "image_url", "image_url": None, "uuid": "0" * 64},
    "an image beside embeddings": {**image(GOOD), "image_embeds": "AAAA"},
    "text beside an image": {**text("x"), "image_url": {"url": GOOD}},
    "a picture of another library": {"type": "image_pil", "image_pil": "AAAA"},
    "an unknown type": {"type": "hologram"},
    "no type": {"image_url": {"url": GOOD}},
    "a number": 7,
    "an image without a url": {"type": "image_url", "image_url": {}},
    "an unknown detail": image(GOOD, detail="ultra"),
}


@pytest.mark.parametrize("part", UNSUPPORTED_PARTS.values(), ids=UNSUPPORTED_PARTS)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_other_parts_are_refused_and_named(qwen3: str, path: str, part: object) -> None:
    messages = [user(text("Hello!")), *asked(image(GOOD), part)["messages"]]
    error = error_of(post(qwen3, path, {"model": MODEL, "messages": messages}), 400)
    assert "messages[1].content[1]" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_embeds": "AAAA"},
        {"media_io_kwargs": {"image": {"image_mode": "RGBA"}}},
        {"mm_processor_kwargs": {"size": {"shortest_edge": 1}}},
        {"mm_processor_kwargs": {"max_pixels": 0}},
        {"mm_processor_kwargs": {"max_pixels": "many"}},
        {"mm_processor_kwargs": {"min_pixels": 200, "max_pixels": 100}},
        {"mm_processor_kwargs": [1]},
    ],
    ids=json.dumps,
)
def test_other_fields_are_refused_and_named(qwen3: str, fields: Body) -> None:
    error = error_of(post(qwen3, CHAT, about(GOOD, **fields)), 400)
    assert next(iter(fields)) in error["message"]


def test_embeddings_as_a_prompt_are_refused(qwen3: str) -> None:
    error_of(post(qwen3, "/v1/completions", {"model": MODEL, "prompt": "x", "prompt_embeds": "AAAA"}), 400)


@pytest.mark.parametrize("data", [b"{", b'{"messages": [}', b"\xff\xfe", b"[1]", b'"text"', b"[" * 100_000])
def test_a_body_that_is_no_json_object(qwen3: str, data: bytes) -> None:
    response = httpx.post(qwen3 + CHAT, content=data, headers={"content-type": "application/json"}, timeout=TIMEOUT_S)
    error_of(response, 400)


def test_no_body(qwen3: str) -> None:
    error_of(httpx.post(qwen3 + CHAT, headers={"content-type": "application/json"}, timeout=TIMEOUT_S), 400)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"n": 2}, "n must be 1"),  # greedily
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"messages": "Hello!"}, "messages"),
        ({"messages": []}, "message"),
        ({"top_logprobs": 1000}, "logprobs"),
        ({"tool_choice": "required"}, "tool"),
        ({"stream_options": {"include_usage": True}}, "stream"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_what_vllm_refuses_is_passed_on(qwen3: str, fields: Body, told: str) -> None:
    assert told in error_of(post(qwen3, CHAT, about(GOOD, **fields)), 400)["message"].lower()


def test_an_image_of_a_refused_request_is_good_for_the_next_one(base_url: str) -> None:
    """In vLLM alone, a request that is refused after its image was taken makes the next one with that image fail."""
    url = pictures.url(255, 90, 90)
    error_of(post(base_url, CHAT, about(url, n=2)), 400)
    for _ in range(2):
        assert ask(base_url, about(url))["choices"][0]["token_ids"]


def test_a_prompt_that_is_too_long(qwen3: str) -> None:
    error = error_of(post(qwen3, CHAT, asked(text("word " * 9000))), 400)
    assert "8192" in error["message"]


def test_a_body_that_is_too_large(tight: str) -> None:
    body = chat({"role": "user", "content": "x" * MAX_BODY_BYTES})
    assert str(MAX_BODY_BYTES) in error_of(post(tight, CHAT, body), 413)["message"]


def test_a_body_that_is_too_large_and_does_not_say_so(tight: str) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 1000 + 100):
            yield b"x" * 1000

    headers = {"content-type": "application/json", **WITH_KEY}
    response = httpx.post(tight + CHAT, content=endless(), headers=headers, timeout=TIMEOUT_S)
    assert str(MAX_BODY_BYTES) in error_of(response, 413)["message"]


def test_an_image_with_too_many_bytes(tight: str) -> None:
    large = data_url(PNG + bytes(MAX_IMAGE_BYTES))
    message = error_of(post(tight, CHAT, asked(image(GOOD), image(large))), 413)["message"]
    assert "image 2 of 2" in message
    assert str(MAX_IMAGE_BYTES) in message


def test_an_image_with_too_many_pixels(tight: str) -> None:
    side = int(MAX_IMAGE_PIXELS**0.5) + 1
    large = data_url(encoded(Image.new("1", (side, side))))
    message = error_of(post(tight, CHAT, asked(image(GOOD), image(large))), 400)["message"]
    assert "image 2 of 2" in message
    assert str(MAX_IMAGE_PIXELS) in message


def test_too_many_images(tight: str) -> None:
    assert ask(tight, asked(*[image(GOOD)] * MAX_IMAGES))
    message = error_of(post(tight, CHAT, asked(*[image(GOOD)] * (MAX_IMAGES + 1))), 400)["message"]
    assert str(MAX_IMAGES) in message
    assert str(MAX_IMAGES + 1) in message


def test_too_many_visual_tokens(tight: str) -> None:
    """Images of 352 x 352 are 121 tokens each in this architecture."""
    url = pictures.url(256, 352, 352)
    assert 2 * 121 <= MAX_VISUAL_TOKENS < 3 * 121
    assert ask(tight, asked(*[image(url)] * 2))
    message = error_of(post(tight, CHAT, asked(*[image(url)] * 3)), 400)["message"]
    assert str(3 * 121) in message
    assert str(MAX_VISUAL_TOKENS) in message


@pytest.mark.parametrize(("path", "fields"), [(CHAT, {}), (CHAT, {"stream": True}), ("/tokenize", {})], ids=str)
@pytest.mark.parametrize("also", [False, True], ids=["alone", "beside a user's"])
def test_an_image_where_the_template_takes_none_is_named(
    tight: str, path: str, fields: dict[str, object], also: bool
) -> None:
    """The template drops the images of a system message, at which vLLM answers "Failed to apply prompt replacement for
    mm_items['image'][0]" with status 500; with a second image it names that one."""
    messages = [
        {"role": "system", "content": [text("Be brief."), image(pictures.url(257))]},
        user(*[image(pictures.url(258))] * also, text("What is it?")),
    ]
    error = error_of(post(tight, path, {"model": MODEL, "messages": messages, **fields}), 400)
    assert "messages[0]" in error["message"]
    assert "'system'" in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
    ask(tight, chat({"role": "system", "content": "Be brief."}, *messages[1:]))
