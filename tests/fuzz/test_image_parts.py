"""Bodies at random through the parsers of all formats: an error of the client's that names its part, or a body in which
every image and sound is a reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.schema import IngressConfig
from deployments.common.api_error import ApiError, anthropic_error, error_head_and_body
from deployments.common.messages import ItemReference, new_key
from deployments.ingress.http.chat_request import ChatRequest
from deployments.ingress.http.image_parts import MEDIA_KEYS, BodyFormat
from tests.fuzz.bodies import BASE64, BODIES, LONG, MESSAGES, parts_in, tool_result
from tests.fuzz.shares import IN_PROCESS

LIMITS = IngressConfig()


def parsed(data: bytes, body_format: BodyFormat) -> tuple[ChatRequest, bytes, set[str]] | ApiError:
    """The request, its body for vLLM, and the keys in it."""
    try:
        chat = ChatRequest.parse([data], LIMITS, body_format=body_format, salt="salt")
        references = [ItemReference(new_key(), 0, image.label) for image in chat.images]
        text, _ = chat.to_json(references, ["0" * 64] * len(references))
    except ApiError as error:
        return error
    return chat, text, {reference.key for reference in references}


def check(data: bytes, body_format: BodyFormat) -> None:
    result = parsed(data, body_format)
    if isinstance(result, ApiError):
        assert result.status in (400, 413)
        json.loads(anthropic_error(result.status, error_head_and_body(result)[1]))
        return
    chat, text, keys = result
    assert all(image.file or image.url for image in chat.images)
    assert all(image.label.endswith("])") for image in chat.images)
    found = set()
    for part in parts_in(json.loads(text), body_format):
        if part.get("type") in {*body_format.value.images, *body_format.value.others}:
            (key,) = keys.intersection(_strings(part))
            found.add(key)
        else:
            assert MEDIA_KEYS.isdisjoint(part)
    assert found == keys


def _strings(value: object) -> set[str]:
    if isinstance(value, dict):
        return {inner for one in value.values() for inner in _strings(one)}
    return {value} if isinstance(value, str) else set()


def test_image_parts(fuzzing: Callable[[float], settings]) -> None:
    @fuzzing(IN_PROCESS["image parts"])
    @given(BODIES, st.sampled_from(BodyFormat), st.sampled_from(["utf-8", "ascii"]))
    @example({"messages": [{"content": [tool_result(BASE64), LONG, LONG]}], "system": []}, MESSAGES, "ascii")
    def fuzz(body: dict[str, Any], body_format: BodyFormat, encoding: str) -> None:
        text = json.dumps(body, ensure_ascii=encoding == "ascii")
        check(text.encode("utf-8", "surrogatepass"), body_format)

    fuzz()
