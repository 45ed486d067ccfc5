"""Streaming is real: pieces arrive while the engine is still working on the answer."""

from __future__ import annotations

import httpx
import pytest

from tests.serve import pictures
from tests.serve.asking import ask_streamed, chunks, metric, streaming
from tests.serve.conversations import Body, about, chat

pytestmark = pytest.mark.slow

LONG: Body = {"max_tokens": 7000, "ignore_eos": True, "logprobs": False, "top_logprobs": None}
# A busy machine may keep this process waiting for longer than the whole answer takes.
ATTEMPTS = 5
BODIES = {
    "an image": about(pictures.url(230), **LONG),
    "text": chat({"role": "user", "content": "Hello!"}, **LONG),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_pieces_arrive_while_the_rest_is_being_made(base_url: str, body: Body) -> None:
    for _ in range(ATTEMPTS):
        with streaming(base_url, body) as response:
            arriving = chunks(response)
            first = [next(arriving) for _ in range(3)]
            running = metric(base_url, "vllm:num_requests_running")
        assert sum(len(chunk["choices"][0].get("token_ids") or ()) for chunk in first) < LONG["max_tokens"]
        if running >= 1:
            return
    pytest.fail("the engine had finished whenever the first pieces had come")


def test_a_stream_has_a_chunk_for_about_every_token(base_url: str) -> None:
    """vLLM puts several tokens into one chunk when the reader or the host is slow, so this counts generously."""
    received = ask_streamed(base_url, about(pictures.url(231), max_tokens=60, ignore_eos=True))
    with_tokens = [chunk for chunk in received if chunk["choices"] and chunk["choices"][0].get("token_ids")]
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in with_tokens) >= 60
    assert len(with_tokens) >= 6


def test_the_stream_is_server_sent_events(qwen3: str) -> None:
    asked = {"include_usage": True, "continuous_usage_stats": True}
    # On a busy host a short answer is complete, and its length known, before its head is sent.
    body = about(pictures.url(232), stream_options=asked, max_tokens=100, ignore_eos=True)
    with streaming(qwen3, body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in response.headers
        received = list(chunks(response))
    assert [chunk["object"] for chunk in received] == ["chat.completion.chunk"] * len(received)
    usages = [chunk["usage"]["completion_tokens"] for chunk in received]
    assert usages == sorted(usages)
    assert usages[-1] == 100


def test_an_error_before_the_stream_is_a_plain_error(qwen3: str) -> None:
    body = {**about("data:image/png;base64,AAAA"), "stream": True}
    response = httpx.post(qwen3 + "/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400
    assert response.headers["content-type"].startswith("application/json")
