"""`benchmarks/serving/stream_cost.py` with a server that spends a known time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import stream_cost
from benchmarks.serving.busy import Seconds
from benchmarks.serving.latency_client import Answer

TOKENS = 50
US_PER_TOKEN = 200.0


class Server:
    """What the benchmark asks, and its CPU time."""

    def __init__(self) -> None:
        self.answer = Answer(200, "", [0.1], 0.2, 10, TOKENS)
        self.spent_s = 3.0

    async def open_loop(
        self, _: str, bodies: Sequence[Mapping[str, Any]], rate: float, __: int
    ) -> tuple[list[Answer], float]:
        assert ({body["max_tokens"] for body in bodies}, rate) == ({TOKENS}, float("inf"))
        self.spent_s += len(bodies) * TOKENS * US_PER_TOKEN / 1e6
        return [self.answer] * len(bodies), 0.5

    def cpu_seconds(self, _: Mapping[str, str]) -> dict[int, Seconds]:
        return {1: Seconds("language model", self.spent_s, {1: self.spent_s}), 2: Seconds("engine", 9.0, {2: 9.0})}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    async def model(_: str) -> str:
        return "small"

    server = Server()
    monkeypatch.setattr(stream_cost, "open_loop", server.open_loop)
    monkeypatch.setattr(stream_cost, "served_model", model)
    monkeypatch.setattr(stream_cost, "cpu_seconds", server.cpu_seconds)
    return server


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("ray::ServeReplica:vitray:LLM.handle_request", "language model"),
        ("ray::ServeReplica:vitray:Ingress", "ingress"),
        ("VLLM::EngineCore", "engine"),
        ("/usr/bin/python3 -m vllm.entrypoints.openai.api_server --model m", "API server"),
        ("/opt/haproxy -f haproxy.cfg", "HAProxy"),
        ("ray::ServeController.listen_for_change", None),
    ],
)
def test_processes_are_told_apart_by_their_titles(title: str, kind: str | None) -> None:
    assert next((name for name, part in stream_cost.KINDS.items() if part in title), None) == kind


@pytest.mark.usefixtures("server")
def test_cpu_time_is_divided_by_the_tokens_of_a_round(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    stream_cost.main(["http://server", "--clients", "4", "--tokens", str(TOKENS), "--rounds", "2", "--out", str(out)])
    rounds = json.loads(out.read_text())["rounds"]
    expected = {"language model": pytest.approx(US_PER_TOKEN), "engine": 0.0}
    assert [(one["tokens_per_s"], one["us_per_token"]) for one in rounds] == [(400.0, expected)] * 2


def test_an_answer_that_fails_ends_the_measurement(server: Server) -> None:
    server.answer = Answer(503, "overloaded")
    with pytest.raises(RuntimeError, match="2 of 2 answers failed: overloaded"):
        stream_cost.main(["http://server", "--clients", "2", "--tokens", str(TOKENS)])
