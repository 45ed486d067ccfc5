"""A replica that is killed leaves no process behind."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import psutil
import pytest

from deployments.llm import child_guard
from deployments.llm.child_guard import GRACE_S

REPLICA = textwrap.dedent("""
    import os, subprocess, sys, time
    from deployments.llm.child_guard import guard_children, stop_looking
    guard = guard_children(grace_s={grace_s})
    if {forks}:
        if (pid := os.fork()) == 0:
            time.sleep(600)
    else:
        pid = subprocess.Popen([sys.executable, "-c", {child!r}]).pid
    stop_looking(guard)
    print(pid, guard.pid, flush=True)
    time.sleep(600)
""")


def killed_replica(
    child: str, grace_s: float = GRACE_S, *, forks: bool = False
) -> tuple[psutil.Process, psutil.Process]:
    """A child and its guard, their replica just killed with -9."""
    program = REPLICA.format(child=child, grace_s=grace_s, forks=forks)
    replica = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert replica.stdout is not None
    pid, guard = map(int, replica.stdout.readline().split())
    processes = psutil.Process(pid), psutil.Process(guard)
    assert all(process.is_running() for process in processes)
    replica.send_signal(signal.SIGKILL)
    replica.wait()
    return processes


@pytest.mark.parametrize("forks", [False, True])
def test_an_engine_does_not_outlive_its_replica(forks: bool) -> None:
    """Without the guard vLLM's engine kept 95 GiB of the GPU after its replica had been killed. A forked one has all of
    the replica's files."""
    child, guard = killed_replica("import time; time.sleep(600)", forks=forks)
    _, alive = psutil.wait_procs([child, guard], timeout=30)
    assert not alive


def test_an_engine_that_is_starting_does_not_outlive_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes minutes to load a model, and nobody guarded the engine before it was up."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    program = f"import subprocess\nchild = subprocess.Popen({sleep})\nprint(child.pid, flush=True)\nchild.wait()"
    replica = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert replica.stdout is not None
    child = psutil.Process(int(replica.stdout.readline()))
    polls = 0

    def select(*_: object) -> tuple[list[int], list[int], list[int]]:
        nonlocal polls
        polls += 1
        if polls == 1:
            return [], [], []
        replica.kill()
        replica.wait()
        return [0], [], []

    monkeypatch.setattr(child_guard, "select", SimpleNamespace(select=select))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO()))
    child_guard.main(GRACE_S, replica.pid)
    _, alive = psutil.wait_procs([child], timeout=30)
    assert not alive


def test_a_process_that_ignores_the_request_to_stop_is_killed() -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child, guard = killed_replica(stubborn, grace_s=0.2)
    _, alive = psutil.wait_procs([child, guard], timeout=60)
    assert not alive
