"""What is logged of a request: that it came, and how it ended; not its words, its pictures, its keys."""

from __future__ import annotations

import base64
import json
import uuid

import httpx
import pytest

from tests.hostile.files import chunk, png_with
from tests.serve.application import ServedApplication
from tests.serve.asking import TIMEOUT_S
from tests.serve.conversations import MODEL, Body, about, chat, image, text, user
from tests.serve.pictures import data_url, url
from tests.waiting import until

pytestmark = pytest.mark.slow

SECRET = "velvet-otter-4711"
CHAT = "/v1/chat/completions"


def picture(whole: bool = True) -> str:
    """A picture that carries the secret, in base64 as any other."""
    file = png_with(chunk(b"tEXt", b"Title\0" + SECRET.encode() * 9))
    return data_url(file if whole else file[: len(file) // 2])


def requests() -> dict[str, tuple[str, Body | bytes]]:
    """Answered, refused here, refused by vLLM, refused by the decoder, and no requests at all."""
    words = user(image(picture()), text(f"Who is {SECRET}?"))
    return {
        "answered": (CHAT, chat(words)),
        "streamed": (CHAT, chat(words, stream=True)),
        "text": ("/v1/completions", {"model": MODEL, "prompt": SECRET, "max_tokens": 2}),
        "a response": ("/v1/responses", {"model": MODEL, "input": SECRET, "max_output_tokens": 2}),
        "counted": ("/tokenize", {"model": MODEL, "messages": [words]}),
        "another model": (CHAT, {**chat(words), "model": "gpt-none"}),  # vLLM logs that name
        "refused by vllm": (CHAT, chat(words, n=2)),
        "a role of its own": (CHAT, chat({"role": SECRET, "content": SECRET})),
        "messages that are none": (CHAT, {"model": MODEL, "messages": SECRET}),
        "a type that is none": (CHAT, chat(words, temperature=SECRET, max_tokens=SECRET)),
        "a tool that is none": (CHAT, chat(words, tools=[{"type": SECRET}])),
        "a template of its own": (CHAT, chat(words, chat_template="{{ " + SECRET + " }}")),
        "a schema that is none": (CHAT, chat(words, structured_outputs={"regex": f"({SECRET}"})),
        "half a picture": (CHAT, about(picture(whole=False), SECRET)),
        "no url": (CHAT, about(SECRET, SECRET)),
        "a key": (CHAT, chat(user({"type": "image_embeds", "image_embeds": SECRET}))),
        "no json": (CHAT, b'{"messages": ' + SECRET.encode()),
        "a route that is closed": ("/invocations", chat(words)),
    }


def test_nothing_of_a_request_is_in_any_log(application: ServedApplication, qwen3: str) -> None:
    identifiers = []
    for path, body in requests().values():
        identifier = uuid.uuid4().hex
        headers = {
            "x-request-id": identifier,
            "content-type": "application/json",
            "authorization": f"Bearer {SECRET}",
            "cookie": f"session={SECRET}",
            "x-other": SECRET,
        }
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = httpx.post(f"{qwen3}{path}?key={SECRET}", content=content, headers=headers, timeout=TIMEOUT_S)
        assert answer.status_code < 500
        identifiers.append(identifier.encode())
    logs = b""

    def all_are_there() -> bool:
        nonlocal logs
        logs = application.logs()
        return all(identifier in logs for identifier in identifiers)

    until(all_are_there)
    assert b"POST /qwen3" in logs or CHAT.encode() in logs
    hidden = [SECRET.encode()]
    hidden += [base64.b64encode(bytes(shift) + SECRET.encode() * 9)[8:48] for shift in range(3)]
    assert any(secret in picture().encode() for secret in hidden)
    for line in logs.splitlines():
        assert not any(secret in line for secret in hidden), line[:2000]


def test_every_replicas_log_file_tells_what_it_was_asked(application: ServedApplication, qwen3: str) -> None:
    """vLLM sets up logging for the process that it is imported into, which took the language model's file from Serve's
    buffer: it kept a record of every request, 2.8 KB each, and wrote none."""
    identifiers = [uuid.uuid4().hex for _ in range(3)]
    for seed, identifier in enumerate(identifiers, 700):  # of a picture that is known no encoder is asked
        headers = {"x-request-id": identifier}
        answer = httpx.post(qwen3 + CHAT, json=about(url(seed)), headers=headers, timeout=TIMEOUT_S)
        assert answer.status_code == 200
    for deployment in ("Ingress", "Encoder", "LLM"):
        until(lambda name=deployment: all(one in application.log_file("qwen3", name) for one in identifiers))  # type: ignore[misc]
