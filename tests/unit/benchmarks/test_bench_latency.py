"""`benchmarks/bench_latency.py` against a small server of Server-Sent Events, over real HTTP."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import bench_latency
from benchmarks.serving.latency_client import Answer
from benchmarks.serving.latency_figures import ladder_text, serving_figures, serving_text, summary
from tests.threaded import serving

PROMPT_TOKENS = 7


class FakeServer(ThreadingHTTPServer):
    """Streams as many words as asked for; requests of the numbers `fails` get a 503, of `cuts` half a stream."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.fails: set[int] = set()
        self.cuts: set[int] = set()
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._send(200, b'{"data": [{"id": "small"}]}', "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append(body)
        if number in self.server.fails:
            self._send(503, b'{"error": "full"}', "application/json")
            return
        tokens = body["max_tokens"]
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        events += [{"choices": [{"delta": {"content": "word "}}]} for _ in range(tokens)]
        events.append({"choices": [], "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens}})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in events[: 3 if number in self.server.cuts else None]:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        if number not in self.server.cuts:
            self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Silent."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = FakeServer()
    with serving(made):
        yield made


def arguments(server: FakeServer, label: str, *more: str) -> list[str]:
    return [
        "--url", f"http://127.0.0.1:{server.server_port}/", "--label", label, "--images", "32x24,24x24", "--words", "5",
        "--latency-requests", "3", "--latency-tokens", "4", "--prompts", "5", "--output-tokens", "6", "--rate", "500",
        "--warm-ups", "1", *more,
    ]  # fmt: skip


def test_a_run_counts_what_the_server_sent(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "latency.json"
    assert bench_latency.main(arguments(server, "eager", "--out", str(out))) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert json.loads(out.read_text()) == report
    row = report["rows"]["eager"]
    assert row["model"] == "small"
    assert row["latency_requests"] == 3
    serving = row["serving"]
    assert (serving["successful"], serving["failed"]) == (5, 0)
    assert serving["input_tokens"] == 5 * PROMPT_TOKENS
    assert serving["output_tokens"] == 5 * 6
    assert serving["output_tokens_per_s"] == pytest.approx(30 / serving["duration_s"])
    assert 0 < serving["ttft_ms"]["median"] <= serving["ttft_ms"]["p99"] <= 1e3 * serving["duration_s"]
    assert serving_text(serving) in printed
    assert f"Avg latency with prefix cache: {row['latency_ms']['mean']:.2f} ms (1.00×)" in printed


def test_text_is_the_same_and_pictures_are_new(server: FakeServer) -> None:
    """The ladder's requests share their text, which the prefix cache then holds; no picture comes twice."""
    bench_latency.main(arguments(server, "eager"))
    messages = [body["messages"][0]["content"] for body in server.bodies]
    texts = [parts[0]["text"] for parts in messages]
    assert len(set(texts[:4])) == 1  # the warm-up and the three of the ladder
    assert len(set(texts[4:])) == 5
    pictures = [part["image_url"]["url"] for parts in messages for part in parts[1:]]
    assert len(pictures) == len(set(pictures)) == 2 * 9
    first = Image.open(io.BytesIO(base64.b64decode(pictures[0].partition(",")[2])))
    assert first.size == (32, 24)
    assert {body["max_tokens"] for body in server.bodies[4:]} == {6}


def test_failures_are_counted_and_are_an_exit_status(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.fails, server.cuts = {4, 5}, {6}
    assert bench_latency.main(arguments(server, "eager")) == 1
    captured = capsys.readouterr()
    serving = json.loads(captured.out.splitlines()[-1])["rows"]["eager"]["serving"]
    assert (serving["successful"], serving["failed"]) == (2, 3)
    assert serving["output_tokens"] == 2 * 6
    assert captured.err.count("failed: status 503") == 2
    assert "ended before [DONE]" in captured.err


def test_labels_gather_in_a_file(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "latency.json"
    for label in ("eager", "graphs", "eager"):
        bench_latency.main(arguments(server, label, "--prompts", "0", "--out", str(out)))
    assert list(json.loads(out.read_text())["rows"]) == ["graphs", "eager"]
    out.write_text('{"benchmark": "other"}')
    with pytest.raises(ValueError, match="not a result"):
        bench_latency.read_rows(out)


def test_figures_by_hand() -> None:
    answers = [
        Answer(200, "", [0.1, 0.2, 0.4], 0.5, 10, 3),
        Answer(200, "", [0.3], 0.4, 10, 1),
        Answer(503, "full", [], 0.1),
    ]
    found = serving_figures(answers, 2.0)
    assert found["ttft_ms"] == {"mean": pytest.approx(200), "median": pytest.approx(200), "p99": pytest.approx(298)}
    assert found["tpot_ms"]["mean"] == pytest.approx(150)
    assert found["itl_ms"]["mean"] == pytest.approx(150)
    assert found["itl_ms"]["p99"] == pytest.approx(199)
    assert (found["requests_per_s"], found["output_tokens_per_s"], found["tokens_per_s"]) == (1.0, 2.0, 12.0)
    assert found["errors"] == ["full"]
    assert summary([]) is None


def test_layout() -> None:
    found = serving_figures([Answer(200, "", [0.03732], 0.1, 9, 1)], 4.7)
    assert serving_text(found).splitlines() == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     1",
        "Failed requests:                         0",
        "Benchmark duration (s):                  4.70",
        "Total input tokens:                      9",
        "Total generated tokens:                  1",
        "Request throughput (req/s):              0.21",
        "Output token throughput (tok/s):         0.21",
        "Total Token throughput (tok/s):          2.13",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          37.32",
        "Median TTFT (ms):                        37.32",
        "P99 TTFT (ms):                           37.32",
        "-----Time per Output Token (excl. 1st token)------",
        "Mean TPOT (ms):                          -",
        "Median TPOT (ms):                        -",
        "P99 TPOT (ms):                           -",
        "---------------Inter-token Latency----------------",
        "Mean ITL (ms):                           -",
        "Median ITL (ms):                         -",
        "P99 ITL (ms):                            -",
        "==================================================",
    ]


def test_ladder_is_against_the_first_label() -> None:
    rows: dict[str, dict[str, Any]] = {
        "eager": {"latency_ms": {"mean": 6686.0}},
        "none": {"latency_ms": None},
        "fast": {"latency_ms": {"mean": 2049.0}},
    }
    assert ladder_text(rows).splitlines() == [
        "eager", "Avg latency with prefix cache: 6686.00 ms (1.00×)", "",
        "fast", "Avg latency with prefix cache: 2049.00 ms (3.26×)",
    ]  # fmt: skip


@pytest.mark.parametrize(("option", "value"), [("--images", "448"), ("--rate", "0")])
def test_bad_options_are_refused(option: str, value: str) -> None:
    with pytest.raises(SystemExit):
        bench_latency.parse(["--url", "http://x", "--label", "y", option, value])
