"""CPU use of this machine's processes by kind, of their busiest threads, and use of the GPUs, during a measurement.

A share of 1 is one core, or a GPU that always had a kernel running.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import mean
from types import TracebackType

import psutil

GPU_QUERY = ("index", "utilization.gpu", "clocks.sm", "power.draw")
GPU_EVERY_MS = 500


@dataclass(frozen=True)
class Seconds:
    """CPU time of a process."""

    kind: str
    process: float
    threads: Mapping[int, float]


class Busy:
    """Samples for `seconds`, starting `wait_s` after it is entered; leave it after that, and read `found`.

    Args:
        kinds: a part of the command lines of each kind of process; the first match counts.
    """

    def __init__(self, kinds: Mapping[str, str], wait_s: float, seconds: float) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self._kinds = kinds
        self._wait_s, self._seconds = wait_s, seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Busy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        if self._over.wait(self._wait_s):
            return
        before = cpu_seconds(self._kinds)
        with sample_gpus() as gpus:
            if self._over.wait(self._seconds):
                return
        self.found = shares(before, cpu_seconds(self._kinds), self._seconds) | gpus


def cpu_seconds(kinds: Mapping[str, str]) -> dict[int, Seconds]:
    """Returns the CPU time of every process of one of the kinds, by process id."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            kind = next((name for name, part in kinds.items() if part in line), None)
            if kind is not None:
                times = process.cpu_times()
                threads = {one.id: one.user_time + one.system_time for one in process.threads()}
                found[process.pid] = Seconds(kind, times.user + times.system, threads)
    return found


def shares(before: Mapping[int, Seconds], after: Mapping[int, Seconds], seconds: float) -> dict[str, dict[str, float]]:
    """Returns for each kind: number of processes, cores of all, of the busiest process, and of the busiest thread."""
    used: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number, now in after.items():
        if number in before:
            then = before[number]
            threads = [spent - then.threads.get(thread, 0.0) for thread, spent in now.threads.items()]
            used[now.kind].append(((now.process - then.process) / seconds, max(threads, default=0.0) / seconds))
    return {
        kind: {
            "processes": len(of),
            "cores": sum(process for process, _ in of),
            "busiest_process": max(process for process, _ in of),
            "busiest_thread": max(thread for _, thread in of),
        }
        for kind, of in used.items()
    }


@contextlib.contextmanager
def sample_gpus() -> Iterator[dict[str, dict[str, float]]]:
    """Yields a dict that contains `of_gpus` after leaving the block; empty without nvidia-smi."""
    found: dict[str, dict[str, float]] = {}
    if shutil.which("nvidia-smi") is None:
        yield found
        return
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"]
    process = subprocess.Popen([*command, f"--loop-ms={GPU_EVERY_MS}"], stdout=subprocess.PIPE, text=True)
    try:
        yield found
    finally:
        process.terminate()
        told, _ = process.communicate()
        found.update(parse_gpu_samples(told))


def parse_gpu_samples(told: str) -> dict[str, dict[str, float]]:
    """Returns means of nvidia-smi's lines: utilization of the GPUs and of the idlest, clock in MHz, power in watts.
    Lines with "[N/A]", as of parts of a GPU, are left out."""
    rows = [line.split(", ") for line in told.splitlines() if "[" not in line]
    samples = [tuple(float(part) for part in row) for row in rows if len(row) == len(GPU_QUERY)]
    if not samples:
        return {}
    each: dict[float, list[float]] = defaultdict(list)
    for index, percent, _, _ in samples:
        each[index].append(percent / 100)
    return {
        "gpus": {
            "busy": mean(map(mean, each.values())),
            "idlest": min(map(mean, each.values())),
            "clock_mhz": mean(clock for _, _, clock, _ in samples),
            "power_w": mean(power for *_, power in samples),
        }
    }
