"""Small random checkpoints of architectures beyond those of the other tests, through Serve and HTTP, give the tokens of
vLLM alone: one without a tower of ours, whose encoder is vLLM's processor and model class, and Qwen3.5, whose language
model is hybrid. `make test-models` compares more of them, without Serve.
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
from tests.serve.conversations import SEVERAL_BLOCKS, Body, about, chat, image, text, user, video
from tests.serve.pictures import data_url
from tests.serve.test_agents import ask_counted
from tests.serve.vllm_alone import VllmAlone

GENERIC = "mistral3"
"""Images of any size, with tokens between their rows. llava and gemma3 have passed as well; each takes two minutes."""
HYBRID = "qwen3_5"
TOLERANCES = {GENERIC: 1e-3, HYBRID: 1e-1}
"""Of log-probabilities. vLLM's CPU build has the gated delta net in bfloat16 only, as in test_bfloat16.py."""
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
SHOWN = [image(data_url(media.image(seed))) for seed in (11, 12)]
LATER = [
    user(SHOWN[0], text(SEVERAL_BLOCKS)),
    {"role": "assistant", "content": "Done."},
    user(SHOWN[1], text("And now?")),
]
TURNS: Mapping[str, Body] = {
    "first turn": chat(LATER[0]),
    "second turn": chat(*LATER),
    "after another beginning": chat({"role": "system", "content": "Be brief."}, *LATER),
}
CLIP, OTHER_CLIP = map(media.clip, (1, 2))
WATCH = text("What happens?")
VIDEOS: Mapping[str, Body] = {
    "clip": chat(user(video(CLIP), WATCH)),
    "other clip": chat(user(video(OTHER_CLIP), WATCH)),
    "clip of three chunks": chat(user(video(CLIP), WATCH), media_io_kwargs={"video": {"fps": 7}}),
    "frames, and an image": chat(user(video(media.video(3)), image(data_url(media.image(13))), WATCH)),
}
"""For `HYBRID`, which has a tower of ours."""
EMBEDDINGS = {"clip": 1, "other clip": 1, "clip of three chunks": 3, "frames, and an image": 2 + 1}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("generic")
    for name in TOLERANCES:
        make(name, folder / name)
    return {name: folder / name for name in TOLERANCES}


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
        answers = {name: _answers(server.base_url) for name, server in servers.items()}
        answers[HYBRID].update((name, ask(servers[HYBRID].base_url, body)) for name, body in VIDEOS.items())
        return answers


@pytest.fixture(scope="module")
def served(
    models: dict[str, Path], alone: dict[str, dict[str, Json]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedApplication]:
    """The application, once vLLM alone has ended."""
    applications = [
        application_settings(name, path, dtype=RECIPES[name].dtype, ingress={}, deployments=[])
        for name, path in models.items()
    ]
    settings = {"http_options": {"host": "127.0.0.1", "port": free_port()}, "applications": applications}
    with ServedApplication(settings, folder=tmp_path_factory.mktemp("generic_serve")) as application:
        yield application


def _answers(base_url: str) -> dict[str, Json]:
    return {name: ask(base_url, body) for name, body in {**QUESTIONS, **TURNS}.items()}


def test_answers_are_those_of_vllm_alone(
    served: ServedApplication, alone: dict[str, dict[str, Json]], measured: dict[str, float]
) -> None:
    """Images of earlier turns are deferred: vLLM's prefix cache has the first turn, but not after another beginning."""
    ours, tolerance = (
        {name: ask(served.base_url(GENERIC), body) for name, body in QUESTIONS.items()},
        TOLERANCES[GENERIC],
    )
    for name, received in zip(TURNS, (1, 1, 2), strict=True):
        ours[name], num_received, num_encoded = ask_counted(served.base_url(GENERIC), TURNS[name])
        assert (num_received, num_encoded) == (received, 0 if received == 2 else 1), name
    largest = max(difference(ours[name], alone[GENERIC][name], tolerance=tolerance) for name in ours)
    measured[f"{GENERIC}, generic, largest difference (tolerance {tolerance:g})"] = largest
    measured[f"{GENERIC}, generic, shift by another image"] = shift = _shift(ours["one"], ours["other"])
    assert shift > OTHER_IMAGE


def test_answers_of_a_hybrid_model_are_those_of_vllm_alone(
    served: ServedApplication, alone: dict[str, dict[str, Json]], measured: dict[str, float]
) -> None:
    """In bfloat16, the tokens are equal up to near ties. Its prefill chunks end where blocks of its recurrent state do,
    so that early prefill is disabled."""
    ours, tolerance = _answers(served.base_url(HYBRID)), TOLERANCES[HYBRID]
    largest = max(_shift(ours[name], alone[HYBRID][name]) for name in ours)
    measured[f"{HYBRID}, bfloat16, largest difference (tolerance {tolerance:g})"] = largest
    measured[f"{HYBRID}, bfloat16, shift by another image"] = shift = _shift(ours["one"], ours["other"])
    assert largest <= tolerance < shift
    for name, answer in ours.items():
        assert answer["usage"]["prompt_tokens"] == alone[HYBRID][name]["usage"]["prompt_tokens"]
    assert "early prefill is disabled: some layers keep a recurrent state" in served.log_file(HYBRID, "LLM")


def test_answers_of_a_hybrid_model_about_videos_are_those_of_vllm_alone(
    served: ServedApplication, alone: dict[str, dict[str, Json]], measured: dict[str, float]
) -> None:
    ours, tolerance = {}, TOLERANCES[HYBRID]
    for name, body in VIDEOS.items():
        ours[name], received, encoded = ask_counted(served.base_url(HYBRID), body)
        assert received == encoded == EMBEDDINGS[name], name
        assert ours[name]["usage"]["prompt_tokens"] == alone[HYBRID][name]["usage"]["prompt_tokens"]
    largest = max(_shift(ours[name], alone[HYBRID][name]) for name in ours)
    measured[f"{HYBRID}, bfloat16, videos, largest difference (tolerance {tolerance:g})"] = largest
    same = [_text(ours[name]) == _text(alone[HYBRID][name]) for name in ours]
    measured[f"{HYBRID}, bfloat16, videos, share of answers with the same tokens"] = sum(same) / len(same)
    measured[f"{HYBRID}, bfloat16, shift by another video"] = shift = _shift(ours["clip"], ours["other clip"])
    assert largest <= tolerance < shift


def _text(answer: Json) -> str:
    return str(answer["choices"][0]["message"]["content"])


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


def test_what_vllms_processor_cannot_take_is_a_client_error(served: ServedApplication) -> None:
    broken = "data:image/png;base64," + base64.b64encode(FILES[0][:-300]).decode()
    for body, param in (
        (about(broken), "messages"),
        (about(FIRST, mm_processor_kwargs={"max_pixels": 10_000}), "mm_processor_kwargs"),
    ):
        refused = post(served.base_url(GENERIC), "/v1/chat/completions", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert ask(served.base_url(GENERIC), about(FIRST))["choices"]
