"""Requests at random through the front door, its replicas being stand-ins: no status 500, and nothing passes that would
let vLLM fetch or that names an embedding of the client's own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from deployments.common.messages import KEY_PREFIX
from deployments.ingress.http.image_parts import MEDIA_KEYS
from deployments.ingress.http.routes import ROUTES, Service
from tests.fuzz.bodies import BODIES, INPUT_IMAGE, parts_in
from tests.fuzz.shares import IN_PROCESS, OVER_HTTP
from tests.hostile.ingress_server import serving, started
from tests.unit.deployments.ingress.responses.stored import RESPONSES, Responding, StoreHandle, about, conversed, id_of
from tests.unit.deployments.stand_ins import IMAGE, StandIns, ingress_of

pytestmark = pytest.mark.usefixtures("certificates_read_once")
KEY = f'"{KEY_PREFIX}[^"]*"'
REFERENCE = re.compile(
    rf"""{{"type": "image_url", "image_url": {{"url": {KEY}}}}}|"""
    rf"""{{"type": "(audio|video)_url", "(audio|video)_url": {{"url": {KEY}}}}}|"""
    rf"""{{"type": "input_image", "image_url": {KEY}, "detail": "auto"}}|"""
    rf"""{{"type": "image", "source": {{"type": "url", "url": {KEY}}}}}"""
)
ANSWERS = {200, 400, 401, 404, 405, 413, 431, 501}
FORMATS = {route.path: route.body_format for route in ROUTES if route.service is Service.IMAGES}
PATHS = (*FORMATS, "/v1/completions", "/detokenize", "/ping")
NAMES = sorted(
    MEDIA_KEYS | {"type", "text", "content", "role", "url", "detail", "uuid", "cache_salt", "messages", "input"}
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.sampled_from(NAMES),
    st.sampled_from(["http://169.254.169.254/", "data:,x", "file:///etc/passwd", KEY_PREFIX + "x" * 22]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=3)), inner, max_size=4)
    ),
    max_leaves=12,
)
KINDS = ["image_url", "input_image", "image_embeds", "text", "video_url", "file", "input_audio", "refusal", "x"]
PART = st.one_of(
    st.just(IMAGE),
    st.fixed_dictionaries(
        {"type": st.sampled_from(KINDS)},
        optional={"image_url": VALUES, "text": VALUES, "uuid": VALUES, "detail": VALUES},
    ),
    VALUES,
)
MESSAGE = st.one_of(st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(PART, max_size=3)}), VALUES)
BODY = st.one_of(
    BODIES,
    st.fixed_dictionaries(
        {"messages": st.one_of(st.lists(MESSAGE, max_size=3), VALUES)},
        optional=dict.fromkeys(
            ("input", "prompt", "mm_processor_kwargs", "prompt_embeds", "cache_salt", "kv_transfer_params"), VALUES
        ),
    ),
    VALUES,
)


def in_messages(stand_ins: StandIns, path: str) -> None:
    """Media that reach vLLM are references, in the form of the route and with nothing beside them."""
    for request in stand_ins.requests:
        if request.body and path in FORMATS:
            for part in parts_in(json.loads(request.body), FORMATS[path]):
                if part.get("type") in {*FORMATS[path].value.images, *FORMATS[path].value.others}:
                    assert REFERENCE.fullmatch(json.dumps(part))
                else:
                    assert MEDIA_KEYS.isdisjoint(part)


def asked(path: str, body: bytes) -> tuple[int, StandIns]:
    stand_ins = StandIns()

    async def ask() -> int:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "root_path": ""}
        return (await ingress_of(stand_ins)(Request(scope, receive))).status_code

    return asyncio.run(ask()), stand_ins


def test_bodies(fuzzing: Callable[[float], settings]) -> None:
    @fuzzing(IN_PROCESS["bodies"])
    @given(st.sampled_from(PATHS), BODY)
    @example("/v1/chat/completions", {"messages": [{"content": [{"type": "text", "image_url": "http://127.0.0.1"}]}]})
    def fuzz(path: str, body: object) -> None:
        status, stand_ins = asked(path, json.dumps(body).encode())
        assert status in ANSWERS
        in_messages(stand_ins, path)

    fuzz()


def test_conversations_that_are_stored(fuzzing: Callable[[float], settings]) -> None:
    """Two turns, of which the second names the first if that was stored, and all that can be asked of them."""
    handle = StoreHandle()
    reads = [about("GET", of=1), about("GET", "/input_items", of=1), about("DELETE", of=1)]

    @fuzzing(IN_PROCESS["conversations that are stored"])
    @given(BODIES, BODIES, st.text(max_size=4))
    @example({"input": [{"content": [INPUT_IMAGE]}]}, {"input": "x"}, "")
    def fuzz(first: dict[str, Any], second: dict[str, Any], name: str) -> None:
        stand_ins = Responding()
        (made,) = conversed(handle, stand_ins, ("POST", RESPONSES, {"content": json.dumps(first)}))
        assert made.status_code in ANSWERS | {404}
        is_stored = made.status_code == 200 and first.get("store") is not False
        second = {**second, "store": True, "previous_response_id": id_of(made) if is_stored else name}
        continued = ("POST", RESPONSES, {"content": json.dumps(second)})
        (again,) = conversed(handle, stand_ins, continued)
        assert again.status_code in (ANSWERS if is_stored else ANSWERS | {404})
        in_messages(stand_ins, RESPONSES)
        if again.status_code == 200:
            found = conversed(handle, stand_ins, continued, continued, *reads)[2:]
            assert [response.status_code for response in found] == [200] * 3
            assert len(found[1].json()["data"]) == len(stand_ins.bodies[-1]["input"])

    fuzz()


def test_bodies_that_are_hardly_json(fuzzing: Callable[[float], settings]) -> None:
    whole = json.dumps({"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "x"}]}]}).encode()

    @fuzzing(IN_PROCESS["bodies that are hardly json"])
    @given(st.integers(0, len(whole)), st.binary(max_size=5), st.integers(0, 5))
    def fuzz(position: int, put: bytes, out: int) -> None:
        status, _ = asked(PATHS[0], whole[:position] + put + whole[position + out :])
        assert status in ANSWERS

    fuzz()


def test_over_http(fuzzing: Callable[[float], settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths, methods and headers too, over a real server; a good request is answered after each."""
    header = st.tuples(
        st.one_of(
            st.sampled_from(["authorization", "content-type", "accept-encoding", "expect", "x-request-id", "origin"]),
            st.from_regex(r"[a-z-]{1,20}", fullmatch=True),
        ),
        st.one_of(st.binary(max_size=40), st.integers(0, 40_000).map(lambda n: b"x" * n)),
    )
    path = st.one_of(
        st.sampled_from([*PATHS, "/metrics", "/health", "/v1/models", "/invocations"]),
        st.text(max_size=12).map(lambda text: "/" + text),
        st.lists(st.sampled_from(["v1", "..", "", "%2e", "chat", "completions"]), max_size=5).map(
            lambda p: "/" + "/".join(p)
        ),
    )
    method = st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE"])

    async def ask(client: Any, *request: Any) -> int:
        try:
            method_, path_, headers, body = request
            answer = await client.request(method_, path_, headers=headers, content=json.dumps(body).encode())
            status = int(answer.status_code)
        except (httpx.InvalidURL, httpx.LocalProtocolError, UnicodeError):
            status = 400  # no client would send it
        assert (await client.get("/v1/models")).status_code == 200
        return status

    with asyncio.Runner() as runner:
        manager = serving(started(monkeypatch, StandIns(), mode="none"))
        client = runner.run(manager.__aenter__())

        @fuzzing(OVER_HTTP["requests"])
        @given(st.tuples(method, path, st.lists(header, max_size=4), BODY))
        def fuzz(request: tuple[Any, ...]) -> None:
            assert runner.run(ask(client, *request)) in ANSWERS

        try:
            fuzz()
        finally:
            runner.run(manager.__aexit__(None, None, None))
