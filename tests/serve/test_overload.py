"""What is over the bounds of a queue is refused at once, with the time after which to try again, and harms no one."""

from __future__ import annotations

import select
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse

import httpx
import openai
import pytest

from tests.serve import pictures
from tests.serve.application import (
    MAX_ANSWERING,
    MAX_AT_THE_DOOR,
    MAX_QUEUED,
    MAX_WAITING_AT_THE_DOOR,
    RETRY_AFTER_S,
    ServedApplication,
)
from tests.serve.asking import TIMEOUT_S, ask, chunks, post, streaming
from tests.serve.conversations import MODEL, Body, about, chat
from tests.serve.errors import error_of

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
HELLO = chat({"role": "user", "content": "Hello!"})
LONG = {**HELLO, "max_tokens": 7000, "ignore_eos": True}
BETWEEN_S = 2.0
MOST_ASKED = 20


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
def overloaded(application: ServedApplication, body: Body) -> Iterator[httpx.Response]:
    """Gives a refusal; what was asked before with the same body waits in the queue all the while, and is answered.

    Serve counts a request as waiting once its images are encoded, so each is asked some time after the other.
    """
    with ThreadPoolExecutor(MOST_ASKED) as pool:
        with busy(application):
            waiting: set[Future[httpx.Response]] = set()
            done: set[Future[httpx.Response]] = set()
            while not done and len(waiting) < MOST_ASKED:
                asked = {*waiting, pool.submit(post, application.base_url("tight"), CHAT, body)}
                done, waiting = wait(asked, BETWEEN_S, FIRST_COMPLETED)
            assert done, f"{len(waiting)} wait where {MAX_QUEUED} may"
            yield done.pop().result()
        # A refusal may have been slower than the next one.
        statuses = Counter(answer.result().status_code for answer in waiting)
        assert statuses[200] >= MAX_QUEUED
        assert set(statuses) <= {200, 503}


@pytest.mark.parametrize("body", [HELLO, about(pictures.url(420))], ids=["text", "an image"])
def test_more_than_the_queue_holds(application: ServedApplication, tight: str, body: Body) -> None:
    ask(tight, body)  # an encoder is up
    with overloaded(application, body) as refused:
        assert error_of(refused, 503)["type"] == "overloaded_error"
        assert refused.headers["retry-after"] == str(RETRY_AFTER_S)
    ask(tight, body)


def test_the_official_client_tries_again_and_is_answered(application: ServedApplication, tight: str) -> None:
    refused = threading.Event()

    def notice(response: httpx.Response) -> None:
        if response.status_code == 503:
            refused.set()

    http = openai.DefaultHttpxClient(event_hooks={"response": [notice]})
    with (
        openai.OpenAI(base_url=tight + "/v1", api_key="unused", max_retries=20, http_client=http) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        with overloaded(application, HELLO):
            asked = pool.submit(
                client.chat.completions.create, model=MODEL, messages=HELLO["messages"], temperature=0, max_tokens=2
            )
            assert refused.wait(TIMEOUT_S)
        assert asked.result().choices[0].finish_reason == "length"


def test_more_requests_than_the_door_takes(tight: str) -> None:
    """Serve's proxy answers these by itself, so that only the status and Retry-After are ours to choose."""
    url = httpx.URL(tight)
    unfinished = f"POST {url.path}{CHAT} HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: 100\r\n\r\n{{".encode()
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
