"""Held-out questions over HTTP and through each way of our encoder: what is asked, judged, compared and told."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from aiohttp import web
from PIL import Image

from benchmarks import bench_accuracy
from benchmarks.serving.accuracy_ways import BACKENDS, Configuration, Encoded, encode, list_configurations
from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.video_rules import VideoRules
from encoder.video.bounds import VideoBounds
from encoder.video.decode import decode
from encoder.video.header import read_header
from encoder.video.plan import VideoPlan
from tests.unit.deployments.cli.chat_server import ChatServer, refused
from training import evaluate_served
from training.card import MODEL
from training.conversations import TEST_FAMILIES, Conversation
from training.held_out import chat_body, pictures, questions

EACH, SEED = 1, 1000


@pytest.fixture(scope="module")
def asked() -> list[Conversation]:
    return questions(EACH, SEED)


@pytest.fixture(scope="module")
def about_pictures(asked: list[Conversation]) -> list[Conversation]:
    return [one for one in asked if one.turns[-1].clip is None]


@pytest.fixture
def servers() -> Iterator[list[ChatServer]]:
    made = [ChatServer(), ChatServer()]
    yield made
    for server in made:
        server.close()


def knowing(server: ChatServer, asked: Sequence[Conversation], wrong: int | None = None) -> None:
    """Makes it answer every question rightly, but for one by its place."""
    by_body = {json.dumps(chat_body(one, "small")): number for number, one in enumerate(asked)}

    async def answer(request: web.Request) -> web.StreamResponse:
        number = by_body[json.dumps(await request.json())]
        text = "Babble." if number == wrong else asked[number].turns[-1].answer
        return web.json_response({"choices": [{"message": {"content": text}}]})

    server.answers = dict.fromkeys(range(len(asked)), answer)


def test_a_body_holds_the_pictures_where_the_question_has_them(asked: list[Conversation]) -> None:
    for one in asked:
        *_, user = chat_body(one, "m")["messages"]
        shown = [part["image_url"]["url"] for part in user["content"] if part["type"] == "image_url"]
        drawn = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in shown]
        assert [image.tobytes() for image in drawn] == [picture.tobytes() for picture in pictures(one)]
        assert [part["text"] for part in user["content"] if part["type"] == "text"] == [one.turns[-1].question]
        assert (user["content"][0]["type"] == "image_url") == bool(shown and one.turns[-1].before)
        assert (user["content"][0]["type"] == "video_url") == (one.turns[-1].clip is not None)


def test_a_body_holds_a_clip_as_a_video_of_its_frames() -> None:
    """The frames that the application samples are those that the model was trained on."""
    for one in questions(3, SEED, ("direction", "how often")):
        clip = one.turns[-1].clip
        assert clip is not None
        (part,) = [part for part in chat_body(one, "m")["messages"][-1]["content"] if part["type"] == "video_url"]
        data = base64.b64decode(part["video_url"]["url"].partition(",")[2])
        header = read_header(data)
        assert (header.num_frames, header.fps, header.width) == (clip.num_frames, clip.fps, clip.scene.width)
        rules = VideoRules.from_checkpoint(MODEL, "qwen3_vl", ImageRules.from_checkpoint(MODEL))
        plan = VideoPlan.make(header, rules, VideoBounds())
        assert plan.frames.indices == clip.sampled
        assert plan.frames.timestamps(2) == clip.timestamps
        assert plan.grid == (len(clip.timestamps), clip.scene.height // 16, clip.scene.width // 16)
        drawn = np.stack([np.asarray(clip.frame(index)) for index in clip.sampled]).astype(int)
        assert np.abs(decode(data, plan.frames.indices) - drawn).mean() < 8


def test_the_questions_are_the_same_every_time_and_of_every_family(asked: list[Conversation]) -> None:
    assert questions(EACH, SEED) == asked
    assert questions(EACH, SEED + 1) != asked
    assert sorted(one.turns[-1].family for one in asked) == sorted(TEST_FAMILIES)
    with pytest.raises(ValueError, match="at least 1"):
        questions(0, SEED)


def test_two_servers_are_asked_the_same_and_their_differences_told(
    servers: list[ChatServer], asked: list[Conversation], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    knowing(servers[0], asked)
    knowing(servers[1], asked, wrong=4)
    record = tmp_path / "record.json"
    urls = [server.url for server in servers]
    names = ["--name", "ours", "--name", "theirs"]
    options = ["--questions", str(EACH), "--seed", str(SEED), "--record", str(record), "--key", "k"]
    assert evaluate_served.main([urls[0] + "/v1", urls[1], *options, *names]) == 0
    told = capsys.readouterr().out
    result = json.loads(record.read_text())
    odd = asked[4].turns[-1]
    assert result["differences"] == [
        {
            "family": odd.family,
            "question": odd.question,
            "right": odd.answer,
            "answers": {"ours": odd.answer, "theirs": "Babble."},
        }
    ]
    assert result["servers"]["ours"]["accuracy"] == 1.0
    assert result["servers"]["theirs"]["families"][odd.family] == 0.0
    assert f"{odd.family}: {odd.question}\n  ours: {odd.answer}\n  theirs: Babble.\n" in told
    last = json.loads(told.splitlines()[-1])
    assert (last["questions"], last["differences"]) == (37, 1)
    assert last["servers"]["theirs"]["accuracy"] == round(36 / 37, 4)
    assert set(servers[0].keys) == {"Bearer k"}


def test_what_does_not_answer_is_an_error_and_no_wrong_answer(
    servers: list[ChatServer], asked: list[Conversation], capsys: pytest.CaptureFixture[str]
) -> None:
    knowing(servers[0], asked)
    servers[0].answers[3] = refused
    options = ["--questions", str(EACH), "--seed", str(SEED)]
    assert evaluate_served.main([servers[0].url, *options]) == 1
    assert f"{servers[0].url}/v1/chat/completions answers 503" in capsys.readouterr().err
    assert evaluate_served.main(["http://127.0.0.1:1", *options]) == 1
    assert "does not answer" in capsys.readouterr().err
    for wrong in (
        [servers[0].url] * 2,
        [servers[0].url, "--questions", "0"],
        [servers[0].url, "--name", "a", "--name", "b"],
    ):
        with pytest.raises(SystemExit):
            evaluate_served.main(wrong)


def test_every_rung_and_every_backend_is_a_way() -> None:
    names = [way.name for way in list_configurations()]
    assert [*names[:4], names[-1]] == ["eager", "cudagraph", "fusion", "fp8", "compile"]
    assert {f"{rung}, {backend}" for rung in ("eager", "fusion") for backend in BACKENDS} == set(names[4:-1])
    assert len({way.label for way in list_configurations()}) == len(names)
    assert [way.name for way in list_configurations(["compile"], ["sdpa"])] == ["compile"]


def test_a_program_for_the_gpu_compares_each_way_with_vllms_own_tower(
    monkeypatch: pytest.MonkeyPatch,
    about_pictures: list[Conversation],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the real encoder and a language model that notices one embedding."""
    shown = [picture for one in about_pictures for picture in pictures(one)]
    embedded = encode(MODEL, Configuration("eager"), shown)[0]

    def fake(model: Path, asked: Sequence[Conversation], *, on_gpu: bool) -> bench_accuracy.Say:
        def say(given: Sequence[Encoded] | None) -> list[str]:
            answers = [one.turns[-1].answer for one in asked]
            if given is not None:
                assert all(torch.equal(one.tokens, other.tokens) for one, other in zip(given, embedded, strict=True))
                answers[2] = "Babble."
            return answers

        return say

    monkeypatch.setattr(bench_accuracy, "start_vllm", fake)
    monkeypatch.setattr(bench_accuracy, "gpu", lambda: None)
    out = tmp_path / "accuracy.json"
    options = ["--questions", str(EACH), "--seed", str(SEED), "--rungs", "eager,fusion", "--backends", "sdpa,varlen"]
    assert bench_accuracy.main([*options, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    rows = report["rows"]
    if not torch.cuda.is_available():
        assert list(rows) == [bench_accuracy.ALONE, "eager", "eager, attention by sdpa"]
        left = {entry["name"]: entry["reason"] for entry in report["skipped"]}
        assert set(left) == {"fusion", "eager, varlen", "fusion, sdpa", "fusion, varlen"}
        assert all(("cannot use it" if name == "fusion, sdpa" else "GPU") in reason for name, reason in left.items())
    assert rows[bench_accuracy.ALONE]["accuracy"] == 1.0
    eager = rows["eager"]
    assert (eager["same_words"], eager["same_judgement"]) == (26, 26)
    assert report["encoded"]["eager"]["distance_to_first"] == 0.0
    assert report["encoded"]["eager"]["counts"]["tokens"] == sum(len(one.tokens) for one in embedded)
    assert [one["question"] for one in eager["differences"]] == [about_pictures[2].turns[-1].question]


def test_vllm_is_given_each_questions_own_pictures(asked: list[Conversation]) -> None:
    numbered = [
        Encoded(torch.full((2, 4), float(number)), (1, 2, 4))
        for number, _ in enumerate(picture for one in asked for picture in pictures(one))
    ]
    texts = [f"text {number}" for number in range(len(asked))]
    with_pictures = bench_accuracy.build_prompts(asked, texts, None)
    next_one = 0
    for one, given, shown in zip(
        asked, bench_accuracy.build_prompts(asked, texts, numbered), with_pictures, strict=True
    ):
        count = len(pictures(one))
        assert ("multi_modal_data" in given) == ("multi_modal_data" in shown) == bool(count)
        if count:
            found = given["multi_modal_data"]["image"]
            assert found["image_embeds"][::2, 0].tolist() == list(map(float, range(next_one, next_one + count)))
            assert found["image_grid_thw"].tolist() == [[1, 2, 4]] * count
            assert len(shown["multi_modal_data"]["image"]) == count
        next_one += count
