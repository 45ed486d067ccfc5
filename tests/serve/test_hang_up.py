"""A client that hangs up ends what was started for it, whether it had begun to read or not.

The engine's own counters tell: the request leaves it long before all of its tokens are made.
"""

from __future__ import annotations

import http.client
import json

import httpx
import pytest

from tests.serve import pictures
from tests.serve.asking import ask, chunks, metric, streaming
from tests.serve.conversations import Body, about, chat
from tests.waiting import until

pytestmark = pytest.mark.slow

LONG: Body = {"max_tokens": 7000, "ignore_eos": True, "logprobs": False, "top_logprobs": None}
BODIES = {
    "an image": about(pictures.url(240), **LONG),
    "text": chat({"role": "user", "content": "Hello!"}, **LONG),
}
REPEATS = 4  # whether a token comes up in the very moment is a matter of chance


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_while_the_answer_streams(base_url: str, body: Body) -> None:
    for _ in range(REPEATS):
        before = metric(base_url, "vllm:generation_tokens_total")
        with streaming(base_url, body) as response:
            arriving = chunks(response)
            for _ in range(3):
                next(arriving)
        _ends_early(base_url, before)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_while_a_whole_answer_is_being_made(base_url: str, body: Body) -> None:
    before = metric(base_url, "vllm:generation_tokens_total")
    url = httpx.URL(base_url)
    connection = http.client.HTTPConnection(url.host, url.port)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", url.path + "/v1/chat/completions", json.dumps(body), headers)
        until(lambda: metric(base_url, "vllm:generation_tokens_total") > before)
    finally:
        connection.close()
    _ends_early(base_url, before)


def _ends_early(base_url: str, before: float) -> None:
    """Asks a short question meanwhile: the engine tells its counters when it takes a step."""

    def ended() -> bool:
        ask(base_url, chat({"role": "user", "content": "Hi"}, max_tokens=2))
        return metric(base_url, "vllm:num_requests_running") == 0

    until(ended)
    made = metric(base_url, "vllm:generation_tokens_total") - before
    assert made < LONG["max_tokens"], "it ran to its end"
