"""`benchmarks/serving/videos.py` with servers that count words."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import pytest

from benchmarks.serving import videos
from benchmarks.serving.latency_client import Answer

VIDEO_TOKENS = 100


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new video takes 4 s, and 2 s if a server has seen it; "slow" takes twice as long. Text takes 1 s."""
    seen: set[tuple[str, str]] = set()

    async def model(_: str) -> str:
        return "small"

    async def answers(url: str, bodies: Sequence[Mapping[str, Any]]) -> list[Answer]:
        (parts,) = [message["content"] for body in bodies for message in body["messages"]]
        seconds, tokens = 1.0, 0
        for part in parts:
            if part["type"] == "text":
                tokens += len(part["text"].split())
                continue
            known = (url, part["video_url"]["url"])
            seconds, tokens = (2.0 if known in seen else 4.0), tokens + VIDEO_TOKENS
            seen.add(known)
        seconds *= 2 if url == "slow" else 1
        return [Answer(200, "", [seconds], seconds, tokens, 1)]

    monkeypatch.setattr(videos, "one_by_one", answers)
    monkeypatch.setattr(videos, "served_model", model)


@pytest.mark.usefixtures("servers")
def test_new_and_repeated_videos_and_texts_of_each_server_are_told(tmp_path: Path) -> None:
    out = tmp_path / "videos.json"
    given = ["a=quick", "b=slow", "--videos", "2", "--frames", "4", "--side", "64", "--out", str(out), "--commit", "c"]
    assert videos.main(given) == 0
    found = json.loads(out.read_text())["ttft_s"]
    assert found["a"] == {"new": 4, "again": 2, "moved": 2, "text": 1, "prompt_tokens": VIDEO_TOKENS + 3}
    assert found["b"] == {"new": 8, "again": 4, "moved": 4, "text": 2, "prompt_tokens": VIDEO_TOKENS + 3}


def test_a_clip_has_its_frames() -> None:
    data = base64.b64decode(videos.clip(5, 64, 1).partition(",")[2])
    with av.open(io.BytesIO(data), "r") as container:
        frames = list(container.decode(video=0))
    assert [(frame.width, frame.height) for frame in frames] == [(64, 64)] * 5


@pytest.mark.usefixtures("servers")
def test_a_request_that_fails_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(url: str, bodies: Sequence[Mapping[str, Any]]) -> list[Answer]:
        return [Answer(400, "too many")]

    monkeypatch.setattr(videos, "one_by_one", fails)
    with pytest.raises(RuntimeError, match="status 400 too many"):
        videos.main(["a=quick", "--videos", "1", "--frames", "2", "--side", "64"])


def test_servers_under_load_get_the_same_videos_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time; the first round is not counted."""
    asked: dict[str, list[str]] = {"quick": [], "slow": []}
    in_flight: dict[str, int] = {"quick": 0, "slow": 0}
    most: dict[str, int] = {"quick": 0, "slow": 0}

    async def model(_: str) -> str:
        return "small"

    async def ask(_: object, url: str, content: bytes) -> Answer:
        body = json.loads(content)
        assert "media_io_kwargs" not in body
        asked[url].append(body["messages"][0]["content"][0]["video_url"]["url"])
        in_flight[url] += 1
        most[url] = max(most[url], in_flight[url])
        await asyncio.sleep(0.01)
        in_flight[url] -= 1
        failed = url == "slow" and len(asked[url]) > 5
        return Answer(500, "no") if failed else Answer(200, "", [0.01], 0.01, 100, 32)

    monkeypatch.setattr(videos, "ask", ask)
    monkeypatch.setattr(videos, "served_model", model)
    urls = {"a": "quick", "b": "slow"}
    found = asyncio.run(videos.measure_load(urls, frames=2, side=64, clients=2, requests=5, rounds=1))
    assert sorted(asked["quick"]) == sorted(asked["slow"])
    assert len(set(asked["quick"])) == 10
    assert most == {"quick": 2, "slow": 2}
    assert (found["a"]["failed"], found["a"]["errors"], found["a"]["ttft_s"]["median"]) == (0, [], 0.01)
    assert 0 < found["a"]["requests_per_s"] < 200
    assert (found["b"]["failed"], found["b"]["errors"], found["b"]["requests_per_s"]) == (5, ["no"], 0)
