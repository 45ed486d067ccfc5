"""Images by http, where the operator has allowed it, from a web server on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from deployments.ingress.http.routes import open_routes
from tests.serve import pictures
from tests.serve.application import FETCH_TIMEOUT_S, MAX_IMAGE_BYTES, MAX_REDIRECTS
from tests.serve.asking import ask, post
from tests.serve.comparison import difference
from tests.serve.conversations import MODEL, Body, about, chat, image, input_image, source_image, text, user
from tests.serve.errors import error_of
from tests.serve.loopback import LoopbackServer
from tests.serve.pictures import data_url, encoded, picture
from tests.serve.vllm_alone import Reference

pytestmark = pytest.mark.slow

FILE = encoded(picture(270, 97, 61), "JPEG")
CHAT = "/v1/chat/completions"


@pytest.fixture
def web() -> Iterator[LoopbackServer]:
    with LoopbackServer(FILE, FILE + bytes(MAX_IMAGE_BYTES)).serving() as server:
        yield server


@pytest.mark.parametrize("path", ["/image", f"/redirect/{MAX_REDIRECTS}"])
def test_a_fetched_image_is_the_image(tight: str, web: LoopbackServer, path: str) -> None:
    fetched = ask(tight, about(web.url + path))
    difference(fetched, ask(tight, about(data_url(FILE, "JPEG"))), tolerance=1e-3)
    assert web.paths[0] == path


def test_fetched_and_sent_images_mix(tight: str, web: LoopbackServer) -> None:
    sent = pictures.url(271)
    body = chat(user(image(sent), image(web.url + "/image"), image(sent), text("Compare.")))
    same = chat(user(image(sent), image(data_url(FILE, "JPEG")), image(sent), text("Compare.")))
    difference(ask(tight, body), ask(tight, same), tolerance=1e-3)
    assert web.paths == ["/image"]


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/large", 413, str(MAX_IMAGE_BYTES)),
        ("/endless", 413, str(MAX_IMAGE_BYTES)),
        ("/status/404", 400, "404"),
        ("/status/500", 400, "500"),
        ("/status/204", 400, "204"),
        ("/slow", 400, f"{FETCH_TIMEOUT_S:g} s"),
        (f"/redirect/{MAX_REDIRECTS + 1}", 400, f"{MAX_REDIRECTS} times"),
        ("/to/file:///etc/passwd", 400, "http"),
        ("/to/data:image/png;base64,AAAA", 400, "fetched"),
        ("/to/http://127.0.0.1:1/", 400, "could not be fetched"),
        ("/to/http://user:secret@127.0.0.1/", 400, "credentials"),
        ("/text", 400, "not an image"),
    ],
)
def test_what_cannot_be_had_is_told(tight: str, web: LoopbackServer, path: str, status: int, told: str) -> None:
    body = chat(user(image(pictures.url(272)), image(web.url + path), text("Compare.")))
    message = error_of(post(tight, CHAT, body), status)["message"]
    assert "image 2 of 2" in message
    assert told in message
    assert web.url not in message
    assert "secret" not in message
    assert web.paths[0] == path


def test_nobody_listens(tight: str) -> None:
    assert "image 1 of 1" in error_of(post(tight, CHAT, about("http://127.0.0.1:1/x.png")), 400)["message"]


def test_nothing_is_fetched_where_it_is_switched_off(qwen3: str, web: LoopbackServer) -> None:
    error_of(post(qwen3, CHAT, about(web.url + "/image")), 400)
    error_of(post(qwen3, "/v1/responses", {"input": [user(input_image(web.url + "/image"))]}), 400)
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        refused = post(qwen3, path, {"messages": [user(source_image(web.url + "/image"))]})
        assert (refused.status_code, refused.json()["type"]) == (400, "error")
    error_of(post(qwen3, "/invocations", about(web.url + "/image")), 404)
    assert web.paths == []


def carriers(url: str) -> list[Body]:
    """Every place where one of vLLM's routes takes, or might take, something to fetch."""
    part, plain = image(url), source_image(url)
    result = {"type": "tool_result", "tool_use_id": "a", "content": [plain]}
    output = {"type": "function_call_output", "call_id": "a", "output": [input_image(url)]}
    screenshot = {"type": "computer_screenshot", "image_url": url}
    inputs = [{"type": "input_image", "image_url": url}, {"type": "input_file", "file_url": url}]
    server = {"type": "mcp", "server_label": "x", "server_url": url, "require_approval": "never"}
    found: list[Body] = [{"messages": [user(content)]} for content in (part, plain, result, *inputs)]
    found += [{"input": [user(content)]} for content in (part, *inputs)]
    found += [
        {"input": [output]},
        {"input": [{"type": "computer_call_output", "call_id": "a", "output": screenshot}]},
        {"messages": [user(text("x"))], "system": [plain]},
        {"messages": [{"role": "assistant", "content": [result]}]},
        {"messages": [user({"type": "document", "source": {"type": "url", "url": url}})]},
        {"input": url},
        {"input": "x", "tools": [server], "tool_choice": "auto"},
        {"input": "x", "prompt": {"id": url}},
        {"messages": [user(text("x"))], "tools": [server]},
        {"messages": [user(text("x"))], "documents": [{"url": url}]},
        {"messages": [user({"type": "audio_url", "audio_url": {"url": url}})]},
        {"messages": [user({"type": "video_url", "video_url": {"url": url}})]},
        {"prompt": "x", "multi_modal_data": {"image": url}},
        {"prompt": url},
        {"text_1": {"content": [part]}, "text_2": {"content": [part]}},
        {"query": {"content": [part]}, "documents": [{"content": [part]}]},
        {"data": {"image": url}, "url": url, "file": url, "model_path": url, "lora_name": "x", "lora_path": url},
        {"messages": [user(text("x"))], "kv_transfer_params": {"do_remote_prefill": True, "remote_host": url}},
        {"messages": [user(text("x"))], "vllm_xargs": {"kv_transfer_params": url, "ec_transfer_params": url}},
    ]
    return found


def test_no_route_of_vllm_fetches_anything(qwen3: str, web: LoopbackServer, reference: Reference) -> None:
    """Each that takes a body, with each thing that could be fetched; once where the body is not even read."""
    paths = [path for path, methods in reference.paths.items() if "POST" in methods]
    assert {"/v1/chat/completions", "/v1/responses", "/invocations"} <= set(paths)
    url = web.url + "/image"
    bodies = [{"model": MODEL, "max_tokens": 2, **body} for body in carriers(url)]
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(post, qwen3, path.replace("{", "").replace("}", ""), body)
            for path in paths
            for body in (bodies if open_routes(path) else bodies[:1])
        ]
    assert {answer.result().status_code for answer in asked} <= {200, 400, 404, 405, 422, 501}
    assert web.paths == []
