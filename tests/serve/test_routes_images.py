"""Images through the Responses and Messages APIs and in messages of tools, by the official clients: streamed and whole,
with tools, and refused by the part's name. `test_parity.py` compares answers of these routes with vLLM alone's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from deployments.telemetry.metrics import Counter
from tests.serve import pictures
from tests.serve.application import ServedApplication
from tests.serve.asking import KEY, ask, post, settled
from tests.serve.comparison import difference
from tests.serve.conversations import (
    MODEL,
    WEATHER,
    about,
    chat,
    image,
    input_image,
    source_image,
    text,
    user,
)
from tests.serve.errors import error_of
from tests.serve.loopback import LoopbackServer
from tests.serve.pictures import encoded, picture
from tests.waiting import until

pytestmark = pytest.mark.slow

ONE, TWO = pictures.url(320, 97, 61), pictures.url(321, 64, 90, "JPEG")
WORDS: Any = {"type": "input_text", "text": "What is it?"}
FUNCTION: Any = WEATHER["function"]
RESPONSES_TOOL: Any = {"type": "function", **FUNCTION}
MESSAGES_TOOL: Any = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"], "strict": True}
FILE = encoded(picture(322, 97, 61), "JPEG")


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url + "/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture
def claude(base_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=base_url, api_key="unused", max_retries=0, timeout=120) as made:
        yield made


def test_a_response_to_images_streamed_and_whole(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "input": [user(input_image(ONE), WORDS, input_image(TWO))],
        "temperature": 0,
        "max_output_tokens": 12,
    }
    whole = client.responses.create(**asked)
    assert whole.output_text
    events = list(client.responses.create(stream=True, **asked))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].type in ("response.completed", "response.incomplete")
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[user(image(ONE), text("What is it?"), image(TWO))],  # type: ignore[list-item]
        temperature=0,
        max_tokens=12,
    )
    assert chat.choices[0].message.content == whole.output_text
    assert chat.usage is not None
    assert whole.usage is not None
    assert whole.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_calls_a_tool_and_sees_its_image(client: openai.OpenAI, stream: bool) -> None:
    """The output goes back as a client sends it, with the items of the first answer."""
    asked: Any = {"model": MODEL, "tools": [RESPONSES_TOOL], "temperature": 0}
    first: Any = {"input": [user(input_image(ONE), WORDS)], "max_output_tokens": 400}
    choice: Any = {"type": "function", "name": FUNCTION["name"]}
    if stream:
        events = list(client.responses.create(**asked, **first, tool_choice=choice, stream=True))
        assert events[-1].type == "response.completed"
        answer = events[-1].response
    else:
        answer = client.responses.create(**asked, **first, tool_choice=choice)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments)["unit"] in ("celsius", "kelvin")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": [input_image(TWO)]}
    sent_back: Any = call.model_dump(exclude_none=True)
    answers = []
    for status in ({}, {"id": "fc_out", "status": "completed"}):
        items: Any = [*first["input"], sent_back, {**output, **status}]
        answers.append(client.responses.create(**asked, input=items, tool_choice="none", max_output_tokens=8))
    assert answers[0].usage == answers[1].usage
    assert answers[0].output_text == answers[1].output_text


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_with_images_streamed_and_whole(claude: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": [user(source_image(ONE), text("What is it?"), source_image(TWO))],
        "extra_body": {"temperature": 0},
        "max_tokens": 12,
    }
    whole = claude.messages.create(**asked)
    assert whole.stop_reason == "max_tokens"
    with claude.messages.stream(**asked) as stream:
        written = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert written == text_of(whole) == text_of(final)
    assert final.usage.output_tokens == whole.usage.output_tokens == 12
    counted = claude.messages.count_tokens(model=MODEL, messages=asked["messages"])
    cached = whole.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == whole.usage.input_tokens + cached
    body = {"model": MODEL, "messages": [user(image(ONE), text("What is it?"), image(TWO))]}
    assert counted.input_tokens == ask(str(claude.base_url).rstrip("/"), body, "/tokenize")["count"]


def test_a_count_of_tokens_encodes_no_image(
    application: ServedApplication, arch: str, base_url: str, claude: anthropic.Anthropic
) -> None:
    """The two routes are asked of pictures that nobody has sent; a chat about these has both of them encoded."""
    shown, words = (pictures.url(330, 97, 61), pictures.url(331, 64, 90)), text("Compare.")
    encoded_before = settled(lambda: application.exported(arch, "Encoder", Counter.IMAGES_ENCODED))
    body = chat(user(*map(image, shown), words))
    count = ask(base_url, {"model": MODEL, "messages": body["messages"]}, "/tokenize")["count"]
    messages: Any = [user(*map(source_image, shown), words)]
    assert claude.messages.count_tokens(model=MODEL, messages=messages).input_tokens == count
    answer = post(base_url, "/v1/chat/completions", body)
    assert answer.json()["usage"]["prompt_tokens"] == count
    assert 'cache;desc="0/2"' in answer.headers["server-timing"]
    until(lambda: application.exported(arch, "Encoder", Counter.IMAGES_ENCODED) == encoded_before + 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_that_uses_a_tool_and_sees_its_image(claude: anthropic.Anthropic, stream: bool) -> None:
    asked: Any = {"model": MODEL, "tools": [MESSAGES_TOOL], "extra_body": {"temperature": 0}, "max_tokens": 400}
    question: Any = user(source_image(ONE), text("What is the weather there?"))
    choice: Any = {"type": "tool", "name": FUNCTION["name"]}
    if stream:
        with claude.messages.stream(**asked, messages=[question], tool_choice=choice) as events:
            answer = events.get_final_message()
    else:
        answer = claude.messages.create(**asked, messages=[question], tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert use.input["unit"] in ("celsius", "kelvin")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [text("Seen:"), source_image(TWO)]}
    turns: Any = [question, {"role": "assistant", "content": answer.content}, user(result)]
    final = claude.messages.create(**{**asked, "max_tokens": 8}, messages=turns, tool_choice={"type": "none"})
    assert final.content
    without: Any = [*turns[:2], user({**result, "content": [text("Seen:")]})]
    counts = [claude.messages.count_tokens(model=MODEL, messages=messages) for messages in (turns, without)]
    assert counts[0].input_tokens > counts[1].input_tokens


BROKEN = pictures.data_url(b"GIF89a and no image")


def test_a_bad_part_is_named(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    for part, told in (
        (input_image(BROKEN), "image 1 of 1 (input[1].content[1])"),
        ({"type": "input_file", "file_id": "f"}, "input[1].content[1]: a part of type 'input_file' is not supported"),
        ({"type": "input_image", "file_id": "f", "detail": "auto"}, "input[1].content[1]: a part of type"),
    ):
        items: Any = [{"role": "system", "content": "Be brief."}, user(WORDS, part)]
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=MODEL, input=items)
        assert told in refused.value.message
        assert refused.value.param == "input"
    document: Any = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
    for block, told in (
        (source_image(BROKEN), "image 1 of 1 (messages[0].content[1])"),
        ({"type": "tool_result", "tool_use_id": "a", "content": [source_image(BROKEN)]}, "content[1].content[0])"),
        (document, "messages[0].content[1]: a part of type 'document' is not supported"),
    ):
        messages: Any = [user(text("x"), block)]
        with pytest.raises(anthropic.BadRequestError) as told_by:
            claude.messages.create(model=MODEL, max_tokens=4, messages=messages)
        body: Any = told_by.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert told in body["error"]["message"]
        with (
            pytest.raises(anthropic.BadRequestError),
            claude.messages.stream(model=MODEL, max_tokens=4, messages=messages) as stream,
        ):
            stream.until_done()


def test_what_vllm_refuses_has_anthropics_format(claude: anthropic.Anthropic) -> None:
    messages: Any = [user(source_image(ONE))]
    for fields in ({"model": MODEL, "max_tokens": 0}, {"model": "none", "max_tokens": 4}):
        with pytest.raises(anthropic.APIStatusError) as refused:
            claude.messages.create(messages=messages, **fields)  # type: ignore[call-overload]
        assert refused.value.status_code in (400, 404)
        body: Any = refused.value.body
        assert body["type"] == "error"


def test_an_image_where_the_template_takes_none_is_named(tight: str) -> None:
    """The template of this model uses only the text of a system message."""
    items = [{"role": "system", "content": [WORDS, input_image(pictures.url(324))]}, user(WORDS)]
    error = error_of(post(tight, "/v1/responses", {"model": MODEL, "input": items}), 400)
    assert "input[0]" in error["message"]
    assert "'system'" in error["message"]


def test_anthropics_client_brings_its_key_in_its_own_header(tight: str) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 4, "messages": [user(source_image(pictures.url(325)))]}
    with anthropic.Anthropic(base_url=tight, api_key=KEY, max_retries=2, timeout=120) as claude:
        assert claude.messages.create(**asked).content
    with (
        anthropic.Anthropic(base_url=tight, api_key="another", max_retries=0, timeout=120) as claude,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        claude.messages.create(**asked)
    body: Any = refused.value.body
    assert body["error"]["type"] == "authentication_error"


def test_images_by_url_on_every_route(tight: str) -> None:
    with LoopbackServer(FILE, b"").serving() as web, anthropic.Anthropic(base_url=tight, api_key=KEY) as claude:
        with openai.OpenAI(base_url=tight + "/v1", api_key=KEY) as client:
            items: Any = [user(input_image(web.url + "/image"), WORDS)]
            assert client.responses.create(model=MODEL, input=items, max_output_tokens=4).output_text
        messages: Any = [user(source_image(web.url + "/image"))]
        assert claude.messages.create(model=MODEL, max_tokens=4, messages=messages).content
        assert claude.messages.count_tokens(model=MODEL, messages=messages).input_tokens > 0
        assert web.paths == ["/image"] * 3
        refused: Any = [user(source_image(web.url + "/status/404"))]
        with pytest.raises(anthropic.BadRequestError, match="404"):
            claude.messages.create(model=MODEL, max_tokens=4, messages=refused)


def test_a_uuid_names_nothing(qwen3: str) -> None:
    """Two images by one uuid are two images, and a uuid makes no difference."""
    first, second = about(pictures.url(326, 97, 61)), about(pictures.url(327, 97, 61))
    plain = [ask(qwen3, body) for body in (first, second)]
    for body in (first, second):
        body["messages"][0]["content"][0]["uuid"] = "mine"
    named = [ask(qwen3, body) for body in (first, second)]
    for with_uuid, without in zip(named, plain, strict=True):
        difference(with_uuid, without, tolerance=1e-3)
    with pytest.raises(AssertionError):
        difference(named[0], named[1], tolerance=1e-3)


def test_the_id_of_a_request_is_bounded_and_is_its_answers(qwen3: str) -> None:
    """One of 65,536 characters, with an image that was not encoded yet, ended the engine."""
    longest = '"' * 256
    answer = post(qwen3, "/v1/chat/completions", about(pictures.url(328, 97, 61)), {"x-request-id": longest})
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] == f"chatcmpl-{longest}"
    response = {"input": [user(input_image(pictures.url(329, 97, 61)))], "request_id": longest, "store": False}
    answer = post(qwen3, "/v1/responses", {"model": MODEL, **response})
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] == longest
    too_long = post(qwen3, "/v1/responses", {"model": MODEL, **response, "request_id": longest * 258})
    assert "request_id has 66048 characters, the limit is 256" in error_of(too_long, 400)["message"]
