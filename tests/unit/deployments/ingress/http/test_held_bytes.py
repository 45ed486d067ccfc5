"""The bound on the bytes that requests hold at an ingress: what is counted, what is refused, and that all is given up.

Nothing bounded them: bodies were read before admission, and body, base64 text and files lived until the answer ended.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import gc
import inspect
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from ray.exceptions import RayActorError
from starlette.requests import Request

from deployments.common.api_error import OverloadedError, Shed
from deployments.common.messages import Accepted, ImageJob, ResponseHead
from deployments.ingress.http.held_bytes import Held, HeldBytes
from deployments.telemetry.metrics import AdmissionMetrics
from tests.serve.pictures import encoded
from tests.unit.deployments.ingress.fetch.loopback import OPEN, answer, serving
from tests.unit.deployments.ingress.test_overload import AtWork, settled
from tests.unit.deployments.stand_ins import JSON_HEAD, RETRY_AFTER_S, SSE_HEAD, Pieces, StandIns, ingress_of, told

FILE = encoded(Image.frombytes("RGB", (320, 320), random.Random(0).randbytes(320 * 320 * 3)))
PICTURE = {
    "type": "image_url",
    "image_url": {"url": "data:image/png;base64," + base64.b64encode(FILE).decode()},
}
BODY = json.dumps({"messages": [{"role": "user", "content": [PICTURE]}]}).encode()
CHAT = "/v1/chat/completions"


async def begun(at_work: AtWork) -> None:
    """A language model has been asked."""
    while not at_work.stand_ins.requests:  # noqa: ASYNC110 - a thread and a server take part
        await asyncio.sleep(0.001)


class Recorded(AdmissionMetrics):
    def __init__(self) -> None:
        self.num_bytes = 0
        self.shed_for: list[Shed] = []

    def bytes_held(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def shed(self, reason: Shed, tokens: int) -> None:
        self.shed_for.append(reason)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["add", "become", "leave"]), st.integers(0, 60))))
def test_what_is_counted_is_what_requests_hold(steps: list[tuple[int, str, int]]) -> None:
    events = Recorded()
    all_held = HeldBytes(100, events, max_fetched_bytes=100, retry_after_s=lambda: 3)
    expected = dict.fromkeys(range(4), 0)
    refused = 0
    with ExitStack() as stack:
        requests: list[Held] = [stack.enter_context(all_held.request()) for _ in expected]
        for number, step, num_bytes in steps:
            wanted = {"add": expected[number] + num_bytes, "become": num_bytes, "leave": 0}[step]
            grows = wanted > expected[number]
            if grows and sum(expected.values()) - expected[number] + wanted > 100:
                with pytest.raises(OverloadedError):
                    requests[number].resize(wanted)
                refused += 1
            else:
                requests[number].resize(wanted)
                expected[number] = wanted
            assert all_held.num_bytes == events.num_bytes == sum(expected.values()) <= 100
    assert all_held.num_bytes == events.num_bytes == 0
    assert events.shed_for == [Shed.BYTES] * refused


def test_a_body_over_the_bound_is_a_503_and_the_others_are_answered() -> None:
    async def scenario() -> None:
        at_work = AtWork(1, max_bytes_held=len(BODY) + 1000, max_body_bytes=len(BODY))
        first = asyncio.create_task(at_work._client.post(CHAT, content=BODY))
        await begun(at_work)
        held = at_work.ingress._held_bytes
        assert len(FILE) <= held.num_bytes < len(FILE) + 1000, "the base64 text counts no more"
        refused = await at_work._client.post(CHAT, content=BODY)
        error = told(refused, 503)
        assert (error["type"], error["code"]) == ("overloaded_error", "overloaded")
        assert f"would pass {len(BODY) + 1000}" in error["message"]
        assert refused.headers["retry-after"] == str(RETRY_AFTER_S)
        assert at_work.shed == {("bytes_held", 0): 1}
        at_work.held[0].free.set()
        assert (await first).status_code == 200
        assert held.num_bytes == 0
        assert (await at_work._client.post(CHAT, content=BODY)).status_code == 200
        assert held.num_bytes == 0

    asyncio.run(scenario())


def test_texts_are_given_up_once_the_files_are_there() -> None:
    """While the answer is made, of an image only its file is left."""

    async def scenario() -> None:
        at_work = AtWork(1)
        task = asyncio.create_task(at_work._client.post(CHAT, content=BODY))
        await begun(at_work)
        largest = [_largest(variables) for variables in _frames(at_work.ingress)]
        assert max(largest) == len(FILE), "a method of the ingress holds the body or its text"
        at_work.held[0].free.set()
        await task

    asyncio.run(scenario())


@pytest.mark.parametrize("head", [JSON_HEAD, SSE_HEAD], ids=["whole", "stream"])
def test_files_count_while_a_request_may_be_tried_again(head: ResponseHead) -> None:
    """Another attempt sends them to an encoder: until a whole answer has come, or a stream has begun."""

    async def scenario() -> None:
        at_work = AtWork(1)
        begins, ends = asyncio.Event(), asyncio.Event()
        at_work.held[0]._pieces = [Accepted(), begins, head, ends, b"{}"]
        task = asyncio.create_task(at_work._client.post(CHAT, content=BODY))
        await begun(at_work)
        await settled()
        held = at_work.ingress._held_bytes
        assert at_work.waiting == (0, 0, 0), "a language model has accepted it"
        assert len(FILE) <= held.num_bytes < len(FILE) + 1000
        begins.set()
        await settled()
        assert (held.num_bytes == 0) is (head is SSE_HEAD)
        ends.set()
        assert (await task).status_code == 200
        assert held.num_bytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("lost_at", [0, 1], ids=["before its head", "in its body"])
def test_files_are_encoded_again_for_another_attempt(monkeypatch: pytest.MonkeyPatch, lost_at: int) -> None:
    """Its language model is lost after it has accepted the request, and the embeddings with it."""
    monkeypatch.setattr("deployments.ingress.attempt.FIRST_RETRY_DELAY_S", 0.0)
    lost: list[object] = [Accepted(), JSON_HEAD, b"{"]

    async def scenario() -> list[object]:
        at_work = AtWork(1)
        at_work.held[0]._pieces = [*lost[: 1 + 2 * lost_at], RayActorError()]
        assert (await at_work._client.post(CHAT, content=BODY)).status_code == 200
        return [job for encoding in at_work.stand_ins.encodings for job in encoding._pieces]

    jobs = asyncio.run(scenario())
    assert [type(job) for job in jobs] == [ImageJob, ImageJob]
    assert all(isinstance(job, ImageJob) and job.data == FILE for job in jobs)


def _frames(ingress: object) -> Iterator[dict[str, object]]:
    """The variables of the ingress' methods that are under way."""
    for found in gc.get_objects():
        frame = found.cr_frame if inspect.iscoroutine(found) else None
        if frame is not None and frame.f_locals.get("self") is ingress:
            yield frame.f_locals


def _largest(variables: dict[str, object]) -> int:
    """Bytes or characters of the longest text below the variables."""
    longest, waiting = 0, [value for name, value in variables.items() if name != "self"]
    while waiting:
        value = waiting.pop()
        if isinstance(value, bytes | str):
            longest = max(longest, len(value))
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
        elif dataclasses.is_dataclass(value):
            waiting.extend(getattr(value, field.name) for field in dataclasses.fields(value))
    return longest


def test_files_count_while_they_are_fetched_and_once() -> None:
    async def scenario() -> None:
        async with serving(answer(FILE)) as server:
            fetch = OPEN.model_dump()
            at_work = AtWork(1, fetch=fetch)
            body = {
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": server.url}}]}]
            }
            task = at_work.ask(body)
            await begun(at_work)
            held = at_work.ingress._held_bytes
            assert len(FILE) < held.num_bytes < len(FILE) + 1000
            at_work.held[0].free.set()
            assert (await task).status_code == 200
            assert held.num_bytes == 0
            narrow = AtWork(0, fetch=fetch, max_bytes_held=len(FILE), max_body_bytes=1000)
            assert "would pass" in told(await narrow.asked(body), 503)["message"]
            assert narrow.ingress._held_bytes.num_bytes == 0
            one = AtWork(0, fetch={**fetch, "max_bytes_per_request": len(FILE)})
            body["messages"] *= 2  # five hundred of earlier turns could fill the memory of all requests
            error = told(await one.asked(body), 413)
            assert f"over the limit of {len(FILE)} fetched bytes" in error["message"]
            assert one.ingress._held_bytes.num_bytes == 0

    asyncio.run(scenario())


ENDS = {
    "answered": [JSON_HEAD, b"{}"],
    "streamed": [SSE_HEAD, b"data: 1\n\n", b"data: 2\n\n"],
    "failed": [RuntimeError("a fault")],
    "lost": [RayActorError()],
    "lost once accepted": [Accepted(), RayActorError()],
}


@pytest.mark.parametrize("pieces", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize(
    "body",
    [BODY, b"{", b"[" * 1000, BODY.replace(b"iVBOR", b"!!!!!"), BODY.replace(b"user", b"user" * 1000)],
    ids=["an image", "no JSON", "deep", "no base64", "long"],
)
def test_nothing_stays_counted(body: bytes, pieces: list[Any]) -> None:
    async def scenario() -> None:
        stand_ins = StandIns(*(Pieces(*pieces) for _ in range(5)))
        ingress = ingress_of(stand_ins)
        with contextlib.suppress(RuntimeError):  # the fault, which Serve answers with status 500
            await ingress(_request([body[:1000], body[1000:]]))
        assert ingress._held_bytes.num_bytes == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deployments.ingress.attempt.FIRST_RETRY_DELAY_S", 0.0)
        asyncio.run(scenario())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 120), st.booleans())
def test_nothing_stays_counted_after_a_client_that_leaves(steps: int, by_disconnect: bool) -> None:
    """At whatever step of its request it leaves, while the body comes or later."""

    async def scenario() -> None:
        ingress = ingress_of(StandIns(Pieces(asyncio.Event(), JSON_HEAD)))
        messages = [BODY[at : at + 40_000] for at in range(0, len(BODY), 40_000)]
        if by_disconnect:
            asked = asyncio.create_task(ingress(_request(messages[: steps % len(messages)], left=True)))
            assert (await asked).status_code == 400
        else:
            asked = asyncio.create_task(ingress(_request(messages)))
            for _ in range(steps):
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
        assert ingress._held_bytes.num_bytes == 0

    asyncio.run(scenario())


def _request(chunks: list[bytes], left: bool = False) -> Request:
    """One whose body comes in chunks; `left`: its client leaves after them."""
    waiting: list[dict[str, Any]] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    waiting.append({"type": "http.disconnect"} if left else {"type": "http.request", "body": b"", "more_body": False})
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        if not waiting:
            await never.wait()
        return waiting.pop(0)

    headers = [(b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}
    return Request(scope, receive)
