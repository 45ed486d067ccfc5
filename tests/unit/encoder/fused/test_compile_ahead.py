"""Compiling GEMMs before the first run: the numbers of rows, and the pool of processes, which a stand-in replaces."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from encoder.fused import compile_ahead as module
from encoder.fused.compile_ahead import ROWS, available_cpus, compile_ahead, compile_processes, compiling_ahead
from encoder.fused.gemm import Epilogue
from encoder.fused.gemm_tiles import Tile, activation_tile, residual_tile, rotated_tile, split_tile
from encoder.metadata.geometry import Grid

MERGE_UNIT = 4
TOWERS = {
    "Qwen3-VL-8B": (1152, 4320, Epilogue.GELU_TANH, 4096, 1536),
    "Qwen3-VL-4B": (1024, 4104, Epilogue.GELU_TANH, 2560, 1536),
    "Qwen3-VL-2B": (1024, 4104, Epilogue.GELU_TANH, 2048, 1536),
    "Qwen3-VL-32B": (1152, 4320, Epilogue.GELU_TANH, 5120, 1536),
    "Qwen2.5-VL-3B": (1280, 3456, Epilogue.SWIGLU, 2048, None),
    "Qwen2.5-VL-7B": (1280, 3456, Epilogue.SWIGLU, 3584, None),
    "Qwen2.5-VL-32B": (1280, 3456, Epilogue.SWIGLU, 5120, None),
}
"""Hidden features, the MLP's as padded, its activation, features of a level's output, and of a patch: None if cuBLAS
embeds patches, since there is no bias."""
MULTIPROCESSORS = {"H100 SXM": 132, "H100 PCIe": 114, "H20": 78}

Tower = tuple[int, int, Epilogue, int, int | None]


def kernels(rows: int, multiprocessors: int, tower: Tower) -> set[tuple[str, Tile]]:
    """Returns the epilogue and the tile of each of QuACK's GEMMs in a batch."""
    hidden, inner, epilogue, width, patch = tower
    merged, tokens = MERGE_UNIT * hidden, rows // MERGE_UNIT
    up = 2 * inner if epilogue is Epilogue.SWIGLU else inner
    split = split_tile(rows, hidden, inner, multiprocessors)
    found = {
        ("none", activation_tile(Epilogue.NONE, tokens, width, merged, multiprocessors)),
        ("gelu", activation_tile(Epilogue.GELU, tokens, merged, merged, multiprocessors)),
        ("rotated", rotated_tile(rows, 3 * hidden, multiprocessors)),
        ("up", activation_tile(epilogue, rows, up, hidden, multiprocessors)),
        ("residual", residual_tile(rows, hidden, hidden, multiprocessors)),
        ("residual", None if split else residual_tile(rows, hidden, inner, multiprocessors)),
        ("split", split),
    }
    if patch is not None:
        found.add(("none", activation_tile(Epilogue.NONE, rows, hidden, patch, multiprocessors)))
    return {(name, tile) for name, tile in found if tile is not None}


@pytest.mark.parametrize("multiprocessors", MULTIPROCESSORS.values(), ids=MULTIPROCESSORS)
@pytest.mark.parametrize("tower", TOWERS.values(), ids=TOWERS)
def test_its_rows_need_every_kernel(tower: Tower, multiprocessors: int) -> None:
    ahead: set[tuple[str, Tile]] = set()
    for rows in ROWS:
        ahead |= kernels(rows, multiprocessors, tower)
    for rows in range(MERGE_UNIT, 65537, MERGE_UNIT):
        assert kernels(rows, multiprocessors, tower) <= ahead, rows


class Process:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def kill(self) -> None:
        self._events.append("killed")


@dataclass
class Pool:
    """Reports that one more kernel is done at each question, and none beyond `able`."""

    submitted: int = 0
    able: int = 100
    done: int = 0
    events: list[str] = field(default_factory=list)
    device: str | None = "90"

    @property
    def _executor(self) -> SimpleNamespace:
        return SimpleNamespace(_processes={1: Process(self.events)})

    def _detect_arch_env(self) -> tuple[str | None, str | None]:
        return os.environ.get("QUACK_ARCH", self.device), os.environ.get("CUTE_DSL_ARCH", self.device and "sm_90a")

    def activate(self, jobs: int) -> Pool:
        self.events.append(f"{jobs} processes")
        return self

    def deactivate(self) -> None:
        self.events.append("ended")

    def stats(self) -> dict[str, Any]:
        self.done = min(self.done + 1, self.able, self.submitted)
        lost = [("key", "no memory")] if self.able < self.submitted else []
        return {"submitted": self.submitted, "done": self.done, "failed": 0, "errors": lost}


PRELOAD, NO_PRELOAD = "preload ['quack.cache._pool_preload']", "preload []"


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pool:
    stand_in = Pool()
    cache = ModuleType("quack.cache")
    vars(cache).update(async_compile=stand_in, get_cache_path=lambda: tmp_path, CACHE_ENABLED=True)
    quack = ModuleType("quack")
    vars(quack).update(cache=cache)
    monkeypatch.setitem(sys.modules, "quack", quack)
    monkeypatch.setitem(sys.modules, "quack.cache", cache)
    for name in ("QUACK_ARCH", "CUTE_DSL_ARCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "available_cpus", lambda: 16)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: stand_in.events.append("started"))
    monkeypatch.setattr(forkserver, "set_forkserver_preload", lambda names: stand_in.events.append(f"preload {names}"))
    monkeypatch.setattr(forkserver._forkserver, "_stop", lambda: stand_in.events.append("stopped"))
    return stand_in


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *values: said.append(text % values))
    return said


def recorded(pool: Pool) -> tuple[list[Sequence[Grid]], Callable[[Sequence[Grid]], None]]:
    """Returns the calls of a run that asks for a kernel each time, and the run."""
    calls: list[Sequence[Grid]] = []

    def run(grids: Sequence[Grid]) -> None:
        assert compiling_ahead.get()
        calls.append(grids)
        pool.submitted += 1

    return calls, run


def test_it_runs_each_number_of_rows_and_each_batch_and_waits_for_all_kernels(pool: Pool) -> None:
    calls, run = recorded(pool)
    batches = [[(1, 4, 6), (2, 4, 4)], [(1, 72, 76)]]
    with compile_processes():
        compile_ahead(run, batches)
    assert [sum(t * h * w for t, h, w in grids) for grids in calls[:-2]] == list(ROWS)
    assert calls[-2:] == batches
    assert pool.done == pool.submitted == len(calls)
    assert pool.events == [PRELOAD, "started", "8 processes", "ended", NO_PRELOAD, "stopped"]
    assert not compiling_ahead.get()


def test_a_pool_that_hangs_is_killed(pool: Pool, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    """Its processes hold locks that other encoders wait for."""
    monkeypatch.setattr(module, "_LONGEST_S", 0.05)
    pool.able = 3
    _, run = recorded(pool)
    with compile_processes():
        compile_ahead(run, [])
    assert pool.events[2:] == ["8 processes", "killed", "ended", NO_PRELOAD, "stopped"]
    assert warnings == ["GEMMs are compiled when they are needed, because: no memory"]


@pytest.mark.parametrize("error", [BrokenProcessPool("a process ended"), EOFError(), OSError("AF_UNIX path too long")])
def test_a_pool_that_fails_costs_time_only(pool: Pool, error: Exception, warnings: list[str]) -> None:
    def run(grids: Sequence[Grid]) -> None:
        raise error

    with compile_processes():
        compile_ahead(run, [])
    assert warnings == [f"the processes that compile GEMMs ahead failed: {error!r}"]
    assert pool.events[-3:] == ["ended", NO_PRELOAD, "stopped"]


def test_a_run_that_fails_ends_the_pool(pool: Pool) -> None:
    def run(grids: Sequence[Grid]) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"), compile_processes():
        compile_ahead(run, [])
    assert pool.events[-3:] == ["ended", NO_PRELOAD, "stopped"]
    assert not compiling_ahead.get()


@pytest.mark.parametrize("reason", ["few CPUs", "a server of others", "no cache", "outside"])
def test_otherwise_kernels_are_compiled_when_they_are_needed(
    reason: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "few CPUs":
        monkeypatch.setattr(module, "available_cpus", lambda: 3)
    if reason == "a server of others":
        monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", 1)
    if reason == "no cache":
        monkeypatch.setattr(sys.modules["quack.cache"], "CACHE_ENABLED", False)
    calls, run = recorded(pool)
    with nullcontext() if reason == "outside" else compile_processes():
        compile_ahead(run, [])
    assert calls == []
    assert pool.events == []


@pytest.mark.parametrize(
    ("device", "given", "target"),
    [
        ("90", {}, ("90", "sm_90a")),
        ("90", {"CUTE_DSL_ARCH": "sm_80"}, ("90", "sm_80")),
        (None, {}, (None, None)),
    ],
)
def test_the_processes_start_with_the_target_in_their_environment(
    device: str | None,
    given: dict[str, str],
    target: tuple[str | None, str | None],
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler reads it as it is imported. Afterwards the environment is as before."""
    found: list[tuple[str | None, str | None]] = []
    names = "QUACK_ARCH", "CUTE_DSL_ARCH"
    pool.device = device
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    monkeypatch.setattr(
        forkserver, "ensure_running", lambda: found.append((os.environ.get(names[0]), os.environ.get(names[1])))
    )
    with compile_processes():
        pass
    assert found == [target]
    assert dict(os.environ) == before


def test_with_kernels_in_the_cache_processes_start_when_one_is_missing(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "fingerprint").mkdir()
    (tmp_path / "fingerprint" / "key.o").write_bytes(b"")
    with compile_processes():
        assert pool.events == [PRELOAD]
    assert pool.events == [PRELOAD, NO_PRELOAD, "stopped"]


def test_a_server_that_cannot_start_does_not_matter(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(forkserver, "ensure_running", fails)
    with compile_processes():
        pass
    assert pool.events[-1] == "stopped"


@pytest.mark.parametrize(
    ("written", "cpus"), [("max 100000", 16), ("400000 100000", 4), ("150000 100000", 2), ("9900000 100000", 16)]
)
def test_a_containers_quota_bounds_the_cpus(
    written: str, cpus: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    (tmp_path / "cpu.max").write_text(written + "\n")
    monkeypatch.setattr(module, "_CPU_QUOTA", tmp_path / "cpu.max")
    assert available_cpus() == cpus
    monkeypatch.setattr(module, "_CPU_QUOTA", tmp_path / "none")
    assert available_cpus() == 16
