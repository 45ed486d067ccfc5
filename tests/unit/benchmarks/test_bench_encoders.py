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
from benchmarks.bench_decode import make_photos
from benchmarks.bench_encoders import Load, compare, drive, request_body, schema
from benchmarks.record import ROOT
from configs.resolve import ClusterFacts, resolve
from configs.schema import AppConfig
from tests.threaded import serving

(FILE,) = make_photos(96, 1, seed=0)


def sent(body: bytes) -> list[bytes]:
    """The files in it."""
    urls = [part["image_url"]["url"] for part in json.loads(body)["messages"][0]["content"]]
    return [base64.b64decode(url.removeprefix("data:image/jpeg;base64,")) for url in urls]


def test_every_file_is_another_one_with_the_same_picture() -> None:
    files = [file for number in (1, 10**12) for file in sent(request_body([FILE, FILE], number))]
    assert len(set(files)) == 4
    made = np.asarray(Image.open(io.BytesIO(FILE)))
    assert all(np.array_equal(np.asarray(Image.open(io.BytesIO(file))), made) for file in files)


class Answers(BaseHTTPRequestHandler):
    """Every fourth request is refused."""

    protocol_version = "HTTP/1.1"
    files: set[bytes]
    requests = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        files = sent(self.rfile.read(int(self.headers["content-length"])))
        with Answers.lock:
            Answers.requests += 1
            Answers.files.update(files)
            refused = Answers.requests % 4 == 0
        self.send_response(503 if refused else 200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: object) -> None:
        """Silent."""


@pytest.fixture
def url() -> Iterator[str]:
    Answers.files, Answers.requests = set(), 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}"


def test_what_is_answered_in_the_measured_time_counts_and_what_fails_at_any(url: str) -> None:
    for _ in range(5):  # a machine may stand still for all of the measured time
        Answers.files, Answers.requests = set(), 0
        done, failed = asyncio.run(drive(Load(url, ((FILE, FILE),), in_flight=3, warm_s=0.3, seconds=0.6, first=0)))
        if done and failed:
            break
    assert failed == Answers.requests // 4 > 0
    assert 0 < done < len(Answers.files) - failed, "the warm-up is not counted"
    assert done % 2 == 0, "both pictures of a request count"


@pytest.mark.parametrize("options", [["--gpus", "1,2"], ["--gpus", "2", "--tiny"]])
def test_the_application_is_one(options: list[str]) -> None:
    asked = bench_encoders.parse(options)
    made = schema(ROOT / "models" / "scenes-8m", 2, asked)
    config = resolve(AppConfig.model_validate(made["args"]), ClusterFacts(has_gpu=not asked.tiny))
    assert (config.encoder_replica.num_gpus, config.encoder_replica.cache_bytes) == (0 if asked.tiny else 1, 0)
    assert {one["name"]: one["num_replicas"] for one in made["deployments"]} == {"Ingress": 4, "Encoder": 2, "LLM": 2}


def test_rows_are_compared_with_one_encoder_in_whatever_order() -> None:
    rows = [
        {"encoders": encoders, "kind": kind, "images_per_s": images}
        for encoders, kind, images in [(4, "512²", 36.0), (2, "photos", 10.0), (1, "512²", 10.0)]
    ]
    compare(rows, "512²", 12.0)
    assert [row["linear"] for row in rows] == [0.9, None, 1.0]
    assert [row["over_library"] for row in rows] == [0.75, None, pytest.approx(10 / 12)]
    compare(rows, "512²", None)
    assert [row["over_library"] for row in rows] == [None, None, None]


def test_numbers_of_encoders_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_encoders.parse(["--gpus", "1,none"])
    assert "'1,none' is not like 1,2,4" in capsys.readouterr().err
