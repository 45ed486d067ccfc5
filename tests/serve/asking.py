"""Requests over HTTP, and the answers to all of them at once.

Every request carries a key; a server that wants none does not look at it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.serve.comparison import assembled
from tests.serve.conversations import IMAGE_REQUESTS, MODEL, TEXT_REQUESTS, Body, Conversation

TIMEOUT_S = 300.0
CONCURRENT = 8
SETTLED_S = 10.0
"""More than two of the intervals in which replicas report metrics, four seconds."""
SETTLED_PAUSE_S = 2.0
"""Between two looks: Ray's agent takes up to half a second of a core to show all metrics of a cluster."""
KEY, OTHER_KEY = "the-key-that-all-tests-share", "the-key-of-another-client"
OTHER_ROUTES = {**TEXT_REQUESTS, **IMAGE_REQUESTS}
WITH_KEY = {"authorization": f"Bearer {KEY}"}
Json = Any


@dataclass(frozen=True)
class Answers:
    """What a server answered, by the names of the requests. `result()` raises where the answer was an error."""

    whole: dict[str, Future[Json]]
    streamed: dict[str, Future[Json]]
    """Put together from their chunks, the one with the usage included."""
    tokenized: dict[str, Future[Json]]
    other_routes: dict[str, Future[Json]]


def post(base_url: str, path: str, body: Body, headers: Mapping[str, str] | None = None) -> httpx.Response:
    return httpx.post(base_url + path, json=body, headers={**WITH_KEY, **(headers or {})}, timeout=TIMEOUT_S)


def ask(base_url: str, body: Body, path: str = "/v1/chat/completions") -> Json:
    """The answer's body; AssertionError where it is an error."""
    response = post(base_url, path, body)
    assert response.status_code == 200, f"{response.status_code}: {response.text[:1000]}"
    return response.json()


@contextmanager
def streaming(base_url: str, body: Body) -> Iterator[httpx.Response]:
    """A streamed chat answer, to be read or to be left."""
    path = base_url + "/v1/chat/completions"
    asked = {**body, "stream": True}
    with httpx.stream("POST", path, json=asked, headers=WITH_KEY, timeout=TIMEOUT_S) as response:
        if response.status_code != 200:
            raise AssertionError(f"{response.status_code}: {response.read().decode()[:1000]}")
        yield response


def chunks(response: httpx.Response) -> Iterator[Json]:
    """The chunks of a streamed answer as they arrive; AssertionError unless the stream ends as OpenAI's do."""
    done = False
    for line in response.iter_lines():
        assert not done or not line, f"after the end: {line!r}"
        if line == "data: [DONE]":
            done = True
        elif line:
            assert line.startswith("data: "), line
            yield json.loads(line.removeprefix("data: "))
    assert done, "the stream ended without [DONE]"


def ask_streamed(base_url: str, body: Body) -> list[Json]:
    with streaming(base_url, body) as response:
        return list(chunks(response))


def metric(base_url: str, name: str) -> float:
    """The sum of a metric of vLLM over its labels."""
    lines = httpx.get(base_url + "/metrics", headers=WITH_KEY, timeout=TIMEOUT_S).text.splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " "))]
    assert values, f"no metric {name}"
    return sum(values)


def reaches(value: Callable[[], float], expected: float) -> None:
    """Waits until a metric has this value; fails with the one that it has instead."""
    deadline = time.monotonic() + TIMEOUT_S
    while (now := value()) != expected:
        assert time.monotonic() < deadline, f"{expected:g} expected, and it is {now:g}"
        time.sleep(0.5)


def settled(value: Callable[[], float]) -> float:
    """A metric's value once it has been the same for SETTLED_S: until then, earlier requests may still be added to it,
    and would look like those of the test."""
    return settled_together(value)[0]


def settled_together(*values: Callable[[], float]) -> list[float]:
    """The same of several metrics, in the time of one."""
    seen, since = [value() for value in values], time.monotonic()
    while time.monotonic() < since + SETTLED_S:
        time.sleep(SETTLED_PAUSE_S)
        if (now := [value() for value in values]) != seen:
            seen, since = now, time.monotonic()
    return seen


def collect(base_url: str, conversations: Sequence[Conversation]) -> Answers:
    """Puts every request to a server, several at a time, images and text mixed, and counts tokens of messages last.

    `/v1/messages/count_tokens` of vLLM 0.32 puts images into the frontend's half of its processor cache, and not into
    the engine's: the next request with such an image fails with status 500.
    """

    def whole_of_streamed(body: Body) -> Json:
        return assembled(ask_streamed(base_url, {**body, "stream_options": {"include_usage": True}}))

    def asked(counts: bool) -> dict[str, Future[Json]]:
        return {
            name: pool.submit(ask, base_url, body, path)
            for name, (path, body) in OTHER_ROUTES.items()
            if path.endswith("/count_tokens") == counts
        }

    with ThreadPoolExecutor(CONCURRENT) as pool:
        answers = Answers(
            {c.name: pool.submit(ask, base_url, c.body) for c in conversations},
            {
                c.name: pool.submit(whole_of_streamed, c.body)
                for c in conversations
                if "prompt_logprobs" not in c.body  # vLLM does not stream those
            },
            {c.name: pool.submit(ask, base_url, _to_tokenize(c.body), "/tokenize") for c in conversations},
            asked(counts=False),
        )
        wait(answers.other_routes.values())
        answers.other_routes.update(asked(counts=True))
        return answers


def _to_tokenize(body: Body) -> Body:
    """What /tokenize needs of a chat request."""
    kept = (
        *("messages", "tools", "mm_processor_kwargs", "media_io_kwargs"),
        *("continue_final_message", "add_generation_prompt"),
    )
    return {"model": MODEL, **{key: body[key] for key in kept if key in body}}
