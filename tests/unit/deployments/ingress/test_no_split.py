"""Language models that run the tower themselves: the ingress sends them image files, bounded and charged as always."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.common.messages import ImageJob
from deployments.ingress import replica_client
from encoder.images.generic_identity import GenericIdentity
from tests.unit.deployments.ingress.test_deferred import ANSWER, picture, user
from tests.unit.deployments.stand_ins import StandIns, asked, told

TOKENS = 4
"""Of one picture."""
ENGINE = GenericIdentity("checkpoint", "", ((TOKENS,) * 4,) * 4, in_engine=True)


def language_models() -> StandIns:
    stand_ins = StandIns()
    stand_ins.run(ENGINE)
    return stand_ins


def ask(stand_ins: StandIns, path: str = "/v1/chat/completions", **limits: Any) -> Any:
    """Of a conversation with two images, of which one is new and repeated."""
    messages = [user(picture(1)), ANSWER, user(picture(2), picture(2))]
    return asked(stand_ins, "POST", path, json={"messages": messages}, limits=limits)


def test_files_travel_with_the_request_and_no_encoder_is_called() -> None:
    stand_ins = language_models()
    assert ask(stand_ins).status_code == 200
    (files,), (references,), (request,) = stand_ins.given, stand_ins.references, stand_ins.requests
    assert all(isinstance(file, ImageJob) for file in files)
    assert [reference.item for reference in references] == [0, 1, 1]
    assert not stand_ins.encodings
    keys = [
        part["image_url"]["url"]
        for message in json.loads(request.body)["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    assert keys == [reference.key for reference in references]
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("path", "tokens", "status"),
    [
        ("/v1/chat/completions", 3 * TOKENS, 200),
        ("/v1/chat/completions", 3 * TOKENS - 1, 429),
        ("/tokenize", 3 * TOKENS - 1, 429),
    ],
)
def test_all_images_are_charged(path: str, tokens: int, status: int) -> None:
    """vLLM is sent every image. 512 images of an earlier turn once cost nothing."""
    answer = ask(language_models(), path, rate_limit={"visual_tokens_per_minute": tokens})
    assert answer.status_code == status, answer.text


def test_bounds_are_those_of_encoders() -> None:
    error = told(ask(language_models(), max_visual_tokens_per_image=TOKENS - 1), 400)
    assert error["message"] == "image 1 of 3 (messages[0].content[0]) comes to 4 visual tokens, the limit is 3"
    body = {"messages": [user(picture(1))], "mm_processor_kwargs": {"max_pixels": 4096}}
    refused = asked(language_models(), "POST", "/v1/chat/completions", json=body)
    assert told(refused, 400)["param"] == "mm_processor_kwargs"


@pytest.mark.parametrize(("most", "grpc_calls"), [(2**20, 1), (600, 0)])
def test_large_requests_do_not_go_by_grpc(monkeypatch: pytest.MonkeyPatch, most: int, grpc_calls: int) -> None:
    """Serve's replicas refuse gRPC messages over 4 MiB: long texts and many images were a 500."""
    calls = []

    class Counted:
        def __init__(self, answer: Any) -> None:
            calls.append(answer)
            self._answer = answer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._answer, name)

        def __aiter__(self) -> Any:
            return self._answer

        async def __anext__(self) -> Any:
            return await anext(self._answer)

    monkeypatch.setattr(replica_client, "GrpcAnswer", Counted)
    monkeypatch.setattr(replica_client, "MAX_GRPC_BYTES", most)
    stand_ins = language_models()
    assert ask(stand_ins).status_code == 200
    assert len(calls) == grpc_calls
    text = asked(stand_ins, "POST", "/v1/completions", json={"prompt": "x" * 601})
    assert text.status_code == 200
    assert len(calls) == 2 * grpc_calls
