"""What is over the bounds of a queue is refused at once, with the time after which to try again, and harms no one."""

from __future__ import annotations

import re
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse

import httpx
import openai
import pytest

from tests.serve import pictures
from tests.serve.application import (
    MAX_ANSWERING,
    MAX_AT_THE_DOOR,
    MAX_RETRY_AFTER_S,
    MAX_WAITING,
    MAX_WAITING_AT_THE_DOOR,
    RETRY_AFTER_S,
    ServedApplication,
)
from tests.serve.asking import KEY, TIMEOUT_S, WITH_KEY, ask, chunks, post, streaming
from tests.serve.conversations import MODEL, Body, about, chat
from tests.serve.errors import error_of

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
HELLO = chat({"role": "user", "content": "Hello!"})
LONG = {**HELLO, "max_tokens": 7000, "ignore_eos": True}
TOO_MANY = 4
LARGE = (448, 448)  # 196 visual tokens: one at a time is in flight
LIMIT_S = 2


@contextmanager
def busy(application: ServedApplication) -> Iterator[None]:
    """As many answers are being made as the language model makes at a time, and none of them ends meanwhile."""
    with ExitStack() as stack:
        tight = application.base_url("tight")
        arriving = [chunks(stack.enter_context(streaming(tight, LONG))) for _ in range(MAX_ANSWERING)]
        for answer in arriving:
            next(answer)
        for engine in application.engine_cores("tight"):
            engine.suspend()
            stack.callback(engine.resume)
        yield


@contextmanager
def overloaded(application: ServedApplication, bodies: Sequence[Body]) -> Iterator[list[httpx.Response]]:
    """Asks TOO_MANY more than may wait, all at once. Gives the refusals; the others wait, and are answered."""
    assert len(bodies) == MAX_WAITING + TOO_MANY
    with ThreadPoolExecutor(len(bodies)) as pool:
        with busy(application):
            asked = [pool.submit(post, application.base_url("tight"), CHAT, body) for body in bodies]
            first = as_completed(asked)
            yield [next(first).result() for _ in range(TOO_MANY)]
        assert [answer.result().status_code for answer in first] == [200] * MAX_WAITING


@pytest.mark.parametrize(
    "bodies",
    [[HELLO] * (MAX_WAITING + TOO_MANY), [about(pictures.url(460 + n)) for n in range(MAX_WAITING + TOO_MANY)]],
    ids=["text", "images"],
)
def test_more_than_may_wait(application: ServedApplication, tight: str, bodies: list[Body]) -> None:
    """As many as may wait do, and no fewer: images are still to be encoded, which Serve's own queue would not count."""
    ask(tight, about(pictures.url(420)))
    with overloaded(application, bodies) as refusals:
        for refused in refusals:
            error = error_of(refused, 503)
            assert error["type"] == "overloaded_error"
            assert f"{MAX_WAITING} requests wait for a language model" in error["message"]
            assert RETRY_AFTER_S <= int(refused.headers["retry-after"]) <= MAX_RETRY_AFTER_S
    ask(tight, bodies[-1])


def test_images_wait_in_line_for_an_encoder(application: ServedApplication, tight: str) -> None:
    """The encoder stands still: one large image is with it and the rest wait.

    Text is answered all the while, a deadline is kept, and nothing is lost.
    """
    ask(tight, about(pictures.url(421)))
    (encoder,) = application.replicas("tight", "Encoder")
    bodies = [about(pictures.url(470 + number, *LARGE)) for number in range(3)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        encoder.suspend()
        try:
            answers = [pool.submit(post, tight, CHAT, body) for body in bodies[:2]]
            headers = {"x-request-timeout-s": str(LIMIT_S), **WITH_KEY}
            late = httpx.post(tight + CHAT, json=bodies[2], headers=headers, timeout=TIMEOUT_S)
            assert error_of(late, 504)["message"] == f"the request took longer than {LIMIT_S} s, the limit"
            assert ask(tight, HELLO)["choices"][0]["token_ids"]
            assert not any(answer.done() for answer in answers)
        finally:
            encoder.resume()
        timings = [answer.result().headers["server-timing"] for answer in answers]
    assert [answer.result().status_code for answer in answers] == [200, 200]
    waited_ms = [float(re.findall(r"admission;dur=([\d.]+)", timing)[0]) for timing in timings]
    assert max(waited_ms) > LIMIT_S * 500, "both were in flight, with more tokens than may be"
    for body in bodies:
        ask(tight, body)


def test_the_official_client_tries_again_and_is_answered(application: ServedApplication, tight: str) -> None:
    refused = threading.Event()

    def notice(response: httpx.Response) -> None:
        if response.status_code == 503:
            refused.set()

    http = openai.DefaultHttpxClient(event_hooks={"response": [notice]})
    with (
        openai.OpenAI(base_url=tight + "/v1", api_key=KEY, max_retries=20, http_client=http) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        with overloaded(application, [HELLO] * (MAX_WAITING + TOO_MANY)):
            asked = pool.submit(
                client.chat.completions.create, model=MODEL, messages=HELLO["messages"], temperature=0, max_tokens=2
            )
            assert refused.wait(TIMEOUT_S)
        assert asked.result().choices[0].finish_reason == "length"


def test_more_requests_than_the_door_takes(tight: str) -> None:
    """Serve's proxy answers these by itself, so that only the status and Retry-After are ours to choose."""
    url = httpx.URL(tight)
    head = {"Host": url.host, "Content-Length": "100", **WITH_KEY}
    lines = [f"POST {url.path}{CHAT} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
    unfinished = ("\r\n".join(lines) + "\r\n\r\n{").encode()
    with ExitStack() as stack:
        connections = []
        for _ in range(2 * (MAX_AT_THE_DOOR + MAX_WAITING_AT_THE_DOOR)):
            connection = stack.enter_context(socket.create_connection((url.host, url.port)))
            connection.sendall(unfinished)
            connections.append(connection)
        refused, _, _ = select.select(connections, [], [], TIMEOUT_S)
        assert 1 <= len(refused) < len(connections)
        response = HTTPResponse(refused[0])
        response.begin()
        assert response.status == 503
        assert response.headers["retry-after"] == str(RETRY_AFTER_S)
    ask(tight, HELLO)
