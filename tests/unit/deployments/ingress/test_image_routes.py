"""Images on every route that takes them: one mechanism, and the same rules for each place of an image."""

from __future__ import annotations

import base64
import io
import json
import random
from typing import Any

import pytest
from PIL import Image
from ray.exceptions import RayActorError

from deployments.common.messages import ResponseHead
from deployments.ingress.http.routes import COUNTING
from deployments.routing.affinity import Call
from tests.unit.deployments.samples import png
from tests.unit.deployments.stand_ins import IMAGE, SSE_HEAD, Pieces, StandIns, asked, chat

BASE64 = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}
URL = "data:image/png;base64," + BASE64["data"]
IN_A_RESPONSE = {"type": "input_image", "image_url": URL, "detail": "auto"}
IN_A_MESSAGE = {"type": "image", "source": BASE64}


def image_requests() -> list[tuple[str, dict[str, Any], str]]:
    """A request with the same image at every place that takes one: path, body, and the place's name."""
    source_url = {"type": "image", "source": {"type": "url", "url": URL}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}, IN_A_MESSAGE]}
    output = {"type": "function_call_output", "call_id": "a", "output": [IN_A_RESPONSE]}
    tool = {"role": "tool", "tool_call_id": "a", "content": [IMAGE]}
    return [
        ("/v1/chat/completions", {"messages": [tool]}, "messages[0].content[0]"),
        ("/tokenize", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ("/v1/responses", {"input": [{"role": "user", "content": [IN_A_RESPONSE]}]}, "input[0].content[0]"),
        ("/v1/responses", {"input": [{"role": "user", "content": "x"}, output]}, "input[1].output[0]"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [IN_A_MESSAGE]}]}, "messages[0].content[0]"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [source_url]}]}, "messages[0].content[0]"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [result]}]}, "messages[0].content[0].content[1]"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [IN_A_MESSAGE]}]}, "messages[0]"),
    ]


@pytest.mark.parametrize(("path", "body", "place"), image_requests())
def test_an_image_is_the_same_job_on_every_route_and_becomes_a_key(path: str, body: dict[str, Any], place: str) -> None:
    stand_ins, on_chat = StandIns(), StandIns()
    assert asked(stand_ins, "POST", path, json=body).status_code == 200
    chat(on_chat, IMAGE)
    assert stand_ins.headers == on_chat.headers
    ((reference,),) = stand_ins.references
    assert place in reference.label
    sent = stand_ins.requests[0].body.decode()
    assert f'"{reference.key}"' in sent
    assert "base64" not in sent


@pytest.mark.parametrize(("path", "body", "place"), image_requests())
@pytest.mark.parametrize(
    ("file", "limits", "told"),
    [
        (b"no image", {}, ""),
        (png(280, 280), {"max_visual_tokens_per_image": 50}, "100 visual tokens, the limit is 50"),
        (png(280, 280), {"max_image_pixels": 10_000}, "the limit is 10000"),
        (png(280, 280), {"image_formats": ["JPEG"]}, ""),
        (png(280, 280), {"max_image_bytes": 100}, "the limit is 100"),
    ],
)
def test_a_bad_image_is_refused_by_its_place_on_every_route(
    path: str, body: dict[str, Any], place: str, file: bytes, limits: dict[str, Any], told: str
) -> None:
    stand_ins = StandIns()
    bad = json.dumps(body).replace(BASE64["data"], base64.b64encode(file).decode())
    response = asked(stand_ins, "POST", path, content=bad, limits=limits)
    assert response.status_code == (413 if "max_image_bytes" in limits else 400)
    message = response.json()["error"]["message"]
    assert place in message
    assert told in message
    assert not stand_ins.requests
    assert not stand_ins.encodings


def test_the_quota_counts_visual_tokens_on_every_route_that_encodes() -> None:
    limits = {"rate_limit": {"visual_tokens_per_minute": 3}}
    for path, body, _ in image_requests():
        expected = 200 if path in COUNTING else 429
        assert asked(StandIns(), "POST", path, json=body, limits=limits).status_code == expected


def test_nothing_is_fetched_on_any_route_where_it_is_switched_off() -> None:
    for path, body, _ in image_requests():
        swapped = json.dumps(body).replace(json.dumps(BASE64), '{"type": "url", "url": "http://127.0.0.1/"}')
        response = asked(StandIns(), "POST", path, content=swapped.replace(URL, "http://127.0.0.1/"))
        assert response.status_code == 400
        assert "image 1 of 1" in response.json()["error"]["message"]


@pytest.mark.parametrize("size", [20, 400])
def test_base64_of_anthropics_images_is_not_parsed(size: int) -> None:
    """Whether a file is cut out of the body before it is parsed depends on its length, and nothing else does."""
    file = io.BytesIO()
    noise = random.Random(0).randbytes(size * size * 3)
    Image.frombytes("RGB", (size, size), noise).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    image = {"type": "image", "source": {**BASE64, "data": data}}
    stand_ins, on_chat = StandIns(), StandIns()
    words = {"type": "tool_use", "id": "a", "name": "f", "input": {"data": "x" * 2000}}
    for content in ([image], [image, {"role": "x", **words}]):
        asked(stand_ins, "POST", "/v1/messages", json={"messages": [{"role": "user", "content": content}]})
    assert "x" * 2000 in stand_ins.requests[1].body.decode()
    chat(on_chat, {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}})
    assert stand_ins.headers == [on_chat.headers[0]] * 2


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_on_messages_have_anthropics_format(path: str) -> None:
    unknown = {"messages": [{"role": "user", "content": [{"type": "document"}]}]}
    head = ResponseHead(404, [(b"content-type", b"text/plain"), (b"content-length", b"1"), (b"x-request-id", b"7")])
    of_vllm = json.dumps({"error": {"message": "no model", "type": "NotFoundError", "param": "model", "code": 404}})
    for stand_ins, body, status, kind, message in (
        (
            StandIns(),
            unknown,
            400,
            "invalid_request_error",
            "messages[0].content[0]: a part of type 'document' is not supported",
        ),
        (StandIns(Pieces(head, of_vllm.encode())), {}, 404, "not_found_error", "no model"),
        (StandIns(Pieces(head, b"Not found")), {}, 404, "not_found_error", "the server failed to answer"),
    ):
        response = asked(stand_ins, "POST", path, json=body)
        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
        error = response.json()
        assert error.keys() == {"type", "error"}
        assert (error["type"], error["error"]["type"]) == ("error", kind)
        assert message in error["error"]["message"]
    refused = asked(StandIns(), "GET", path)
    assert (refused.status_code, refused.json()["type"]) == (405, "error")


def test_a_stream_of_messages_that_breaks_off_ends_with_anthropics_event() -> None:
    broken = Pieces(SSE_HEAD, b"event: ping\ndata: {}\n\n", RayActorError())
    *_, event, data = asked(StandIns(broken), "POST", "/v1/messages", json={"messages": []}).text.strip().split("\n")
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_the_salt_goes_with_a_request_beside_its_body(path: str) -> None:
    """vLLM 0.26 does not read `cache_salt` from the bodies of /v1/messages."""
    stand_ins = StandIns()
    asked(stand_ins, "POST", path, json={"messages": [], "input": "x", "cache_salt": "mine"})
    asked(stand_ins, "POST", path, json={"messages": [], "input": "x"})
    assert [request.cache_salt for request in stand_ins.requests] == ["mine", None]


def test_turns_of_a_response_and_of_anthropics_messages_are_called_alike() -> None:
    def key(path: str, **body: Any) -> str | None:
        stand_ins = StandIns()
        asked(stand_ins, "POST", path, json=body)
        return Call.from_session_id(stand_ins.labels["handle"][0]).key

    more = [{"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    for path, field, image in (("/v1/responses", "input", IN_A_RESPONSE), ("/v1/messages", "messages", IN_A_MESSAGE)):
        opening = {"role": "user", "content": [image]}
        first = key(path, **{field: [opening]})
        assert first is not None
        assert key(path, **{field: [opening, *more]}) == first
        assert key(path, **{field: [{"role": "user", "content": "x"}, *more]}) != first
    assert key("/v1/responses", input=more, instructions="a") != key("/v1/responses", input=more, instructions="b")
