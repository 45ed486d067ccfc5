"""The benchmark of transfers: run for real between processes of this machine, and its ways between two threads."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from benchmarks.bench_transfer import measure, parse, sees_gpu
from benchmarks.transfer.figures import Options, Took, bars_met, change, sum_of_bits
from benchmarks.transfer.paths import SLOTS, TRANSFER_PATHS, Side, slot_bytes
from tests.programs import output_of

CPU = torch.device("cpu")


@pytest.mark.slow
def test_it_measures_between_processes(tmp_path: Path) -> None:
    out = tmp_path / "transfer.json"
    command = [sys.executable, "benchmarks/bench_transfer.py", "--tiny", "--out", str(out)]
    report = json.loads(output_of(command, CUDA_VISIBLE_DEVICES="").splitlines()[-1])
    assert report == json.loads(out.read_text())
    ways = report["layouts"]["host_memory"]
    for name in ("application", "shared_memory", "shared_memory_2mib"):
        for took in ways[name]["sizes"].values():
            assert 0 < took["least_ms"] <= took["p50_ms"] <= took["p90_ms"]
            assert took["rounds"] == 5
    assert ways["cuda_ipc"] == {"unavailable": "there is no GPU"}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA IPC works where there is a GPU")
def test_a_way_that_fails_says_why() -> None:
    found = measure("cuda_ipc", Options((0.01,), width=64, rounds=1, warm_ups=0), (None, None))
    assert isinstance(found, str)
    assert "CUDA" in found or "EOFError" in found or "ended" in found


@pytest.mark.parametrize("way", [name for name, way in TRANSFER_PATHS.items() if not way.needs_gpu])
def test_a_way_brings_every_bit(way: str) -> None:
    """More bytes than a chunk of 2 MiB, and no multiple of it, so often that slots are used again."""
    shape = (700, 2000)
    memory = mmap.mmap(-1, SLOTS * slot_bytes(2 * 700 * 2000))
    one, other = multiprocessing.Pipe()
    sender = TRANSFER_PATHS[way].sender(Side(CPU, one, memory, 2 * 700 * 2000))
    receiver = TRANSFER_PATHS[way].receiver(Side(CPU, other, memory, 2 * 700 * 2000))
    tokens, out = torch.randn(shape).to(torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
    for _ in range(SLOTS + 1):
        change(tokens)
        sending = threading.Thread(target=sender.send, args=(tokens,))
        sending.start()
        arrived = receiver.receive(out)
        sending.join()
        assert torch.equal(arrived.view(torch.int16), tokens.view(torch.int16))


def test_embeddings_differ_from_round_to_round() -> None:
    tokens = torch.randn(8, 16).to(torch.bfloat16)
    before = sum_of_bits(tokens)
    change(tokens)
    assert sum_of_bits(tokens) != before


def test_the_figures_of_many_rounds() -> None:
    took = Took.of([0.001 * number for number in range(10, 0, -1)], num_bytes=11_000_000)
    assert (took.p50_ms, took.p90_ms, took.least_ms) == pytest.approx((5.5, 9.0, 1.0))
    assert took.gb_per_s == pytest.approx(2.0)


def test_bars() -> None:
    took = {mb: Took.of([seconds], 1) for mb, seconds in ((10.0, 0.002), (70.0, 0.0061), (3.0, 9.0))}
    assert bars_met(took) == {"10": True, "70": False}


def test_a_process_sees_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with sees_gpu(1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with sees_gpu(1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "nope"], "'nope' is not one of application"),
        (["--megabytes", "x"], "'x' must be numbers above 0"),
        (["--megabytes", "10,-1"], "'10,-1' must be numbers above 0"),
        (["--megabytes", "nan"], "'nan' must be numbers above 0"),
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["--tiny", "--width", "0"], "--width is 0; it must be at least 1"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err


def test_tiny_changes_defaults_only() -> None:
    """--tiny replaced the paths, sizes and rounds that were given beside it."""
    given = parse(["--tiny", "--ways", "shared_memory,today", "--rounds", "2"])
    assert (given.ways, given.rounds, given.megabytes) == (("shared_memory", "today"), 2, (0.1, 1.0))
    assert parse(["--megabytes", "3"]).megabytes == (3.0,)
