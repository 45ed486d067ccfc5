"""Architectures without a tower of ours, through Serve and HTTP: vLLM's processor and model class in the encoder give
the tokens of vLLM alone. `make test-models` compares more of them, without Serve.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.models import media
from tests.models.checkpoints import make
from tests.models.recipes import RECIPES
from tests.programs import free_port
from tests.serve.application import ServedApplication, application_settings
from tests.serve.asking import Json, ask, post
from tests.serve.comparison import difference
from tests.serve.conversations import Body, about, chat, image, text, user
from tests.serve.pictures import data_url
from tests.serve.vllm_alone import VllmAlone

SERVED = ("mistral3",)
"""Images of any size, with tokens between their rows. llava and gemma3 have passed as well; each takes two minutes."""
TOLERANCE = 1e-3
OTHER_IMAGE = 0.1
FILES = media.items("image")
FIRST, SMALL, OTHER = (data_url(file) for file in FILES)
QUESTIONS: Mapping[str, Body] = {
    "one": about(FIRST),
    "again": about(FIRST),
    "other": about(OTHER),
    "two": chat(user(image(SMALL), text("and"), image(FIRST), text("Which is larger?"))),
    "twice the same": chat(user(image(FIRST), image(FIRST), text("Are they equal?"))),
    "text": chat(user(text("Hello"))),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("generic")
    for name in SERVED:
        make(name, folder / name)
    return {name: folder / name for name in SERVED}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Json]]:
    """Answers of vLLM alone by model and question."""
    logs = tmp_path_factory.mktemp("alone")
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(VllmAlone(path, dtype=RECIPES[name].dtype, log=logs / f"{name}.log"))
            for name, path in models.items()
        }
        for server in servers.values():
            server.wait()
        return {name: _answers(server.base_url) for name, server in servers.items()}


@pytest.fixture(scope="module")
def served(
    models: dict[str, Path], alone: dict[str, dict[str, Json]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedApplication]:
    """The application, once vLLM alone has ended."""
    applications = [
        application_settings(name, path, dtype=RECIPES[name].dtype, transfer="auto", ingress={}, deployments=[])
        for name, path in models.items()
    ]
    settings = {"http_options": {"host": "127.0.0.1", "port": free_port()}, "applications": applications}
    application = ServedApplication(settings, folder=tmp_path_factory.mktemp("generic_serve"))
    try:
        application.wait()
        yield application
    finally:
        application.stop()


@pytest.fixture(params=SERVED)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _answers(base_url: str) -> dict[str, Json]:
    return {name: ask(base_url, body) for name, body in QUESTIONS.items()}


def test_answers_are_those_of_vllm_alone(
    served: ServedApplication, alone: dict[str, dict[str, Json]], model: str, measured: dict[str, float]
) -> None:
    ours = _answers(served.base_url(model))
    largest = max(difference(ours[name], alone[model][name], tolerance=TOLERANCE) for name in QUESTIONS)
    measured[f"{model}, generic, largest difference (tolerance {TOLERANCE:g})"] = largest
    measured[f"{model}, generic, shift by another image"] = shift = _shift(ours["one"], ours["other"])
    assert shift > OTHER_IMAGE


def _shift(one: Json, other: Json) -> float:
    """The largest difference of the log-probabilities of ranked tokens, up to the first different token."""
    largest = 0.0
    pairs = zip(*(answer["choices"][0]["logprobs"]["content"] for answer in (one, other)), strict=False)
    for left, right in pairs:
        ranked = [
            {entry["token"]: entry["logprob"] for entry in position["top_logprobs"]} for position in (left, right)
        ]
        for token in ranked[0].keys() | ranked[1].keys():
            known = [each.get(token, min(each.values())) for each in ranked]
            largest = max(largest, abs(known[0] - known[1]))
        if left["token"] != right["token"]:
            break
    return largest


def test_what_vllms_processor_cannot_take_is_a_client_error(served: ServedApplication, model: str) -> None:
    broken = "data:image/png;base64," + base64.b64encode(FILES[0][:-300]).decode()
    for body, param in (
        (about(broken), "messages"),
        (about(FIRST, mm_processor_kwargs={"max_pixels": 10_000}), "mm_processor_kwargs"),
    ):
        refused = post(served.base_url(model), "/v1/chat/completions", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert ask(served.base_url(model), about(FIRST))["choices"]
