"""Stored responses by OpenAI's client: a conversation that names its previous response is the one that is sent whole,
images and tools included, and belongs to its key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from deployments.telemetry.metrics import Counter
from tests.serve import pictures
from tests.serve.application import ServedApplication
from tests.serve.asking import KEY, OTHER_KEY, settled
from tests.serve.comparison import difference
from tests.serve.conversations import MODEL, WEATHER, input_image, user

pytestmark = pytest.mark.slow

WORDS: Any = {"type": "input_text", "text": "What is it?"}
LOGPROBS: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
ASKED: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
TOOL: Any = {"type": "function", **WEATHER["function"]}


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url + "/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


def answered(client: openai.OpenAI, stream: bool, **asked: Any) -> Any:
    if not stream:
        return client.responses.create(**ASKED, **asked)
    *_, last = client.responses.create(**ASKED, **asked, stream=True)
    assert last.type in ("response.completed", "response.incomplete")
    return last.response


def items_of(response: Any) -> list[Any]:
    """Its output as a client sends it back."""
    return [item.model_dump(exclude_none=True) for item in response.output]


def is_same_answer(one: Any, other: Any, stream: bool) -> None:
    """With `stream`, without tokens that have no text: vLLM omits their log-probabilities unless it sends them together
    with others, which depends on timing."""
    outputs = [response.model_dump()["output"] for response in (one, other)]
    if stream:
        for content in (content for items in outputs for item in items for content in item.get("content") or ()):
            content["logprobs"] = [each for each in content.get("logprobs") or () if each["bytes"]]
    difference(*outputs, tolerance=1e-3)
    assert one.usage.input_tokens == other.usage.input_tokens


def test_conversations_about_images_go_on(application: ServedApplication, arch: str, client: openai.OpenAI) -> None:
    """The second and third turn name the one before; tokens and log-probabilities are those of the same conversation
    sent whole. Each image is encoded once. `instructions` are not inherited."""
    encoded = settled(lambda: application.exported(arch, "Encoder", Counter.IMAGES_ENCODED))
    for stream in (False, True):
        converse_about_images(client, stream)
    assert settled(lambda: application.exported(arch, "Encoder", Counter.IMAGES_ENCODED)) == encoded + 4


def converse_about_images(client: openai.OpenAI, stream: bool) -> None:
    shown: Any = user(input_image(pictures.url(810 + stream, 120, 90, "JPEG")), WORDS)
    again: Any = user(input_image(pictures.url(812 + stream, 64, 90)), {"type": "input_text", "text": "And this?"})
    first = answered(client, stream, input=[shown], instructions="Be terse.")
    second = answered(client, stream, input="Are you sure?", previous_response_id=first.id, **LOGPROBS)
    third = answered(client, stream, input=[again], previous_response_id=second.id, **LOGPROBS)
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
    items = [shown, *items_of(first), {"role": "user", "content": "Are you sure?"}]
    is_same_answer(second, answered(client, stream, input=items, store=False, **LOGPROBS), stream)
    items += [*items_of(second), again]
    is_same_answer(third, answered(client, stream, input=items, store=False, **LOGPROBS), stream)
    other = answered(client, stream, input=[again, *items[1:]], store=False, **LOGPROBS)
    with pytest.raises(AssertionError):
        is_same_answer(third, other, stream)


@pytest.mark.parametrize("arch", ["qwen3"])  # the other's weights fill the arguments without end
def test_a_tools_image_goes_on_too(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "name": TOOL["name"]}
    asked: Any = {"model": MODEL, "tools": [TOOL], "temperature": 0}
    words = "What is the weather there?"
    first = client.responses.create(**asked, input=words, tool_choice=choice, max_output_tokens=400)
    (call,) = [item for item in first.output if item.type == "function_call"]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": [input_image(pictures.url(814))]}
    last: Any = {**asked, "tool_choice": "none", "max_output_tokens": 8}
    second = client.responses.create(**last, input=[output], previous_response_id=first.id)
    whole: Any = [{"role": "user", "content": words}, *items_of(first), output]
    is_same_answer(second, client.responses.create(**last, input=whole, store=False), stream=False)


def test_a_response_is_retrieved_listed_and_deleted(client: openai.OpenAI) -> None:
    image = pictures.url(815)
    first = client.responses.create(**ASKED, input=[user(input_image(image), WORDS)])  # type: ignore[list-item]
    second = client.responses.create(**ASKED, input="Are you sure?", previous_response_id=first.id)
    assert client.responses.retrieve(second.id) == second
    listed: Any = list(client.responses.input_items.list(second.id, order="asc"))
    assert len(listed) == 3
    assert listed[0].content[0].image_url.partition(",")[2] == image.partition(",")[2]
    assert listed[1].id == first.output[0].id
    assert listed[2].content == "Are you sure?"
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(**ASKED, input="x", previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"
    third = client.responses.create(**ASKED, input="And now?", previous_response_id=second.id)
    assert third.usage is not None
    assert second.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


def test_what_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASKED, input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="background: an answer ends with its request"):
        client.responses.create(**ASKED, input="x", background=True)


def test_responses_belong_to_a_key(tight: str) -> None:
    with (
        openai.OpenAI(base_url=tight + "/v1", api_key=KEY, timeout=120) as mine,
        openai.OpenAI(base_url=tight + "/v1", api_key=OTHER_KEY, timeout=120) as others,
    ):
        made = mine.responses.create(**ASKED, input=[user(input_image(pictures.url(816)), WORDS)])  # type: ignore[list-item]
        told = []
        for name in (made.id, "resp_" + "0" * 32):
            for call in (others.responses.retrieve, others.responses.delete, others.responses.input_items.list):
                with pytest.raises(openai.NotFoundError) as refused:
                    call(name)
                told.append(json.dumps(refused.value.body).replace(name, ""))
            with pytest.raises(openai.NotFoundError) as refused:
                others.responses.create(**ASKED, input="x", previous_response_id=name)
            told.append(json.dumps(refused.value.body).replace(name, ""))
        assert told[:4] == told[4:]
        assert mine.responses.retrieve(made.id) == made


def test_the_store_is_lost_and_answers_go_on(application: ServedApplication, tight: str) -> None:
    """Of this application, which loses its replicas in other tests too."""
    with openai.OpenAI(base_url=tight + "/v1", api_key=KEY, max_retries=5, timeout=120) as client:
        made = client.responses.create(**ASKED, input="x")
        (replica,) = application.replicas("tight", "ResponseStore")
        replica.kill()
        assert client.responses.create(**ASKED, input="x").output_text == made.output_text
        with pytest.raises(openai.NotFoundError):  # until it is back, a 503 that the client repeats
            client.responses.retrieve(made.id)
        again = client.responses.create(**ASKED, input="x")
        assert client.responses.retrieve(again.id) == again
