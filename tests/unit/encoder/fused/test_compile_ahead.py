"""Compiling GEMMs before the first run: the numbers of rows, and the pool of processes, which a stand-in replaces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

import pytest

from encoder.fused import compile_ahead as module
from encoder.fused.compile_ahead import ROWS, compile_ahead, start_pool_early
from encoder.fused.gemm import Epilogue
from encoder.fused.gemm_tiles import Tile, activation_tile, residual_tile, rotated_tile, split_tile
from encoder.metadata.geometry import Grid

MERGE_UNIT = 4
TOWERS = {
    "Qwen3-VL-8B": (1152, 4320, Epilogue.GELU_TANH, 4096, 1536),
    "Qwen3-VL-2B": (1024, 4104, Epilogue.GELU_TANH, 2048, 1536),
    "Qwen2.5-VL-7B": (1280, 3456, Epilogue.SWIGLU, 3584, 1176),
}
MULTIPROCESSORS = {"H100 SXM": 132, "H100 PCIe": 114, "H20": 78}


def kernels(rows: int, multiprocessors: int, tower: tuple[int, int, Epilogue, int, int]) -> set[tuple[str, Tile]]:
    """Returns the epilogue and the tile of each of QuACK's GEMMs in a batch."""
    hidden, inner, epilogue, width, patch = tower
    merged, tokens = MERGE_UNIT * hidden, rows // MERGE_UNIT
    up = 2 * inner if epilogue is Epilogue.SWIGLU else inner
    split = split_tile(rows, hidden, inner, multiprocessors)
    found = {
        ("none", activation_tile(Epilogue.NONE, rows, hidden, patch, multiprocessors)),
        ("none", activation_tile(Epilogue.NONE, tokens, width, merged, multiprocessors)),
        ("gelu", activation_tile(Epilogue.GELU, tokens, merged, merged, multiprocessors)),
        ("rotated", rotated_tile(rows, 3 * hidden, multiprocessors)),
        ("up", activation_tile(epilogue, rows, up, hidden, multiprocessors)),
        ("residual", residual_tile(rows, hidden, hidden, multiprocessors)),
        ("residual", None if split else residual_tile(rows, hidden, inner, multiprocessors)),
        ("split", split),
    }
    return {(name, tile) for name, tile in found if tile is not None}


@pytest.mark.parametrize("multiprocessors", MULTIPROCESSORS.values(), ids=MULTIPROCESSORS)
@pytest.mark.parametrize("tower", TOWERS.values(), ids=TOWERS)
def test_its_rows_need_every_kernel(tower: tuple[int, int, Epilogue, int, int], multiprocessors: int) -> None:
    ahead: set[tuple[str, Tile]] = set()
    for rows in ROWS:
        ahead |= kernels(rows, multiprocessors, tower)
    for rows in range(MERGE_UNIT, 65537, MERGE_UNIT):
        assert kernels(rows, multiprocessors, tower) <= ahead, rows


@dataclass
class Pool:
    """Reports that one more kernel is done at each question, and none beyond `able`."""

    submitted: int = 0
    able: int = 100
    done: int = 0
    events: list[str] = field(default_factory=list)

    def activate(self, jobs: int) -> Pool:
        self.events.append(f"{jobs} processes")
        return self

    def deactivate(self) -> None:
        self.events.append("ended")

    def stats(self) -> dict[str, int]:
        self.done = min(self.done + 1, self.able, self.submitted)
        return {"submitted": self.submitted, "done": self.done, "failed": 0}


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pool:
    stand_in = Pool()
    cache = ModuleType("quack.cache")
    vars(cache).update(async_compile=stand_in, get_cache_path=lambda: tmp_path)
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.cache", cache)
    monkeypatch.setattr(module, "_cpus", lambda: 16)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: stand_in.events.append("started"))
    monkeypatch.setattr(forkserver, "set_forkserver_preload", lambda names: stand_in.events.append(names[0]))
    monkeypatch.setattr(forkserver._forkserver, "_stop", lambda: stand_in.events.append("stopped"))
    return stand_in


def recorded(pool: Pool) -> tuple[list[Sequence[Grid]], Callable[[Sequence[Grid]], None]]:
    """Returns the calls of a run that asks for a kernel each time, and the run."""
    calls: list[Sequence[Grid]] = []

    def run(grids: Sequence[Grid]) -> None:
        calls.append(grids)
        pool.submitted += 1

    return calls, run


def test_it_runs_each_number_of_rows_and_each_batch_and_waits_for_all_kernels(pool: Pool) -> None:
    calls, run = recorded(pool)
    batches = [[(1, 4, 6), (2, 4, 4)], [(1, 72, 76)]]
    assert compile_ahead(run, batches) == len(ROWS) + 2
    assert [sum(t * h * w for t, h, w in grids) for grids in calls[:-2]] == list(ROWS)
    assert calls[-2:] == batches
    assert pool.done == pool.submitted
    assert pool.events == ["8 processes", "ended", "stopped"]


def test_a_pool_that_hangs_delays_the_start_by_a_limited_time(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes hold their parent's pipe, so that waiting for that one would take as long."""
    monkeypatch.setattr(module, "_LONGEST_S", 0.05)
    pool.able = 3
    _, run = recorded(pool)
    compile_ahead(run, [])
    assert pool.events == ["8 processes", "ended"]


def test_a_run_that_fails_ends_the_pool(pool: Pool) -> None:
    def run(grids: Sequence[Grid]) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        compile_ahead(run, [])
    assert pool.events == ["8 processes", "ended", "stopped"]


def test_with_few_cpus_kernels_are_compiled_when_they_are_needed(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cpus", lambda: 3)
    calls, run = recorded(pool)
    start_pool_early()
    assert compile_ahead(run, []) == 0
    assert calls == []
    assert pool.events == []


def test_the_pool_is_started_early_only_if_the_cache_is_empty(pool: Pool, tmp_path: Path) -> None:
    start_pool_early()
    assert pool.events == ["quack.cache._pool_preload", "started"]
    pool.events.clear()
    (tmp_path / "fingerprint").mkdir()
    (tmp_path / "fingerprint" / "key.o").write_bytes(b"")
    start_pool_early()
    assert pool.events == []
