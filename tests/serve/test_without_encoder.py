"""Text never touches an encoder: it is answered while there is none, and an encoder that is up does not hear of it."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.serve import pictures
from tests.serve.application import ServedApplication
from tests.serve.asking import TIMEOUT_S, ask, ask_streamed
from tests.serve.conversations import TEXT_REQUESTS, Body, about, chat
from tests.waiting import until

pytestmark = pytest.mark.slow

HELLO = chat({"role": "user", "content": "Hello!"})
LOG_TIMEOUT_S = 60.0


def test_text_on_every_route_leaves_the_encoder_alone(application: ServedApplication, qwen3: str) -> None:
    """The replicas' own logs tell who was called for which request."""
    requests: list[tuple[str, Body]] = [("/v1/chat/completions", HELLO), *TEXT_REQUESTS.values()]
    requests.append(("/tokenize", {"model": HELLO["model"], "messages": HELLO["messages"]}))
    for number, (path, body) in enumerate(requests):
        _post(qwen3 + path, body, f"text-only-{number}")
    _post(qwen3 + "/v1/chat/completions", about(pictures.url(200)), "with-an-image")
    wanted = [f"text-only-{number}" for number in range(len(requests))]
    calls = "the replicas' log has the calls"
    until(lambda: all(_called(application, "LLM", name) for name in [*wanted, "with-an-image"]), calls, LOG_TIMEOUT_S)
    until(lambda: _called(application, "Encoder", "with-an-image"), calls, LOG_TIMEOUT_S)
    assert not any(_called(application, "Encoder", name) for name in wanted)


def test_text_is_answered_without_an_encoder_and_an_image_brings_one(
    application: ServedApplication, tight: str
) -> None:
    """Of all tests with images in the application `tight`, this one is the first: see FILE_ORDER."""
    if application.replicas("tight", "Encoder"):
        pytest.fail("an encoder is up already, so this would prove nothing: it has to run before the tests with images")
    assert ask(tight, HELLO)["choices"][0]["token_ids"]
    assert ask_streamed(tight, HELLO)
    for path, body in TEXT_REQUESTS.values():
        ask(tight, body, path)
    assert application.replicas("tight", "Encoder") == []
    assert ask(tight, about(pictures.url(201)))["choices"][0]["token_ids"]
    assert len(application.replicas("tight", "Encoder")) == 1


def _post(url: str, body: Body, request_id: str) -> None:
    response = httpx.post(url, json=body, headers={"x-request-id": request_id}, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text


def _called(application: ServedApplication, deployment: str, request_id: str) -> bool:
    pattern = rf"qwen3_{deployment} \S+ {re.escape(request_id)} -- CALL"
    return re.search(pattern, application.log()) is not None
