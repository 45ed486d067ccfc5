"""Images by http, where the operator has allowed it, from a web server on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve import pictures
from tests.serve.application import FETCH_TIMEOUT_S, MAX_IMAGE_BYTES, MAX_REDIRECTS
from tests.serve.asking import ask, post
from tests.serve.comparison import difference
from tests.serve.conversations import about, chat, image, text, user
from tests.serve.errors import error_of
from tests.serve.loopback import LoopbackServer
from tests.serve.pictures import data_url, encoded, picture

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
    for path in ("/v1/responses", "/invocations", "/v1/messages"):
        content = [{"type": "input_image", "image_url": web.url + "/image"}]
        assert post(qwen3, path, {"input": [{"role": "user", "content": content}]}).status_code in (404, 501)
    assert web.paths == []
