"""When an encoder dies, another one does its work; when an engine dies, another one answers what has no byte yet."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import httpx
import pytest

from tests.serve import pictures
from tests.serve.application import ServedApplication
from tests.serve.asking import TIMEOUT_S, ask, metric, post, streaming
from tests.serve.comparison import difference
from tests.serve.conversations import SEVERAL_BLOCKS, Body, about, chat, image, text, user
from tests.serve.errors import error_of

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
HELLO = chat({"role": "user", "content": "Hello!"})
LONG: Body = {"max_tokens": 7000, "ignore_eos": True, "logprobs": False, "top_logprobs": None}
MANY_TOKENS = 2000
"""An engine is killed before it has written as many."""
RECOVERY_S = 240.0


def test_of_two_encoders_one_dies_and_no_client_notices(application: ServedApplication, qwen3: str) -> None:
    """Killed while images come: no answer is an error, and each is the one that its picture had before. When both
    are dead, a conversation goes on whose picture vLLM has in its prefix cache; another one needs an encoder."""
    bodies = [about(pictures.url(seed, 90, 70)) for seed in range(450, 458)]
    before = [ask(qwen3, body) for body in bodies]
    encoders = application.replicas("qwen3", "Encoder")
    assert len(encoders) == 2
    with ThreadPoolExecutor(8) as pool:
        fresh = [about(pictures.url(seed, 110, 90)) for seed in range(460, 464)]
        under_way = [pool.submit(ask, qwen3, body) for body in fresh]
        encoders[0].kill()
        after = list(pool.map(lambda body: ask(qwen3, body), bodies))
        answers = [answer.result() for answer in under_way]
    for one, other in zip(after, before, strict=True):
        difference(one, other, tolerance=1e-3)
    for body, answer in zip(fresh, answers, strict=True):
        difference(ask(qwen3, body), answer, tolerance=1e-3)
    ask(qwen3, _turn("Be brief."))
    told = ask(qwen3, _turn("Be brief.", "And now?"))
    with _no_encoder(application, "qwen3"):
        response = post(qwen3, CHAT, _turn("Be brief.", "And now?"))
        assert response.status_code == 200, response.text
        assert 'path;desc="prefix_cache"' in response.headers["server-timing"], "vLLM answers from what it has computed"
    difference(response.json(), told, tolerance=1e-3)
    _until(lambda: len(application.replicas("qwen3", "Encoder")) == 2)
    assert not set(encoders) & set(application.replicas("qwen3", "Encoder"))
    _until_answered(qwen3, _turn("Take your time."))


def _turn(opening: str, *more: str) -> Body:
    """Of one conversation about one picture, where the opening is the same."""
    first = user(image(pictures.url(470, 200, 150)), text(SEVERAL_BLOCKS))
    return chat({"role": "system", "content": opening}, first, *({"role": "user", "content": one} for one in more))


def test_a_lost_encoder_is_replaced_and_text_does_not_notice(application: ServedApplication, tight: str) -> None:
    body = about(pictures.url(440))
    before = ask(tight, body)
    (encoder,) = application.replicas("tight", "Encoder")
    encoder.kill()
    assert ask(tight, HELLO)["choices"][0]["token_ids"]
    refusals = _until_answered(tight, body)
    for refused in refusals:
        assert int(refused.headers["retry-after"]) >= 1
        error_of(refused, 503)
    difference(ask(tight, body), before, tolerance=1e-3)
    assert encoder not in application.replicas("tight", "Encoder")


@contextmanager
def _no_encoder(application: ServedApplication, name: str) -> Iterator[None]:
    """Kills every encoder that there is, and then each that is being started."""
    ended = Event()

    def kill() -> None:
        for encoder in application.replicas(name, "Encoder"):
            encoder.kill()

    def kill_on() -> None:
        while not ended.wait(0.2):
            kill()

    kill()
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_on)
        try:
            yield
        finally:
            ended.set()
        killing.result()


def test_a_dead_engine_is_replaced_and_costs_what_has_begun(application: ServedApplication, tight: str) -> None:
    """What had no byte of its answer got vLLM's error for one, a 500."""
    body = about(pictures.url(441))
    before = ask(tight, body)
    (engine,) = application.engine_cores("tight")
    with ThreadPoolExecutor(1) as pool, streaming(tight, {**body, **LONG}) as streamed:
        lines = streamed.iter_lines()
        assert next(lines).startswith("data: ")
        whole = pool.submit(_past_refusals, tight, {**body, **LONG, "max_tokens": MANY_TOKENS})
        _until(lambda: metric(tight, "vllm:num_requests_running") == 2)
        engine.kill()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "error" in events[-1], "the stream broke off without a word"
    assert whole.result().json()["usage"]["completion_tokens"] == MANY_TOKENS
    assert not any(choice.get("finish_reason") for event in events for choice in event.get("choices", []))

    assert _healthy(tight)
    difference(ask(tight, body), before, tolerance=1e-3)
    assert engine not in application.engine_cores("tight")


def _healthy(tight: str) -> bool:
    return httpx.get(tight + "/health", timeout=TIMEOUT_S).status_code == 200


def _past_refusals(tight: str, body: Body) -> httpx.Response:
    """The first answer that does not ask to try again."""
    deadline = time.monotonic() + RECOVERY_S
    while (response := post(tight, CHAT, body)).status_code == 503:
        assert time.monotonic() < deadline, response.text
        time.sleep(0.5)
    return response


def _until_answered(tight: str, body: Body) -> list[httpx.Response]:
    """Asks until the answer is a good one; returns the others."""
    refused: list[httpx.Response] = []
    deadline = time.monotonic() + RECOVERY_S
    while (response := post(tight, CHAT, body)).status_code != 200:
        assert time.monotonic() < deadline, response.text
        refused.append(response)
        time.sleep(0.5)
    return refused


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RECOVERY_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)
