"""`benchmarks/serving/stream_cost.py` with a server that spends a known time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving import stream_cost
from benchmarks.serving.latency_client import Answer

TOKENS = 50
US_PER_TOKEN = 200.0


@pytest.mark.parametrize(
    ("title", "role"),
    [
        (["ray::ServeReplica:vitray:LLM.handle_request"], "LLM"),
        (["ray::ServeReplica:vitray:Ingress"], "Ingress"),
        (["VLLM::EngineCore"], "EngineCore"),
        (["/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], "ApiServer"),
        (["/opt/haproxy", "-f", "haproxy.cfg"], "haproxy"),
        (["ray::ServeController.listen_for_change"], "ray::ServeController"),
        ([], ""),
    ],
)
def test_processes_are_told_apart_by_their_titles(title: list[str], role: str) -> None:
    assert stream_cost.role(title) == role


def test_cpu_time_is_divided_by_the_tokens_of_a_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spent_s = {"LLM": 3.0, "idle": 9.0}

    async def answer(_: object, __: str, content: bytes) -> Answer:
        assert json.loads(content)["max_tokens"] == TOKENS
        spent_s["LLM"] += TOKENS * US_PER_TOKEN / 1e6
        return Answer(200, "", [0.1], 0.2, 10, TOKENS)

    async def model(_: str) -> str:
        return "small"

    monkeypatch.setattr(stream_cost, "ask", answer)
    monkeypatch.setattr(stream_cost, "served_model", model)
    monkeypatch.setattr(stream_cost, "cpu_seconds", lambda: dict(spent_s))
    out = tmp_path / "cost.json"
    stream_cost.main(["http://server", "--clients", "4", "--tokens", str(TOKENS), "--rounds", "2", "--out", str(out)])
    rounds = json.loads(out.read_text())["rounds"]
    assert [one["us_per_token"] for one in rounds] == [{"LLM": pytest.approx(US_PER_TOKEN)}] * 2


def test_an_answer_that_fails_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_: object) -> Answer:
        return Answer(503, "overloaded")

    async def model(_: str) -> str:
        return "small"

    monkeypatch.setattr(stream_cost, "ask", answer)
    monkeypatch.setattr(stream_cost, "served_model", model)
    with pytest.raises(RuntimeError, match="2 of 2 answers failed: overloaded"):
        stream_cost.main(["http://server", "--clients", "2"])
