"""`benchmarks/serving/agents.py` with servers that count words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import agents
from benchmarks.serving.latency_client import Answer

IMAGE_TOKENS = 100
OVERHEAD = 5
"""Tokens of the template around a message."""
IMAGE = f'image-1;desc="tokens={IMAGE_TOKENS} replica=a{{}}", cache;desc="0/1"'


def num_tokens(body: Mapping[str, Any]) -> int:
    total = 0
    for message in body["messages"]:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        total += OVERHEAD
        total += sum(len(part["text"].split()) if part["type"] == "text" else IMAGE_TOKENS for part in parts)
    return total


async def answers(url: str, bodies: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """The application is slower by a tenth for each image turn before; vLLM alone is always as fast."""
    found = []
    for number, body in enumerate(bodies):
        has_images = "image_url" in str(body)
        first_s = 1.0 + 0.1 * number * (has_images and url == "ours")
        timing = ", ".join([IMAGE.format(""), *[IMAGE.format(" cached")] * (number > 1)]) if has_images else ""
        found.append(Answer(200, "", [first_s], first_s, num_tokens(body), 1, timing))
    return found


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def model(_: str) -> str:
        return "small"

    monkeypatch.setattr(agents, "one_by_one", answers)
    monkeypatch.setattr(agents, "served_model", model)


def test_both_servers_and_both_conversations_are_told(tmp_path: Path) -> None:
    out = tmp_path / "agents.json"
    given = ["--url", "ours", "--against", "theirs", "--turns", "6", "--size", "32x32", "--row-bytes", "10"]
    assert agents.main([*given, "--repeats", "2", "--out", str(out), "--commit", "c"]) == 0
    found = json.loads(out.read_text())
    ours, alone = found["servers"]["vitray"], found["servers"]["vllm"]
    assert ours["images"]["encoded_per_turn"] == [1] * 6
    assert ours["images"]["received_per_turn"] == [1, 1, 2, 2, 2, 2]
    assert ours["images"]["bytes_transferred"] == 10 * IMAGE_TOKENS * 10
    assert ours["images"]["prompt_tokens"] == ours["text"]["prompt_tokens"] == alone["text"]["prompt_tokens"]
    assert ours["ratio_over_text"] == pytest.approx(1.5 / 1.1)
    assert alone["ratio_over_text"] == 1
    assert "bytes_transferred" not in alone["images"]


def test_a_turn_that_fails_ends_the_measurement() -> None:
    with pytest.raises(RuntimeError, match="status 400 too many"):
        agents.Turn.of(Answer(400, "too many"))


def test_two_turns_are_too_few() -> None:
    with pytest.raises(SystemExit):
        agents.main(["--url", "ours", "--turns", "2"])
