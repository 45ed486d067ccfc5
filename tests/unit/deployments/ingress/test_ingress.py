"""The front door with replicas that are stand-ins: what is let in, and what is passed on."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RayActorError
from starlette.requests import Request

from deployments.common.api_error import ApiError, error_head_and_body
from deployments.common.messages import ResponseHead
from deployments.ingress import replica_client
from deployments.ingress.http.request_body import MAX_JSON_VALUES
from deployments.routing.affinity import Call
from tests.unit.deployments.samples import png
from tests.unit.deployments.stand_ins import (
    HOST,
    IMAGE,
    JSON_HEAD,
    SSE_HEAD,
    Accepting,
    Pieces,
    StandIns,
    asked,
    chat,
    ingress_of,
    told,
)


def test_text_is_passed_on() -> None:
    stand_ins = StandIns(Pieces(JSON_HEAD, b'{"a":', b"1}"))
    body = (
        b'{"messages": [{"role":"user","content":"\\u00e9 \\ud800"}],  "unknown": [1e400, 1e-7, 12345678901234567890]}'
    )
    response = asked(stand_ins, "POST", "/v1/chat/completions?q=1", content=body)
    assert (response.status_code, response.json()) == (200, {"a": 1})
    (request,) = stand_ins.requests
    assert (json.loads(request.body), request.query_string) == (json.loads(body), b"q=1")
    assert (request.method, request.path, request.root_path) == ("POST", "/v1/chat/completions", "/prefix")
    assert stand_ins.encodings == []


def test_what_was_checked_is_what_is_passed_on() -> None:
    """A name that stands twice: of two parsers, one may take the first and the other the last."""
    image, words = json.dumps([{"role": "user", "content": [IMAGE]}]), '[{"role": "user", "content": "x"}]'
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"):
        stand_ins = StandIns()
        body = f'{{"messages": {image}, "messages": {words}, "input": {image}, "input": "x"}}'
        assert asked(stand_ins, "POST", path, content=body.encode()).status_code == 200
        passed = stand_ins.requests[0].body
        assert passed.count(b'"messages"') == passed.count(b'"input"') == 1
        assert b"image" not in passed


@pytest.mark.parametrize("depth", [*range(900, 1001, 5), 5000])
def test_a_body_that_is_nested_deeply_is_an_answer(depth: int) -> None:
    """Somewhere there, it can be read and no longer be written."""
    body = b'{"messages": [], "x": ' + b"[" * depth + b"]" * depth + b"}"
    assert asked(StandIns(), "POST", "/v1/chat/completions", content=body).status_code in (200, 400)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mm_processor_kwargs": {"trust_remote_code": True}}, "mm_processor_kwargs"),
        ({"mm_processor_kwargs": {"max_pixels": "x"}}, "mm_processor_kwargs"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt_embeds": ["AAAA"]}, "prompt_embeds"),
        ({"media_io_kwargs": {"image": {}}}, "media_io_kwargs"),
        ({"kv_transfer_params": {"remote_host": "x"}}, "kv_transfer_params"),
        ({"ec_transfer_params": {"remote_host": "x"}}, "ec_transfer_params"),
        ({"return_mm_kwargs": True}, "return_mm_kwargs"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"n": 1000}, "n"),
        ({"prompt": ["x"] * 1000}, "n"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"structured_outputs": {"regex": "a|" * 100_000}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_fields_are_refused_or_bounded_on_every_route(path: str, fields: dict[str, Any], param: str) -> None:
    """Without an image too: vLLM reads them all the same."""
    stand_ins = StandIns()
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", **fields}
    assert told(asked(stand_ins, "POST", path, json=body), 400)["param"] == param
    assert stand_ins.requests == []


def test_credentials_and_cookies_stay_here() -> None:
    stand_ins = StandIns()
    headers = {
        "authorization": "Bearer secret",
        "cookie": "a=b",
        "x-request-id": "7",
        "x-vllm-priority": "1",
        "x-amzn-sagemaker-x": "y",
    }
    asked(stand_ins, "GET", "/v1/models", headers=headers)
    names = {name for name, _ in stand_ins.requests[0].headers}
    assert {b"x-request-id", b"x-vllm-priority"} <= names
    assert names <= {b"content-type", b"accept", b"x-request-id", b"x-vllm-priority", b"traceparent", b"tracestate"}


@pytest.mark.parametrize(("length", "status"), [(256, 200), (257, 400)])
def test_a_requests_id_is_bounded(length: int, status: int) -> None:
    """vLLM sends it with every token, and one of 65,536 characters ended its engine."""
    stand_ins = StandIns(*(Pieces(JSON_HEAD, b"{}") for _ in range(2)))
    for headers, more in (({"x-request-id": "x" * length}, {}), ({}, {"request_id": "x" * length})):
        for path in ("/v1/chat/completions", "/v1/responses"):
            body = {"messages": [{"role": "user", "content": "x"}], "input": "x", **more}
            answer = asked(stand_ins, "POST", path, json=body, headers=headers)
            if status == 200:
                assert answer.status_code == status
            else:
                refused = told(answer, 431 if headers else 400)["message"]
                assert "has 257 characters, the limit is 256" in refused


def test_images_become_keys_that_differ_every_time() -> None:
    stand_ins = StandIns()
    response = chat(stand_ins, {"type": "text", "text": "x"}, IMAGE, IMAGE)
    assert "fetch;dur=" in response.headers["server-timing"]
    assert len(stand_ins.encodings) == 1, "the same image twice"
    (references,), (headers,) = stand_ins.references, stand_ins.headers
    assert [reference.item for reference in references] == [0, 0]
    keys = [reference.key for reference in references]
    assert len(set(keys)) == 2
    sent = json.loads(stand_ins.requests[0].body)["messages"][0]["content"]
    assert [part["type"] for part in sent] == ["text", "image_url", "image_url"]
    assert [part["image_url"] for part in sent[1:]] == [{"url": key} for key in keys]
    assert [(header.metadata, header.num_embeds) for header in headers] == [((1, 4, 4), 4)]
    assert b"base64" not in stand_ins.requests[0].body


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/page", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/score", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/invocations", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/ping", 405),
    ],
)
def test_what_is_not_open_is_closed(method: str, path: str, status: int) -> None:
    stand_ins = StandIns()
    error = told(asked(stand_ins, method, path), status)
    assert path in error["message"]
    assert stand_ins.requests == []
    if status == 405:
        assert "allowed are" in error["message"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "must be a JSON object, got list"),
        (b"null", "must be a JSON object, got NoneType"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(content: bytes, reason: str) -> None:
    assert reason in told(asked(StandIns(), "POST", "/v1/chat/completions", content=content), 400)["message"]


@pytest.mark.parametrize("value", [b"[]", b"{}", b"0", b'""', b'{"a":{}}'])
def test_a_body_of_very_many_values_is_refused_unread(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three bytes of JSON become sixty of memory and more: 64 MB of empty lists took gigabytes and seconds."""
    fitting = b'{"input": [' + b",".join([value] * 1000) + b"]}"
    assert asked(StandIns(), "POST", "/v1/responses", content=fitting).status_code == 200
    many = b'{"input": [' + b",".join([value] * (MAX_JSON_VALUES + 1)) + b"]}"
    parsed: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", parsed.append)
        response = asked(StandIns(), "POST", "/v1/responses", content=many)
    error = told(response, 413)
    assert f"the limit is {MAX_JSON_VALUES}" in error["message"]
    assert parsed == []


@pytest.mark.parametrize("depth", [50, 300, 600, 900, 950, 990])
def test_a_body_nested_deeply_is_answered(depth: int) -> None:
    """The parser reads deeper than Python may call; status 500 would be the server's fault."""
    nested = b"[" * depth + b"]" * depth
    image = json.dumps(IMAGE).encode()
    for body in (
        b'{"messages": ' + nested + b"}",
        b'{"input": ' + nested + b"}",
        b'{"messages": [{"role": "user", "content": [' + image + b']}], "tools": ' + nested + b"}",
    ):
        for path in ("/v1/chat/completions", "/v1/responses"):
            assert asked(StandIns(), "POST", path, content=body).status_code in (200, 400, 501)


def test_a_body_over_the_limit_is_refused_before_it_is_whole() -> None:
    body = json.dumps({"messages": [], "pad": "x" * 1000}).encode()
    stand_ins = StandIns()
    for limit, status in ((len(body), 200), (len(body) - 1, 413)):
        response = asked(stand_ins, "POST", "/v1/chat/completions", content=body, limits={"max_body_bytes": limit})
        assert response.status_code == status
    assert f"limit of {len(body) - 1} bytes" in told(response, 413)["message"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "x" * 10**6},
        {"type": "text", "image_url": "y" * 10**6},
        {"type": "image_url", "image_url": {"url": "data:,", "detail": "z" * 10**6}},
    ],
)
def test_what_is_refused_is_not_told_in_full(part: object) -> None:
    """Megabytes that a message quotes would be sent back, and written into logs."""
    assert len(told(chat(StandIns(), part), 400)["message"]) < 1100


@pytest.mark.parametrize("path", ["/v1/completions", "/detokenize"])
def test_images_on_routes_for_text_are_a_501(path: str) -> None:
    stand_ins = StandIns()
    body = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://example.com"}]}]}
    error = told(asked(stand_ins, "POST", path, json=body), 501)
    assert error["code"] == "images_not_supported"
    assert stand_ins.requests == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_embeddings_cannot_be_sent_on_any_route(path: str) -> None:
    stand_ins = StandIns()
    assert told(asked(stand_ins, "POST", path, json={"prompt_embeds": "AAAA"}), 400)["param"] == "prompt_embeds"
    assert stand_ins.requests == []


def test_an_encoder_is_called_by_digest_and_by_what_the_image_costs() -> None:
    """Its cost includes the images before it, behind which the encoder would queue it."""
    stand_ins = Accepting()
    url = "data:image/png;base64," + base64.b64encode(png(64, 32)).decode()
    chat(stand_ins, IMAGE, {"type": "image_url", "image_url": {"url": url}})
    first, second = stand_ins.jobs
    assert [Call.from_session_id(label) for label in stand_ins.labels["encode"]] == [
        Call(first.digest, 4, cost=4, identity=first.identity, host=HOST),
        Call(second.digest, second.num_tokens, cost=4 + second.num_tokens, identity=first.identity, host=HOST),
    ]


def test_a_prompt_is_as_long_as_its_images_each_time_and_a_quarter_of_its_text() -> None:
    stand_ins = StandIns()
    chat(stand_ins, IMAGE, IMAGE, {"type": "text", "text": "x" * 4000})
    (call,) = [Call.from_session_id(label) for label in stand_ins.labels["handle"]]
    assert len(stand_ins.encodings) == 1
    assert 2 * 4 + 1000 <= call.cost < 2 * 4 + 1000 + 300, "and of what JSON has around it"


def test_turns_of_one_conversation_are_called_alike() -> None:
    """With an image or without; another opening, another image or another salt is another conversation."""
    answer, more = {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}

    def key(*messages: object, **fields: Any) -> str:
        stand_ins = StandIns()
        asked(stand_ins, "POST", "/v1/chat/completions", json={"messages": messages, **fields})
        (label,) = stand_ins.labels["handle"]
        call = Call.from_session_id(label)
        assert call.key is not None
        assert call.weight == 1
        return call.key

    system = {"role": "system", "content": "s"}
    other_image = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(png(28)).decode()},
    }
    openings: list[list[object]] = [
        [{"role": "user", "content": "x"}],
        [system, {"role": "user", "content": "x"}],
        [system, {"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}],
        [system, {"role": "user", "content": [{"type": "text", "text": "x"}, other_image]}],
    ]
    assert len({key(*opening) for opening in openings}) == 4
    for opening in openings:
        assert key(*opening) == key(*opening, answer, more) == key(*opening, answer, more, answer, more)
        assert key(*opening) != key(*opening, cache_salt="t")


def test_what_is_no_conversation_goes_to_any_replica() -> None:
    stand_ins = StandIns()
    asked(stand_ins, "GET", "/v1/models")
    asked(stand_ins, "POST", "/v1/completions", json={"prompt": "x"})
    assert [Call.from_session_id(label) for label in stand_ins.labels["handle"]] == [Call(), Call(cost=3)]


def test_a_whole_answer_has_its_length_once() -> None:
    """Passed on piece by piece, its end looked like a client that had left to Serve's proxy."""
    head = ResponseHead(200, [*JSON_HEAD.headers, (b"content-length", b"9")])
    response = chat(StandIns(Pieces(head, b'{"a":', b"1}")), "text")
    assert response.headers.get_list("content-length") == ["7"]
    assert response.json() == {"a": 1}


@pytest.mark.parametrize("head", [JSON_HEAD, SSE_HEAD])
def test_the_end_of_an_answer_that_is_whole_is_not_waited_for(
    head: ResponseHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve counts the call until then, so it is read to its end all the same, or given up."""
    monkeypatch.setattr(replica_client, "DRAIN_TIMEOUT_S", 0.2)
    ended = asyncio.Event()
    answer = Pieces(dataclasses.replace(head, body=b"{}", complete=True), ended)
    stand_ins = StandIns(answer)

    async def scenario() -> None:
        ingress = ingress_of(stand_ins)
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b"", "headers": []}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        response = await asyncio.wait_for(ingress(Request(scope, receive)), 5)
        assert (response.body, dict(response.headers)["content-length"]) == (b"{}", "2")
        (ending,) = ingress._replicas._draining
        assert not ending.done()
        await asyncio.wait_for(ending, 5)
        assert not ingress._replicas._draining

    asyncio.run(scenario())
    assert answer.cancelled


def test_the_beginning_that_comes_with_a_head_is_passed_on() -> None:
    answer = Pieces(dataclasses.replace(SSE_HEAD, body=b"data: 1\n\n"), b"data: 2\n\n")
    assert chat(StandIns(answer), "text", stream=True).text == "data: 1\n\ndata: 2\n\n"
    whole = Pieces(dataclasses.replace(JSON_HEAD, body=b'{"a":'), b"1}")
    assert chat(StandIns(whole), "text").json() == {"a": 1}


def test_a_whole_answer_is_not_cancelled() -> None:
    answer = Pieces(JSON_HEAD, b"{}")
    stand_ins = StandIns(answer)
    chat(stand_ins, IMAGE)
    assert not answer.cancelled
    assert not any(encoding.cancelled for encoding in stand_ins.encodings)


def test_the_description_has_only_what_is_open() -> None:
    paths: dict[str, object] = {
        path: {} for path in ("/v1/chat/completions", "/v1/models", "/invocations", "/v1/messages")
    }
    answer = Pieces(JSON_HEAD, json.dumps({"openapi": "3.1.0", "paths": paths}).encode())
    document = asked(StandIns(answer), "GET", "/openapi.json").json()
    assert document["paths"].keys() == paths.keys() - {"/invocations"}


def test_a_description_that_cannot_be_had_is_explained() -> None:
    for answer in (Pieces(RayActorError()), Pieces(JSON_HEAD, RayActorError())):
        assert told(asked(StandIns(answer), "GET", "/openapi.json"), 503)["code"] == "replica_lost"
    refused = Pieces(*error_head_and_body(ApiError(500, "engine dead")))
    assert told(asked(StandIns(refused), "GET", "/openapi.json"), 500)["message"] == "engine dead"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
PART = st.sampled_from([IMAGE, {"type": "text", "text": "x"}, {"type": "video_url"}]) | VALUES
BODY = st.fixed_dictionaries(
    {
        "messages": st.lists(st.fixed_dictionaries({"content": st.lists(PART, max_size=3)}) | VALUES, max_size=2)
        | VALUES
    },
    optional={"input": VALUES, "mm_processor_kwargs": VALUES, "prompt_embeds": st.none() | VALUES},
)


@settings(max_examples=60)
@given(
    BODY | VALUES,
    st.sampled_from(["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/v1/completions"]),
)
def test_no_body_is_answered_with_500(body: object, path: str) -> None:
    response = asked(StandIns(), "POST", path, content=json.dumps(body))
    assert response.status_code in (200, 400, 501)
