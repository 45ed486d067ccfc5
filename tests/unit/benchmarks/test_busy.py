"""What `busy.py` says of processes and GPUs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import pytest

from benchmarks.serving import busy
from benchmarks.serving.busy import Busy, Seconds, parse_gpu_samples, shares

MARK = "vitray-busy-test"
SPINS = f"import threading\nthreading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()  # {MARK}"


def test_a_process_that_spins_in_one_thread_has_that_much_of_a_core() -> None:
    process = subprocess.Popen([sys.executable, "-c", SPINS])
    try:
        with Busy({"spins": MARK, "none": "no such process"}, wait_s=0.2, seconds=1.0) as looked:
            started = time.monotonic()
            looked._thread.join(60)
            took_s = time.monotonic() - started
    finally:
        process.kill()
        process.wait()
    found = looked.found["spins"]
    assert found["processes"] == 1
    assert 0.02 < found["busiest_thread"] <= found["busiest_process"] + 0.05 < took_s + 0.3
    assert "none" not in looked.found


def test_left_early_it_found_nothing() -> None:
    with Busy({"python": "python"}, wait_s=60.0, seconds=1.0) as looked:
        pass
    assert looked.found == {}


def test_shares_are_of_those_that_were_there_before() -> None:
    before = {1: Seconds("a", 10.0, {1: 8.0, 2: 2.0}), 2: Seconds("a", 0.0, {2: 0.0})}
    after = {1: Seconds("a", 14.0, {1: 9.0, 2: 5.0}), 2: Seconds("a", 1.0, {2: 1.0}), 3: Seconds("a", 99.0, {3: 99.0})}
    assert shares(before, after, 2.0) == {
        "a": {"processes": 2, "cores": 2.5, "busiest_process": 2.0, "busiest_thread": 1.5}
    }


def test_gpus_are_means_of_all_and_the_idlest_is_named() -> None:
    told = "0, 100, 1980, 600.5\n1, 50, 1980, 300.5\n0, 80, 1000, 600.5\n1, 60, 1980, 300.5\n0, 9"
    assert parse_gpu_samples(told)["gpus"] == pytest.approx(
        {"busy": 0.725, "idlest": 0.55, "clock_mhz": 1735, "power_w": 450.5}
    )
    assert parse_gpu_samples("") == {}
    assert parse_gpu_samples("0, [N/A], 1980, 600.5\n" + told) == parse_gpu_samples(told)
    assert parse_gpu_samples("0, [N/A], 1980, [Unknown Error]") == {}


def test_without_nvidia_smi_gpus_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with busy.sample_gpus() as found:
        pass
    assert found == {}
