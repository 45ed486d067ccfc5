"""Without encoders (`encoder.implementation: none`), language models run vLLM's own tower on the files that the ingress
sends them, and answer as vLLM alone does on every route.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.programs import free_port
from tests.serve import pictures
from tests.serve.application import ARCHITECTURES, ServedApplication, application_settings
from tests.serve.asking import OTHER_ROUTES, Answers, Json, ask, collect, metric, post
from tests.serve.comparison import difference, first_token_shift
from tests.serve.conversations import (
    CONVERSATIONS,
    SEVERAL_BLOCKS,
    about,
    chat,
    image,
    input_image,
    source_image,
    text,
    user,
)
from tests.serve.pictures import data_url, encoded, picture
from tests.serve.vllm_alone import Reference

TOLERANCE = 1e-3
OTHER_IMAGE = 10 * TOLERANCE
ASKED = [c for c in CONVERSATIONS if "mm_processor_kwargs" not in c.body and not c.has_videos]
TRUNCATED = data_url(encoded(picture(401, 97, 61))[:-300])
LARGE_SIDE = 1200
"""Of a square BMP of over 4 MiB."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def no_split(
    reference: Reference, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedApplication]:
    """The application, once vLLM alone has ended."""
    applications = []
    for name in ARCHITECTURES:
        made = application_settings(name, checkpoints[name], dtype="float32", ingress={}, deployments=[])
        made["args"]["encoder"] = {"implementation": "none"}
        applications.append(made)
    settings = {"http_options": {"host": "127.0.0.1", "port": free_port()}, "applications": applications}
    with ServedApplication(settings, folder=tmp_path_factory.mktemp("no_split")) as application:
        yield application


@pytest.fixture(scope="module")
def found(no_split: ServedApplication) -> dict[str, Answers]:
    return {name: collect(no_split.base_url(name), ASKED) for name in ARCHITECTURES}


@pytest.fixture
def url(no_split: ServedApplication) -> str:
    """For what does not depend on the architecture."""
    return no_split.base_url("qwen3")


def test_answers_are_those_of_vllm_alone(
    found: dict[str, Answers], reference: Reference, arch: str, measured: dict[str, float]
) -> None:
    ours, theirs = found[arch], reference.answers[arch]
    largest = 0.0
    for one in ASKED:
        whole = ours.whole[one.name].result()
        largest = max(largest, difference(whole, theirs.whole[one.name].result(), tolerance=TOLERANCE, where=one.name))
    measured[f"{arch}, no split, largest difference (tolerance {TOLERANCE:g})"] = largest


def test_streamed_answers_are_those_of_vllm_alone(found: dict[str, Answers], reference: Reference, arch: str) -> None:
    for name, streamed in found[arch].streamed.items():
        theirs = reference.answers[arch].streamed[name].result()
        difference(streamed.result(), theirs, tolerance=TOLERANCE, where=name)


def test_other_routes_and_counted_tokens_are_those_of_vllm_alone(
    found: dict[str, Answers], reference: Reference, arch: str
) -> None:
    for one in ASKED:
        theirs = reference.answers[arch].tokenized[one.name].result()
        assert found[arch].tokenized[one.name].result() == theirs, one.name
    for name in OTHER_ROUTES:
        theirs = reference.answers[arch].other_routes[name].result()
        difference(found[arch].other_routes[name].result(), theirs, tolerance=TOLERANCE, where=name)


def test_another_image_gives_another_answer(url: str) -> None:
    one, other = (ask(url, about(pictures.url(seed, 97, 61))) for seed in (410, 411))
    assert first_token_shift(one, other) > OTHER_IMAGE


def test_an_image_whose_tokens_were_counted_is_still_sent_to_the_engine(url: str) -> None:
    """vLLM alone answers the second request with a 500."""
    counted = {"model": "tiny", "messages": [user(source_image(pictures.url(418, 97, 61)))]}
    assert ask(url, counted, "/v1/messages/count_tokens")["input_tokens"] > 0
    assert ask(url, about(pictures.url(418, 97, 61)))["choices"]


def test_a_conversation_that_goes_on_finds_its_prefix(url: str) -> None:
    """The key of an image is another one in each request; its digest is the same."""
    first = user(image(pictures.url(412, 200, 150)), text(SEVERAL_BLOCKS))
    asked = ask(url, chat(first))
    before = metric(url, "vllm:prefix_cache_hits_total")
    answer = {"role": "assistant", "content": "Seven."}
    ask(url, chat(first, answer, user(image(pictures.url(413, 90, 60)), text("And now?"))))
    assert metric(url, "vllm:prefix_cache_hits_total") - before >= asked["usage"]["prompt_tokens"] // 128 * 128


def test_many_megabytes_of_images(url: str) -> None:
    """More than Serve's gRPC takes: such a request goes by Ray."""
    files = [encoded(picture(420 + seed, LARGE_SIDE, LARGE_SIDE), "BMP") for seed in range(4)]
    assert sum(map(len, files)) > 2**24
    assert ask(url, chat(user(*(image(data_url(file, "BMP")) for file in files), text("Compare."))))["choices"]


def test_a_long_text_is_refused_by_its_tokens(url: str) -> None:
    """A body over 4 MiB without images was a 500: Serve's replicas refuse gRPC messages of that size."""
    refused = post(url, "/v1/chat/completions", chat(user(text("word " * 1_000_000))))
    assert (refused.status_code, "maximum context length" in refused.text) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "label"),
    [
        ("/v1/chat/completions", chat(user(text("x"), image(TRUNCATED))), "image 1 of 1 (messages[0].content[1])"),
        ("/v1/responses", {"input": [user(input_image(TRUNCATED))]}, "image 1 of 1 (input[0].content[0])"),
        (
            "/v1/messages",
            {"max_tokens": 4, "messages": [user(source_image(pictures.url(414)), source_image(TRUNCATED))]},
            "image 2 of 2 (messages[0].content[1])",
        ),
        ("/tokenize", {"messages": [user(image(TRUNCATED))]}, "image 1 of 1 (messages[0].content[0])"),
        ("/v1/chat/completions", about("vitray:guess"), "image 1 of 1"),
        (
            "/v1/chat/completions",
            about(pictures.url(415), mm_processor_kwargs={"max_pixels": 9}),
            "mm_processor_kwargs",
        ),
        ("/v1/chat/completions", about(pictures.url(416, 40_000, 1)), "40000x1"),
    ],
)
def test_what_is_refused_is_named(url: str, path: str, body: Json, label: str) -> None:
    refused = post(url, path, {"model": "tiny", **body})
    assert (refused.status_code, label in refused.text) == (400, True), refused.text
    assert path != "/v1/responses" or refused.json()["error"]["param"] == "input"


def test_an_image_that_the_template_leaves_out_is_named(url: str) -> None:
    body = chat({"role": "system", "content": [image(pictures.url(417))]}, user(text("Hello")))
    refused = post(url, "/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "image_not_in_prompt")


def test_the_cluster_has_no_encoders(url: str) -> None:
    view = httpx.get(f"{url}/cluster", timeout=30).json()
    assert [deployment["name"] for deployment in view["deployments"]] == ["Ingress", "LLM"]
    assert "text/html" in httpx.get(f"{url}/", timeout=30).headers["content-type"]
