"""Turns of contestants in one process and two: order, statistics, the baton, and peers that fail. Needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.ladder import gpu_clock, turns
from benchmarks.ladder.baton import Build, Built, Peer, PeerEndedError, Run, Sustain, Take, Taken
from benchmarks.ladder.gpu_clock import Conditions, Nvml, Reading, Readings
from benchmarks.ladder.turns import (
    FEWEST_ROUNDS,
    RunFailedError,
    Spell,
    Timed,
    Times,
    order,
    run_in_turns,
    run_sustained,
)

BUILD = Build("a_tower", "/nowhere", (), 0, True, "float32")


@dataclass
class Scripted:
    """Answers with times of a list; notes the order of all runs in `called`."""

    name: str
    called: list[tuple[str, int, bool]]
    ms: float = 1.0
    fails_at: int | None = None
    clock: float | None = None

    def run(self, number: int, *, read_clock: bool) -> Timed:
        self.called.append((self.name, number, read_clock))
        if number == self.fails_at:
            raise RunFailedError(f"{self.name} is broken")
        return Timed(self.ms, self.clock, None) if read_clock else Timed(self.ms)

    def sustain(self, settle_s: float, seconds: float) -> Spell:
        raise NotImplementedError


def contestants(called: list[tuple[str, int, bool]], *names: str) -> dict[str, turns.Contestant]:
    return {name: Scripted(name, called) for name in names}


def test_every_contestant_runs_once_a_round_in_a_new_order() -> None:
    called: list[tuple[str, int, bool]] = []
    found = run_in_turns(contestants(called, *"abcd"), rounds=40, warm_ups=1, seed="s")
    rounds = [[name for name, number, _ in called if number == n] for n in range(-1, 40)]
    assert all(sorted(names) == list("abcd") for names in rounds)
    firsts = Counter(names[0] for names in rounds)
    followers = Counter((a, b) for names in rounds for a, b in pairwise(names))
    # Neither a fixed first nor a fixed follower: what ran before leaves the GPU warm or cool.
    assert set(firsts) == set("abcd")
    assert len(followers) == 12
    assert {name: times.rounds for name, times in found.times.items()} == dict.fromkeys("abcd", 40)


def test_a_seed_gives_one_order_whatever_the_contestants_order() -> None:
    assert order(["a", "b", "c"], "s", 3) == order(["c", "a", "b"], "s", 3)
    assert [order(list("abcdef"), "s", n) for n in range(9)] != [order(list("abcdef"), "t", n) for n in range(9)]


def test_rounds_end_early_but_not_before_the_fewest() -> None:
    called: list[tuple[str, int, bool]] = []
    found = run_in_turns(contestants(called, *"ab"), rounds=50, warm_ups=0, seed="s", enough=lambda: True)
    assert found.times["a"].rounds == FEWEST_ROUNDS
    assert len(called) == 2 * FEWEST_ROUNDS


def test_a_contestant_that_fails_leaves_and_the_others_go_on() -> None:
    called: list[tuple[str, int, bool]] = []
    broken = Scripted("b", called, fails_at=2)
    found = run_in_turns({"a": Scripted("a", called), "b": broken}, rounds=6, warm_ups=1, seed="s")
    assert found.failed == {"b": "b is broken"}
    assert list(found.times) == ["a"]
    assert found.times["a"].rounds == 6
    assert max(number for name, number, _ in called if name == "b") == 2


def test_the_clock_is_read_every_few_rounds_and_its_median_kept() -> None:
    called: list[tuple[str, int, bool]] = []
    ways = {"a": Scripted("a", called, clock=1500.0)}
    found = run_in_turns(ways, rounds=2 * turns.CLOCK_EVERY, warm_ups=2, seed="s")
    assert [number for _, number, read in called if read] == [turns.CLOCK_EVERY - 1, 2 * turns.CLOCK_EVERY - 1]
    assert found.times["a"].sm_mhz == 1500.0
    assert found.times["a"].watts is None


def test_statistics_are_the_median_and_the_quartiles() -> None:
    times = Times.of([8.0, 1.0, 2.0, 100.0, 3.0, 4.0, 5.0, 6.0])
    assert (times.ms, times.low_ms, times.high_ms, times.rounds) == (4.5, 3.0, 8.0, 8)
    assert Times.of([7.0]) == Times(7.0, 7.0, 7.0, 1)


def test_a_sustained_run_leaves_out_the_time_to_settle() -> None:
    began: list[float] = []
    numbers: list[int] = []

    def run(number: int) -> float:
        began.append(time.monotonic())
        numbers.append(number)
        return float(number)

    before = time.monotonic()
    found = run_sustained(run, 0.02, 0.03)
    assert numbers == list(range(len(numbers)))
    counted = int(found.samples_ms[0])
    assert found.samples_ms == tuple(map(float, numbers[counted:]))
    assert began[counted] - before >= 0.02
    assert found.ended_s - found.began_s >= 0.03
    assert began[counted] >= found.began_s
    assert len(run_sustained(run, 0.0, 0.0).samples_ms) == 1


# A peer in a process of its own.


@dataclass
class FakeSide:
    """Appends every run to a file, with what ran before it, as contestants of the parent do."""

    journal: Path
    built: list[Build] = field(default_factory=list)

    def build(self, asked: Build) -> Built:
        self.built.append(asked)
        print("building", flush=True)
        if asked.tower == "broken":
            raise ValueError("no such tower")
        return Built({"slow": "Slow", "dies": "Dies"}, {"other": "not here"}, {"pid": os.getpid()})

    def take(self, asked: Take) -> Taken:
        return Taken({"slow": [0.5]}, {"dies": "cannot"} if asked.shape == "y" else {})

    def run(self, asked: Run) -> Timed:
        if asked.name == "dies":
            print("RuntimeError: CUDA error: out of luck", flush=True)
            os._exit(7)
        if asked.name == "hangs":
            time.sleep(600)
        with self.journal.open("a") as out:
            print(asked.name, asked.number, file=out)
        return Timed(2.0, 1700.0 if asked.read_clock else None, 500.0 if asked.read_clock else None)

    def sustain(self, asked: Sustain) -> Spell:
        return Spell((1.0, 2.0, asked.seconds), time.monotonic(), time.monotonic())


def make_fake() -> FakeSide:
    return FakeSide(Path(os.environ["JOURNAL"]))


def make_nothing() -> FakeSide:
    raise ModuleNotFoundError("No module named 'vllm'")


@dataclass
class Journaled:
    """A contestant of this process that writes into the peer's journal."""

    journal: Path

    def run(self, number: int, *, read_clock: bool) -> Timed:
        with self.journal.open("a") as out:
            print("ours", number, file=out)
        return Timed(1.0)

    def sustain(self, settle_s: float, seconds: float) -> Spell:
        raise NotImplementedError


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOURNAL", str(tmp_path / "journal"))
    return tmp_path / "journal"


@pytest.fixture
def peer(tmp_path: Path, journal: Path) -> Iterator[Peer]:
    with Peer(make_fake, tmp_path / "peer.log") as peer:
        yield peer


def test_a_peer_takes_turns_with_us(peer: Peer, journal: Path, tmp_path: Path) -> None:
    """One runs at a time, in the order of the shuffle, whichever process it is in."""
    built = peer.ask(BUILD, Built)
    assert built.facts["pid"] != os.getpid()
    assert built.skipped == {"other": "not here"}
    ways: dict[str, turns.Contestant] = {"ours": Journaled(journal), "slow": peer.contestant("slow")}
    found = run_in_turns(ways, rounds=8, warm_ups=0, seed="s")
    expected = [f"{name} {number}" for number in range(8) for name in order(list(ways), "s", number)]
    assert journal.read_text().splitlines() == expected
    assert found.times["slow"] == Times(2.0, 2.0, 2.0, 8, 1700.0, 500.0)
    assert (tmp_path / "peer.log").read_text() == "building\n"  # its output does not mix with ours


def test_what_a_peer_says_of_a_shape_and_alone(peer: Peer) -> None:
    assert peer.ask(Take("y", None), Taken) == Taken({"slow": [0.5]}, {"dies": "cannot"})
    assert peer.contestant("slow").sustain(0.0, 4.0).samples_ms == (1.0, 2.0, 4.0)


def test_an_exception_in_a_peer_is_its_reason_and_the_peer_goes_on(peer: Peer) -> None:
    with pytest.raises(RunFailedError, match="ValueError: no such tower"):
        peer.ask(Build("broken", "/nowhere", (), 0, True, "float32"), Built)
    assert peer.alive
    assert peer.contestant("slow").run(0, read_clock=False) == Timed(2.0)


def test_a_peer_that_dies_costs_only_its_own_runs(peer: Peer, journal: Path) -> None:
    ways: dict[str, turns.Contestant] = {"ours": Journaled(journal), "dies": peer.contestant("dies")}
    found = run_in_turns(ways, rounds=5, warm_ups=0, seed="s")
    assert found.times["ours"].rounds == 5
    assert found.failed == {"dies": "the process ended with 7: RuntimeError: CUDA error: out of luck"}
    assert not peer.alive
    with pytest.raises(PeerEndedError):
        peer.contestant("slow").run(0, read_clock=False)


def test_a_peer_that_cannot_begin_is_a_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        Peer(make_nothing, tmp_path / "peer.log") as peer,
        pytest.raises(PeerEndedError, match="No module named 'vllm'"),
    ):
        peer.ask(BUILD, Built)
    assert "Traceback" in capfd.readouterr().err


def test_a_peer_that_does_not_answer_is_ended(peer: Peer) -> None:
    peer.ask(BUILD, Built)
    with pytest.raises(PeerEndedError, match="no answer to Run within 0 s"):
        peer.ask(Run("hangs", 0, False), Timed, 0.3)
    peer.close()
    assert not peer.alive


# Clock and power.


def test_conditions_are_those_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "readings.jsonl"
    rows = [Reading(float(second), 1000.0 + second, 100.0 * second, 40.0 + second) for second in range(8)]
    file.write_text("".join(json.dumps(row.__dict__) + "\n" for row in rows) + '{"at_s": 3')
    assert Readings(file).between(2.0, 4.0) == Conditions(1003.0, 300.0, 44.0, 3)
    assert Readings(file).between(20.0, 40.0) is None
    assert Readings(None).between(2.0, 4.0) is None


def test_nvml_is_read_in_mhz_watts_and_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        NVMLError=RuntimeError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu {index}",
        nvmlDeviceGetClockInfo=lambda handle, kind: {("gpu 2", 1): 1755}[handle, kind],
        nvmlDeviceGetPowerUsage=lambda handle: {"gpu 2": 612_500}[handle],
        nvmlDeviceGetTemperature=lambda handle, kind: {("gpu 2", 0): 61}[handle, kind],
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    nvml = Nvml.open(2)
    assert nvml is not None
    reading = nvml.read()
    assert (reading.sm_mhz, reading.watts, reading.celsius) == (1755.0, 612.5, 61.0)

    def fail() -> None:
        raise RuntimeError("driver not loaded")

    library.nvmlInit = fail
    assert Nvml.open(2) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvml.open() is None


def test_the_sampling_process_writes_lines_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text(
        "NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVMLError = 1, 0, RuntimeError\n"
        "def nvmlInit(): pass\n"
        "def nvmlDeviceGetHandleByIndex(index): return index\n"
        "def nvmlDeviceGetClockInfo(handle, kind): return 1500\n"
        "def nvmlDeviceGetPowerUsage(handle): return 700000\n"
        "def nvmlDeviceGetTemperature(handle, kind): return 50\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    began = time.monotonic()
    with gpu_clock.sample_gpu(0) as readings:
        while (found := readings.between(began, time.monotonic())) is None or found.samples < 3:
            time.sleep(0.02)
    assert (found.sm_mhz, found.watts, found.celsius) == (1500.0, 700.0, 50.0)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)


def test_without_a_gpu_nothing_is_sampled() -> None:
    with gpu_clock.sample_gpu(None) as readings:
        assert readings.between(0.0, time.monotonic()) is None
    done = subprocess.run([sys.executable, gpu_clock.__file__, "0"], capture_output=True, text=True, check=False)
    if Nvml.open() is None:
        assert "GPU 0 cannot be read by NVML" in done.stderr
