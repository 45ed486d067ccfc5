"""Sounds and videos through Serve and HTTP give the tokens of vLLM alone, for a small random checkpoint of
Qwen2.5-Omni, which takes images too. `make test-models` compares more models, without Serve.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path

import pytest

from tests.models import media
from tests.models.checkpoints import make
from tests.programs import free_port
from tests.serve.application import ServedApplication, application_settings
from tests.serve.asking import Json, ask, post
from tests.serve.comparison import difference
from tests.serve.conversations import Body, chat, image, text, user, video
from tests.serve.pictures import data_url
from tests.serve.vllm_alone import VllmAlone
from tests.sounds import tone
from tests.video_files import Clip

MODEL = "qwen2_5_omni"
TOLERANCE = 1e-3
OTHER_ITEM = 0.1
MAX_SECONDS = 5

pytestmark = pytest.mark.slow


def encoded(file: bytes) -> str:
    return base64.b64encode(file).decode()


def sound(file: bytes, kind: str = "wav") -> Body:
    return {"type": "input_audio", "input_audio": {"data": encoded(file), "format": kind}}


def sound_url(file: bytes) -> Body:
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/mpeg;base64,{encoded(file)}"}}


FIRST, SHORT, OTHER = media.items("audio")
CLIP, OTHER_CLIP, THIRD_CLIP = map(media.clip, (1, 2, 3))
QUESTION = text("What is in there?")
QUESTIONS: Mapping[str, Body] = {
    "one": chat(user(sound(FIRST), QUESTION)),
    "other": chat(user(sound(OTHER), QUESTION)),
    "mp3 in stereo at 44.1 kHz": chat(user(sound_url(tone("MP3", rate=44_100, channels=2)), QUESTION)),
    "flac": chat(user(sound_url(tone("FLAC", rate=8_000)), QUESTION)),
    "ogg": chat(user(sound(tone("OGG", rate=48_000), "mp3"), QUESTION)),
    "two, and an image": chat(user(sound(SHORT), image(data_url(media.image(1))), sound(FIRST), QUESTION)),
    "text": chat(user(QUESTION)),
}


VIDEO_QUESTIONS: Mapping[str, Body] = {
    "clip": chat(user(video(CLIP), QUESTION)),
    "other clip": chat(user(video(OTHER_CLIP), QUESTION)),
    "clip, one frame a second": chat(user(video(CLIP), QUESTION), media_io_kwargs={"video": {"fps": 1}}),
    "frames": chat(user(video(media.video(3)), QUESTION)),
    "two, and a sound": chat(user(video(THIRD_CLIP), sound(SHORT), video(media.video(1, 6)), QUESTION)),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media") / MODEL
    make(MODEL, folder)
    return folder


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> dict[str, Json]:
    """Answers of vLLM alone by question."""
    with VllmAlone(checkpoint, dtype="float32", log=checkpoint.parent / "alone.log") as server:
        server.wait()
        return {name: ask(server.base_url, body) for name, body in {**QUESTIONS, **VIDEO_QUESTIONS}.items()}


@pytest.fixture(scope="module")
def served(
    checkpoint: Path, alone: dict[str, Json], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedApplication]:
    """The application, once vLLM alone has ended."""
    limits = {"max_seconds": MAX_SECONDS, "max_bytes": 1_000_000}
    ingress = {"audio": limits, "video": limits}
    settings = {
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "applications": [application_settings(MODEL, checkpoint, dtype="float32", ingress=ingress, deployments=[])],
    }
    with ServedApplication(settings, folder=tmp_path_factory.mktemp("media_serve")) as application:
        yield application


def test_answers_about_sounds_are_those_of_vllm_alone(
    served: ServedApplication, alone: dict[str, Json], measured: dict[str, float]
) -> None:
    ours = {name: ask(served.base_url(MODEL), body) for name, body in QUESTIONS.items()}
    largest = max(difference(ours[name], alone[name], tolerance=TOLERANCE) for name in ours)
    measured[f"{MODEL}, sounds, largest difference (tolerance {TOLERANCE:g})"] = largest
    with pytest.raises(AssertionError):
        difference(ours["one"], ours["other"], tolerance=OTHER_ITEM)


def test_answers_about_videos_are_those_of_vllm_alone(
    served: ServedApplication, alone: dict[str, Json], measured: dict[str, float]
) -> None:
    ours = {name: ask(served.base_url(MODEL), body) for name, body in VIDEO_QUESTIONS.items()}
    largest = max(difference(ours[name], alone[name], tolerance=TOLERANCE) for name in ours)
    measured[f"{MODEL}, videos, largest difference (tolerance {TOLERANCE:g})"] = largest
    prompts = [ours[name]["usage"]["prompt_tokens"] for name in ("clip", "clip, one frame a second")]
    assert prompts[0] > prompts[1]
    with pytest.raises(AssertionError):
        difference(ours["clip"], ours["other clip"], tolerance=OTHER_ITEM)


@pytest.mark.parametrize(("kind", "item"), [("audio", sound(FIRST)), ("video", video(CLIP))])
def test_a_repeated_item_is_neither_decoded_nor_encoded_again(served: ServedApplication, kind: str, item: Body) -> None:
    body = chat(user(item, text("Again?")))
    for _ in range(2):
        answer = post(served.base_url(MODEL), "/v1/chat/completions", body)
    timing = answer.headers["server-timing"]
    assert f"{kind}-1;" in timing
    assert 'cache;desc="1/1"' in timing or 'path;desc="prefix_cache"' in timing, timing
    assert "preprocess;dur=0.0" in timing


@pytest.mark.parametrize(
    ("part", "status", "message"),
    [
        (video(Clip(48, Fraction(8)).encode()), 400, "video lasts 6 seconds, the limit is 5"),
        (video(CLIP[:2000]), 400, "video data is truncated or corrupt"),
        (video(b"not a video"), 400, ""),
        (video(bytes(1_000_001)), 413, "the file has 1000001 bytes, the limit is 1000000"),
        (video(b"/9j/AAAA,/9j/AAAA"), 400, ""),
        (sound(tone(seconds=MAX_SECONDS + 1)), 400, f"the sound has 6.0 s, the limit is {MAX_SECONDS}"),
        (sound(bytes(1_000_001)), 413, "the file has 1000001 bytes, the limit is 1000000"),
        (sound(b"not a sound"), 400, "not an audio file of a supported format"),
        (sound(tone("FLAC")[:400]), 400, "the sound cannot be decoded within the limits"),
        ({"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/x.wav"}}, 400, "http(s) URLs are switched off"),
    ],
)
def test_what_cannot_be_heard_or_seen_is_a_client_error(
    served: ServedApplication, part: Body, status: int, message: str
) -> None:
    refused = post(served.base_url(MODEL), "/v1/chat/completions", chat(user(part, QUESTION)))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (status, "messages"), error
    kind = "video" if part["type"] == "video_url" else "audio"
    assert error["message"].startswith(f"{kind} 1 of 1 (messages[0].content[0]): {message}")
