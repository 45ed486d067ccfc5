"""`benchmarks/ladder/gpu_session.py` with steps that end, fail, hang and flood; nothing here needs a GPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import bench_encoder
from benchmarks.ladder import gpu_session
from benchmarks.ladder import steps as runner
from benchmarks.ladder.gpu_session import steps
from benchmarks.ladder.steps import MINUTES, Step, chosen, run_all, shorten, tail
from benchmarks.record import ROOT

HANG = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"


def python(name: str, code: str, share: float = 1.0) -> Step:
    return Step(name, (sys.executable, "-c", code), share)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_step_that_fails_or_hangs_does_not_stop_the_next(tmp_path: Path) -> None:
    hang = python("hang", f"{HANG}; print(p.pid, flush=True); time.sleep(600)", share=0.2)
    found = run_all([python("fail", "raise SystemExit(3)"), hang, python("fine", "print('done')")], tmp_path, 20.0)
    assert [(done.name, done.status == 0, done.timed_out) for done in found] == [
        ("fail", False, False),
        ("hang", False, True),
        ("fine", True, False),
    ]
    assert found[0].status == 3
    assert tail(tmp_path / "fine.log", 5) == "done"
    child = int((tmp_path / "hang.log").read_text())
    until = time.monotonic() + 20
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(child)  # what a step started goes with it


def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    found = run_all([python("late", "print('no')")], tmp_path, 0.0)
    assert [(done.status, done.seconds) for done in found] == [(None, 0.0)]
    assert not (tmp_path / "late.log").exists()


def test_a_flooded_log_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST_LOG_BYTES", 20)
    log = tmp_path / "x.log"
    log.write_bytes(b"begins" + b"-" * 100 + b"ends")
    shorten(log)
    assert log.read_bytes() == b"begins----\n[...]\n------ends"


def test_the_tail_leaves_out_the_line_of_json(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text('one\ntwo\nthree\n{"benchmark": "encoder"}\n')
    assert tail(log, 2) == "two\nthree"
    assert tail(tmp_path / "none.log", 2) == ""


def test_the_steps_are_the_tests_and_the_ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_session, "HOPPER_PACKAGES", ("no_such_package.part",))
    tests, ladder = steps(tmp_path, commit="abc")
    assert tests.command[1:6] == ("-m", "pytest", "tests/gpu", "-m", "gpu")
    assert ladder.command[1] == "benchmarks/bench_encoder.py"
    assert Path(ROOT / ladder.command[1]).is_file()
    assert {"--ladder", "--peers", "--commit", "abc", MINUTES} <= set(ladder.command)
    bench_encoder.parse([part.replace(MINUTES, "1.5") for part in ladder.command[2:]])


def test_a_ladder_without_hoppers_packages_where_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_session, "HOPPER_PACKAGES", ("json.decoder",))
    planned = steps(tmp_path, commit=None)
    assert [step.name for step in planned] == ["tests", "ladder", "ladder_before_hopper"]
    asked = bench_encoder.parse([part.replace(MINUTES, "1") for part in planned[2].command[2:]])
    assert asked.without_hopper
    assert asked.out == tmp_path / "ladder_before_hopper.json"


def test_a_step_learns_how_long_it_may_begin_things(tmp_path: Path) -> None:
    step = Step("told", (sys.executable, "-c", "import sys; print(sys.argv[1])", MINUTES), 1.0)
    runner.run(step, tmp_path, 60.0)
    assert (tmp_path / "told.log").read_text().strip() == "0.80"


def test_the_folder_holds_what_came_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [python("a", "print('from a')"), python("b", "raise SystemExit(1)")]
    monkeypatch.setattr(gpu_session, "steps", lambda *_, **__: made)
    assert gpu_session.main([str(tmp_path / "out"), "--commit", "abc"]) == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.log", "b.log", "session.json"]
    report = json.loads((tmp_path / "out" / "session.json").read_text())
    assert [step["status"] for step in report["steps"]] == [0, 1]
    printed = capsys.readouterr().out
    assert "===== a: status 0" in printed
    assert "from a" in printed
    assert json.loads(printed.splitlines()[-1]) == report


def test_some_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And the peers that are asked for reach the ladder."""
    asked: list[str] = []

    def make(*_: object, peers: str, **__: object) -> list[Step]:
        asked.append(peers)
        return [python("tests", "raise SystemExit(1)"), python("ladder", "print('up')")]

    monkeypatch.setattr(gpu_session, "steps", make)
    assert gpu_session.main([str(tmp_path), "--only", "ladder", "--peers", "transformers,vllm"]) == 0
    assert asked == ["transformers,vllm"]
    assert not (tmp_path / "tests.log").exists()
    with pytest.raises(SystemExit):
        gpu_session.main([str(tmp_path), "--only", "lader"])
    assert "--only names lader; the steps here: tests, ladder" in capsys.readouterr().err


def test_a_step_alone_may_take_all_the_time() -> None:
    planned = [python("a", "", share=0.3), python("b", "", share=0.5), python("c", "")]
    assert [(step.name, step.share) for step in chosen(planned, "a,b")] == [("a", 0.3), ("b", 1.0)]
    assert chosen(planned, None) == planned


def test_a_step_that_is_cut_short_may_end_what_it_started(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('ended', flush=True)))\n"
        "print('begun', flush=True)\ntime.sleep(600)\n"
    )
    done = runner.run(python("polite", code), tmp_path, 5.0)
    assert done.timed_out
    assert (tmp_path / "polite.log").read_text().split() == ["begun", "ended"]
