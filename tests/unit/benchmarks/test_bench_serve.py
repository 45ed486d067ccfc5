"""`benchmarks/bench_serve.py` against small servers of OpenAI's chat route, over real HTTP."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from benchmarks import bench_serve
from benchmarks.serving.latency_client import Answer
from benchmarks.trace import client as trace_client
from benchmarks.trace import plot as trace_plot
from benchmarks.trace.bodies import Bodies
from benchmarks.trace.client import Run, Sent
from benchmarks.trace.figures import Slo, client_lag, compared, compared_text, figures, text
from benchmarks.trace.images import make_images, picture
from benchmarks.trace.requests import Trace, TraceImage, generate_trace, lines, read_trace
from deployments.cli import main as cli
from planner.traces import TraceError
from tests.unit.deployments.cli.chat_server import TEMPLATE_TOKENS, ChatServer, refused, streamed

RELAXED = ("--max-lag-ms", "60000", "--speed", "inf")
"""A machine that runs tests may be busy with others."""


@pytest.fixture
def servers() -> Iterator[tuple[ChatServer, ChatServer]]:
    made = (ChatServer(), ChatServer())
    yield made
    for one in made:
        one.close()


@pytest.fixture
def server(servers: tuple[ChatServer, ChatServer]) -> ChatServer:
    return servers[0]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Five requests, three pictures, one of them twice."""
    file = tmp_path / "small.jsonl"
    sizes = [[0, 40, 24], [1, 24, 24], [2, 16, 48]]
    images = [{"id": number, "w": width, "h": height} for number, width, height in sizes]
    rows = [(0.0, images[:2], 30, 6), (0.01, [], 40, 5), (0.01, images[:1], 20, 7), (0.02, images[2:], 20, 5),
            (0.5, [], 64, 6)]  # fmt: skip
    file.write_text("".join(
        json.dumps({"t": t, "images": seen, "prompt_tokens": asked, "output_tokens": told}) + "\n"
        for t, seen, asked, told in rows
    ))  # fmt: skip
    return file


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(bench_serve.main, [str(one) for one in arguments])


def result(done: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_run_counts_what_the_server_sent(server: ChatServer, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = bench(server.url + "/v1/", "--trace", trace, "--images", tmp_path, "--out", out, *RELAXED)
    assert done.exit_code == 0, done.output
    report = result(done)
    assert json.loads(out.read_text()) == report
    assert report["trace"] | {"digest": ""} == {
        "name": "small", "digest": "", "requests": 5, "images": 4, "distinct_images": 3, "seconds": 0.5,
    }  # fmt: skip
    (found,) = report["servers"].values()
    assert (found["sent"], found["successful"], found["errors_by_status"]) == (5, 5, {})
    assert found["output_tokens"] == 6 + 5 + 7 + 5 + 6
    # A word has two tokens here, which the client finds out; then questions are as long as the trace says.
    assert found["input_tokens"] == 5 * TEMPLATE_TOKENS + 30 + 40 + 20 + 20 + 64
    assert found["client"]["valid"] is report["valid"] is True
    assert text(found) in done.stdout


def test_a_result_that_cannot_be_written_is_printed(server: ChatServer, trace: Path, tmp_path: Path) -> None:
    """It was lost; and the folder of --out was created only after the run."""
    (tmp_path / "out.json.part").mkdir()
    done = bench(server.url, "--trace", trace, "--images", tmp_path, "--out", tmp_path / "out.json", *RELAXED)
    assert (done.exit_code, result(done)["trace"]["requests"]) == (1, 5)
    assert "out.json.part: Is a directory" in done.stderr
    assert f"Error: {trace}: File exists" in bench("http://x", "--trace", trace, "--out", trace / "out.json").stderr


def test_requests_are_the_traces(server: ChatServer, trace: Path, tmp_path: Path) -> None:
    bench(server.url, "--trace", trace, "--images", tmp_path, "--detail", "low", *RELAXED)
    bodies = sorted(server.bodies, key=lambda body: len(body["messages"][0]["content"]))
    contents = [body["messages"][0]["content"] for body in bodies]
    assert [len(parts) - 1 for parts in contents] == [0, 0, 1, 1, 2]
    texts = [parts[-1]["text"] for parts in contents]
    assert len({text.split()[0] for text in texts}) == 5  # no two share a prefix
    pictures = [part["image_url"] for parts in contents for part in parts[:-1]]
    assert {picture["detail"] for picture in pictures} == {"low"}
    assert len({picture["url"] for picture in pictures}) == 3
    opened = [Image.open(io.BytesIO(base64.b64decode(one["url"].partition(",")[2]))) for one in pictures]
    assert sorted({one.size for one in opened}) == [(16, 48), (24, 24), (40, 24)]
    assert sorted(body["max_tokens"] for body in bodies) == [5, 5, 6, 6, 7]
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in bodies)


def test_the_loop_is_open(server: ChatServer, trace: Path, tmp_path: Path) -> None:
    """A client that waits for answers before it sends would never get one here: all wait for the last."""
    all_there = asyncio.Event()

    async def wait(number: int) -> None:
        if number == 4:
            all_there.set()
        await all_there.wait()

    server.before = wait
    done = bench(server.url, "--trace", trace, "--images", tmp_path, "--max-lag-ms", 60000)
    assert result(done)["servers"][server.url]["successful"] == 5


def test_what_a_late_client_cost_is_in_the_latency(
    server: ChatServer, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No coordinated omission: the body of the last request is 0.4 s late, and its TTFT counts from when it was due."""
    monkeypatch.setattr(trace_client, "AHEAD_S", 0.05)
    made = Bodies.of

    def slow(self: Bodies, index: int) -> bytes:
        if index == 4:
            time.sleep(0.45)
        return made(self, index)

    monkeypatch.setattr(Bodies, "of", slow)
    done = bench(server.url, "--trace", trace, "--images", tmp_path, "--max-lag-ms", 300)
    (found,) = result(done)["servers"].values()
    assert found["client"]["send_lag_ms"]["max"] >= 390
    assert found["ttft_ms"]["p99"] >= 0.9 * 390
    assert found["client"]["valid"] is False
    assert done.exit_code == 1
    assert "NOT VALID" in done.stderr
    assert "NO, over 300 ms" in done.stdout


def test_no_garbage_is_collected_during_a_run(
    server: ChatServer, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled = []
    asked = trace_client.ask

    async def ask(*arguments: Any) -> None:
        enabled.append(gc.isenabled())
        await asked(*arguments)

    monkeypatch.setattr(trace_client, "ask", ask)
    bench(server.url, "--trace", trace, "--images", tmp_path, *RELAXED)
    assert enabled[-5:] == [False] * 5
    assert gc.isenabled()


def test_errors_by_status(server: ChatServer, trace: Path, tmp_path: Path) -> None:
    server.answers[1] = refused
    server.answers[3] = lambda request: streamed(request, server.bodies[3], broken_off=True)
    done = bench(server.url, "--trace", trace, "--images", tmp_path, *RELAXED)
    (found,) = result(done)["servers"].values()
    assert found["errors_by_status"] == {"200, broken off": 1, "503": 1}
    assert (found["refused"], found["refused_with_retry_after"]) == (1, 1)
    assert (found["successful"], found["failed"]) == (3, 2)
    assert found["goodput_share"] <= 3 / 5
    assert "429 and 503 with Retry-After:            1/1" in done.stdout
    assert done.exit_code == 0  # refusing is what a server may do


def test_a_server_that_is_gone(trace: Path, tmp_path: Path, server: ChatServer) -> None:
    url = server.url.rpartition(":")[0] + ":9"
    done = bench(url, "--trace", trace, "--images", tmp_path)
    assert done.exit_code == 1
    assert f"{url}/v1/models" in done.stderr


def test_two_servers_one_after_the_other(servers: tuple[ChatServer, ChatServer], trace: Path, tmp_path: Path) -> None:
    first, second = servers
    done = bench(first.url, "--against", second.url, "--label", "ours", "--label", "theirs", "--trace", trace,
                 "--images", tmp_path, "--key", "secret", "--against-key", "other", *RELAXED)  # fmt: skip
    report = result(done)
    assert report["order"] == "one after the other: all to ours, then all to theirs"
    assert list(report["servers"]) == ["ours", "theirs"]

    def asked(server: ChatServer) -> list[str]:
        return sorted(json.dumps(body["messages"]) for body in server.bodies)

    assert len(first.bodies) == 5
    assert asked(first) == asked(second)
    assert report["compared"]["output_tokens_per_s"]["first"] == report["servers"]["ours"]["output_tokens_per_s"]
    assert (set(first.keys), set(second.keys)) == ({"Bearer secret"}, {"Bearer other"})


def test_the_key_of_one_server_is_not_for_the_other(
    servers: tuple[ChatServer, ChatServer], trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable with the key is there for other commands too, and --against may name anybody's server."""
    monkeypatch.setenv("VITRAY_API_KEY", "secret")
    bench(servers[0].url, "--against", servers[1].url, "--trace", trace, "--images", tmp_path, *RELAXED)
    assert (set(servers[0].keys), set(servers[1].keys)) == ({"Bearer secret"}, {None})


def test_two_servers_in_turns(servers: tuple[ChatServer, ChatServer], trace: Path, tmp_path: Path) -> None:
    turns: list[str] = []

    def noted(name: str) -> Any:
        async def note(_: int) -> None:
            turns.append(name)

        return note

    for one, name in zip(servers, "ab", strict=True):
        one.before = noted(name)
    done = bench(servers[0].url, "--against", servers[1].url, "--label", "a", "--label", "b", "--trace", trace,
                 "--images", tmp_path, "--pieces", 2, *RELAXED)  # fmt: skip
    assert "".join(turns) == "aa" + "bb" + "bbb" + "aaa"
    assert result(done)["order"].startswith("interleaved: 2 consecutive pieces, each to a and b")
    assert [one["sent"] for one in result(done)["servers"].values()] == [5, 5]


def test_a_key_is_not_in_the_result() -> None:
    for given in (["--key", "secret"], ["-k", "secret"], ["--key=secret"], ["-ksecret"], ["--against-key", "secret"]):
        assert bench_serve._without_key(["url", *given, "--speed", "2"])[-2:] == ["--speed", "2"]
        assert not [one for one in bench_serve._without_key(["url", *given]) if "secret" in one]


def test_a_generated_trace(server: ChatServer, tmp_path: Path) -> None:
    """What is sent where no trace is named; written down it is read as the same."""
    kept = tmp_path / "kept.jsonl"
    done = bench(server.url, "--images", tmp_path, "--requests", 12, "--write-trace", kept, *RELAXED)
    assert result(done)["trace"]["requests"] == 12
    assert read_trace(kept).requests == generate_trace().requests[:12]
    whole = generate_trace()
    kept.write_text("".join(f"{line}\n" for line in lines(whole.requests)))
    assert read_trace(kept).digest == whole.digest
    assert generate_trace(seed=1).digest != whole.digest
    repeated = [image.id for request in whole.requests for image in request.images]
    assert len(repeated) > len(set(repeated)) > 10


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2"),
        ('{"t": 1}', "images"),
        ('{"t": 1, "images": [{"id": 0, "w": 0, "h": 4}], "prompt_tokens": 1, "output_tokens": 1}', "w and h: 0"),
        ('{"t": 1, "images": [], "prompt_tokens": 1, "output_tokens": 0}', "output_tokens: 0"),
        ('{"t": 0.2, "images": [], "prompt_tokens": 1, "output_tokens": 1}', "t is 0.2, and was 0.5"),
        ('{"t": 1, "images": [{"id": 7, "w": 9, "h": 4}], "prompt_tokens": 1, "output_tokens": 1}', "was 4×4"),
        ('{"t": 1, "images": [], "videos": [{}], "prompt_tokens": 1, "output_tokens": 1}', "has videos"),
        ('{"t": Infinity, "images": [], "prompt_tokens": 1, "output_tokens": 1}', "t must be finite"),
        ('{"t": 1, "images": [{"id": -1, "w": 4, "h": 4}], "prompt_tokens": 1, "output_tokens": 1}', "ids of images"),
        ('{"t": 1, "images": [{"id": 8, "w": 65501, "h": 4}], "prompt_tokens": 1, "output_tokens": 1}', "to 65500"),
        ("[" * 100_000, "RecursionError"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "t.jsonl"
    good = {"t": 0.5, "images": [{"id": 7, "w": 4, "h": 4}], "prompt_tokens": 1, "output_tokens": 1}
    file.write_text(f"{json.dumps(good)}\n{line}\n")
    with pytest.raises(TraceError, match=r"t\.jsonl, line 2") as refusal:
        read_trace(file)
    assert told in str(refusal.value)


def test_caps_and_pieces() -> None:
    trace = generate_trace(10).capped(20, 9)
    assert max(one.prompt_tokens for one in trace.requests) == 20
    assert max(one.output_tokens for one in trace.requests) == 9
    assert [list(piece) for piece in trace.pieces(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_pictures_follow_from_the_digest(tmp_path: Path) -> None:
    images = (TraceImage(0, 200, 120), TraceImage(1, 200, 120))
    trace = Trace("x", "ab" * 32, generate_trace(1).requests)
    one, again = picture(trace.digest, images[0]), picture(trace.digest, images[0])
    assert one.size == (200, 120)
    assert one.tobytes() == again.tobytes()
    assert one.tobytes() != picture(trace.digest, images[1]).tobytes()
    assert one.tobytes() != picture("cd" * 32, images[0]).tobytes()
    assert len(set(one.get_flattened_data())) > 1000  # no flat colour, which would compress to nothing


def test_pictures_are_made_once(tmp_path: Path) -> None:
    trace = generate_trace(40)
    progress: list[tuple[int, int]] = []
    files = make_images(trace, tmp_path, lambda done, of: progress.append((done, of)))
    assert progress[-1] == (len(trace.images), len(trace.images))
    assert {number: Image.open(file).size for number, file in files.items()} == {
        image.id: (image.width, image.height) for image in trace.images
    }
    before = {file: file.stat().st_mtime_ns for file in files.values()}
    files[0].unlink()
    again = make_images(trace, tmp_path, lambda done, of: progress.append((done, of)))
    assert progress[-1] == (1, 1)
    assert {file: file.stat().st_mtime_ns for file in again.values() if file != files[0]} == {
        file: at for file, at in before.items() if file != files[0]
    }
    assert not list(tmp_path.rglob("*.part"))


def run_of(*answers: Answer, lags: tuple[float, ...] = (0.0,), loop: tuple[float, ...] = ()) -> Run:
    sent = [Sent(i, float(i), lags[i % len(lags)], answer) for i, answer in enumerate(answers)]
    return Run(sent, 2.0, list(loop))


def test_goodput_by_hand() -> None:
    good = Answer(200, "", [0.9, 0.95], 1.0, 3, 2)
    late = Answer(200, "", [1.1, 1.2], 1.2, 3, 2)
    slow = Answer(200, "", [0.5, 0.61], 0.7, 3, 3)  # 55 ms a token
    single = Answer(200, "", [0.5], 0.5, 3, 1)
    refusal = Answer(503, "full", [], 0.1)
    found = figures(run_of(good, late, slow, single, refusal), Slo(), max_lag_ms=20)
    assert found["goodput_per_s"] == 1.0
    assert found["goodput_share"] == 2 / 5
    assert figures(run_of(late), Slo(ttft_ms=1200, tpot_ms=200), max_lag_ms=20)["goodput_share"] == 1


def test_a_long_stop_of_the_client_counts_for_as_long_as_it_lasts() -> None:
    """Two seconds in which nothing was read are one tick among a thousand, and not one in a hundred."""
    answer = Answer(200, "", [0.1], 0.1, 3, 1)
    quiet = client_lag(run_of(answer, loop=(0.001,) * 1000), 20)
    stopped = client_lag(run_of(answer, loop=(*(0.001,) * 999, 2.0)), 20)
    assert (quiet["valid"], stopped["valid"]) == (True, False)
    assert quiet["loop_lag_ms"] == pytest.approx({"p99": 1, "max": 1})
    assert stopped["loop_lag_ms"] == pytest.approx({"p99": 2000, "max": 2000})
    assert client_lag(run_of(answer, lags=(0.03,)), 20)["valid"] is False


def test_a_comparison_by_hand() -> None:
    one, two = (figures(run_of(Answer(200, "", [ttft], ttft, 3, 1)), Slo(), max_lag_ms=20) for ttft in (0.2, 0.5))
    rows = compared(one, two)
    assert rows["ttft_ms.mean"] == pytest.approx({"first": 200, "second": 500, "ratio": 2.5})
    assert rows["tpot_ms.mean"] == {"first": None, "second": None, "ratio": None}
    table = compared_text(rows, ["vitray", "vllm"]).splitlines()
    assert table[0].split() == ["vitray", "vllm", "ratio"]
    assert "mean TTFT (ms)                200.00      500.00    2.500" in table


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--label", "a", "--label", "b"], "--label is given 2 times for 1 servers"),
        (["--against", "http://y", "--label", "a", "--label", "a"], "both servers are called a"),
        (["--speed", "0"], "0 is no positive number"),
        (["--speed", "fast"], "fast is no positive number"),
        (["--pieces", "61"], "--pieces is 61, and the trace has 60 requests"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(arguments: list[str], told: str) -> None:
    done = bench("http://x", *arguments)
    assert done.exit_code == 2
    assert told in done.stderr


def test_a_plot(server: ChatServer, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the plot is made of the extra [bench]")
    server.answers[1] = refused
    out = tmp_path / "new" / "plot.png"
    assert bench(server.url, "--trace", trace, "--images", tmp_path, "--plot", out, *RELAXED).exit_code == 0
    assert Image.open(out).size == (1620, 480)
    monkeypatch.setattr(trace_plot, "draw", lambda *_: Path("gone").stat())
    assert result(bench(server.url, "--trace", trace, "--images", tmp_path, "--plot", out, *RELAXED))["valid"]


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trace_plot, "is_possible", lambda: False)
    done = bench("http://x", "--plot", tmp_path / "plot.png")
    assert (done.exit_code, "pip install '.[bench]'" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("command", "program", "first"), [("serve", "bench_serve.py", []), ("encoder", "bench_encoder.py", ["--ladder"])]
)
def test_the_command_runs_the_programs(
    monkeypatch: pytest.MonkeyPatch, command: str, program: str, first: list[str]
) -> None:
    """With every option as it stands, `--help` among them."""
    ran: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: ran.append((path, argv)))
    assert CliRunner().invoke(cli.main, ["bench", command, "--help", "--arch=x", "-k", "y"]).exit_code == 0
    ((path, argv),) = ran
    assert path == argv[0] == sys.executable
    assert Path(argv[1]).name == program
    assert Path(argv[1]).is_file()
    assert argv[2:] == [*first, "--help", "--arch=x", "-k", "y"]
