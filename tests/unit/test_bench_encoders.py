"""The client of `bench_encoders.py`, and that its application is one; what it measures needs GPUs."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from benchmarks import bench_encoders
from benchmarks.bench_decode import photos
from benchmarks.bench_encoders import Load, drive, request_body, schema
from benchmarks.record import ROOT
from configs.resolve import ClusterFacts, resolve
from configs.schema import AppConfig
from tests.threaded import serving

(FILE,) = photos(96, 1, seed=0)


def sent(body: bytes) -> bytes:
    """The file in it."""
    (part,) = json.loads(body)["messages"][0]["content"]
    return base64.b64decode(part["image_url"]["url"].removeprefix("data:image/jpeg;base64,"))


def test_every_file_is_another_one_with_the_same_picture() -> None:
    one, other = (sent(request_body(FILE, number)) for number in (1, 10**12))
    assert one != other
    first, second, made = (np.asarray(Image.open(io.BytesIO(file))) for file in (one, other, FILE))
    assert np.array_equal(first, made)
    assert np.array_equal(second, made)


class Answers(BaseHTTPRequestHandler):
    """Every fourth request is refused."""

    protocol_version = "HTTP/1.1"
    files: set[bytes]
    lock = threading.Lock()

    def do_POST(self) -> None:
        file = sent(self.rfile.read(int(self.headers["content-length"])))
        with Answers.lock:
            Answers.files.add(file)
            refused = len(Answers.files) % 4 == 0
        self.send_response(503 if refused else 200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: object) -> None:
        """Silent."""


@pytest.fixture
def url() -> Iterator[str]:
    Answers.files = set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}"


def test_what_is_answered_in_the_measured_time_counts_and_what_fails_at_any(url: str) -> None:
    done, failed = asyncio.run(drive(Load(url, (FILE,), in_flight=3, warm_s=0.3, seconds=0.6, first=0)))
    assert failed == len(Answers.files) // 4 > 0
    assert 0 < done < len(Answers.files) - failed, "the warm-up is not counted"


@pytest.mark.parametrize("options", [["--gpus", "1,2"], ["--gpus", "2", "--tiny"]])
def test_the_application_is_one(options: list[str]) -> None:
    asked = bench_encoders.parse(options)
    made = schema(ROOT / "models" / "scenes-8m", 2, asked)
    config = resolve(AppConfig.model_validate(made["args"]), ClusterFacts(has_gpu=not asked.tiny))
    assert (config.encoder_replica.num_gpus, config.encoder_replica.cache_bytes) == (0 if asked.tiny else 1, 0)
    assert {one["name"]: one["num_replicas"] for one in made["deployments"]} == {"Ingress": 4, "Encoder": 2, "LLM": 2}


def test_numbers_of_encoders_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_encoders.parse(["--gpus", "1,none"])
    assert "'1,none' is not like 1,2,4" in capsys.readouterr().err
