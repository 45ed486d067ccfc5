"""The official client, unchanged, for every route that it has a method for; and LangChain's chat model, which has it
inside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.serve import pictures
from tests.serve.conversations import MODEL, WEATHER, image, text, user

pytestmark = pytest.mark.slow

QUESTION: Any = [user(image(pictures.url(220, 97, 61)), text("What is it?"), image(pictures.url(221, 64, 90, "JPEG")))]
SHORT: Any = {"temperature": 0, "max_tokens": 12}


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url + "/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == [MODEL]
    assert models[0].object == "model"


def test_a_chat_with_images_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=3, **SHORT)
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [len(position.top_logprobs) for position in choice.logprobs.content] == [3] * 12
    assert whole.usage is not None

    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}, **SHORT
    )
    chunks = list(stream)
    written = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert written == choice.message.content
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_langchains_messages_whole_streamed_and_in_a_conversation(qwen3: str) -> None:
    """Its own content blocks, and OpenAI's, which it hands through: answered as the same request by the client is."""
    model = ChatOpenAI(
        base_url=qwen3 + "/v1", api_key=SecretStr("unused"), model=MODEL, temperature=0, max_completion_tokens=12,
        max_retries=0,
    )  # fmt: skip
    one, two = pictures.url(223, 97, 61), pictures.url(224, 64, 90)
    asked: Any = [
        {"role": "system", "content": "Be brief."},
        user(image(one), text("What is it?")),
        {"role": "assistant", "content": "A picture."},
        user(image(two), text("And this?")),
    ]
    expected = openai.OpenAI(base_url=qwen3 + "/v1", api_key="unused").chat.completions.create(
        model=MODEL, messages=asked, **SHORT
    )
    block = {"type": "image", "base64": two.partition(",")[2], "mime_type": "image/png"}
    messages = [
        SystemMessage("Be brief."),
        HumanMessage([image(one), text("What is it?")]),
        AIMessage("A picture."),
        HumanMessage([block, text("And this?")]),
    ]
    whole = model.invoke(messages)
    assert whole.text == expected.choices[0].message.content
    assert "".join(chunk.text for chunk in model.stream(messages)) == whole.text
    assert whole.usage_metadata is not None
    assert expected.usage is not None
    assert whole.usage_metadata["input_tokens"] == expected.usage.prompt_tokens


def test_several_answers_of_one_request(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=3, seed=3, temperature=1.0, max_tokens=8, logprobs=True
    )
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in made.choices}) == 3


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    long = {**SHORT, "max_tokens": 40}
    free = client.chat.completions.create(model=MODEL, messages=QUESTION, **long).choices[0].message.content
    assert free is not None
    stop = free[8:10]
    made = client.chat.completions.create(model=MODEL, messages=QUESTION, stop=[stop], **long).choices[0]
    assert made.finish_reason == "stop"
    assert made.message.content == free[: free.index(stop)]


def test_a_tool_that_must_be_called(client: openai.OpenAI) -> None:
    tools: Any = [WEATHER]
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    made = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=tools, tool_choice=choice, temperature=0, max_tokens=400
    )
    calls = made.choices[0].message.tool_calls
    assert calls
    assert len(calls) == 1
    assert calls[0].type == "function"
    assert calls[0].function.name == "get_weather"
    assert json.loads(calls[0].function.arguments)["unit"] in ("celsius", "kelvin")


def test_an_answer_that_follows_a_schema(client: openai.OpenAI) -> None:
    """Of a string, since a random model may fill an object with blanks for ever."""
    schema: Any = {"type": "string", "enum": ["red", "green"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
    made = client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=wanted, temperature=0)
    content = made.choices[0].message.content
    assert content is not None
    assert json.loads(content) in ("red", "green")


def test_completions_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon a time", logprobs=2, **SHORT)
    assert whole.choices[0].logprobs is not None
    stream = client.completions.create(model=MODEL, prompt="Once upon a time", stream=True, **SHORT)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_responses_streamed_and_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "Hello!", "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    assert whole.output_text
    events = list(client.responses.create(stream=True, **asked))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_responses_are_not_kept(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_unknown")
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_unknown")


def test_what_is_not_served_is_an_error_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="Hello!")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(MODEL)
    broken: Any = [user(image("data:image/png;base64,AAAA"))]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=broken, **SHORT)
    assert "image 1 of 1" in refused.value.message
    assert refused.value.type == "invalid_request_error"
