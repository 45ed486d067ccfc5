"""Compiles a tower's kernels before its first run, QuACK's GEMMs in parallel: one after the other, they are most of the
start of an encoder whose cache is empty.

QuACK's pool of processes compiles them without a GPU, into the cache on disk. A GEMM whose kernel is not ready leaves
its result undefined, so a forward runs to its end and names every kernel that it needs. Whatever the pool fails to
compile is compiled in this process when it is needed.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from encoder.metadata.geometry import Grid

logger = logging.getLogger(__name__)

# Eight processes and the one that they are forked from take 2.4 GiB of host memory. Fewer than four hardly help.
_MOST_PROCESSES, _FEWEST_CPUS = 8, 4
_LONGEST_S = 300.0
_POOL_ERRORS = (BrokenExecutor, OSError, EOFError)
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# Together they need every kernel of published towers (tests/unit/encoder/fused/test_compile_ahead.py).
ROWS = (272, *range(64, 3457, 64), 4352, 12288)
_HEIGHT = 8

_processes: ContextVar[int] = ContextVar("_processes", default=0)
compiling_ahead: ContextVar[bool] = ContextVar("compiling_ahead", default=False)
"""Whether this thread runs GEMMs only to compile their kernels."""


@contextmanager
def compile_processes() -> Iterator[None]:
    """Lets `compile_ahead` start processes within it, and ends them.

    If the cache is empty, the one that they are forked from starts at once: it imports its packages for seconds.
    """
    from quack import cache

    server: Any = forkserver._forkserver  # noqa: SLF001
    processes = min(_MOST_PROCESSES, available_cpus())
    # The server of another part of this process has not imported QuACK, and must not be stopped.
    elsewhere = server._forkserver_pid is not None  # noqa: SLF001
    if processes < _FEWEST_CPUS or elsewhere or multiprocessing.current_process().daemon or not cache.CACHE_ENABLED:
        yield
        return
    # The compiler reads its target as it is imported. QuACK before 0.6.4 sets it later: too late for its processes.
    target = zip(("QUACK_ARCH", "CUTE_DSL_ARCH"), cache.async_compile._detect_arch_env(), strict=True)  # noqa: SLF001
    added = {name: value for name, value in target if name not in os.environ and value}
    os.environ.update(added)
    forkserver.set_forkserver_preload(["quack.cache._pool_preload"])
    token = _processes.set(processes)
    try:
        if not any(cache.get_cache_path().rglob("*.o")):
            with suppress(OSError):  # `compile_ahead` meets and reports it again
                forkserver.ensure_running()
        yield
    finally:
        _processes.reset(token)
        for name in added:
            del os.environ[name]
        forkserver.set_forkserver_preload([])
        server._stop()  # noqa: SLF001 # nothing else ends it before this process ends


def compile_ahead(run: Callable[[Sequence[Grid]], object], batches: Sequence[Sequence[Grid]]) -> None:
    """Compiles the kernels that `run` needs for any number of rows, and for `batches` of grids. What `run` computes is
    undefined. Does nothing outside `compile_processes`, or if it does nothing."""
    from quack.cache import async_compile

    if not (processes := _processes.get()):
        return
    started = time.monotonic()
    pool = async_compile.activate(processes)
    token = compiling_ahead.set(True)
    try:
        for grids in [*([(1, _HEIGHT, rows // _HEIGHT)] for rows in ROWS), *batches]:
            run(grids)
        while (counts := pool.stats())["done"] < counts["submitted"] and time.monotonic() - started < _LONGEST_S:
            time.sleep(0.02)
    except _POOL_ERRORS as error:
        logger.warning("the processes that compile GEMMs ahead failed: %s", repr(error))
    finally:
        compiling_ahead.reset(token)
        counts = pool.stats()
        if counts["done"] < counts["submitted"]:
            _kill(pool)
        async_compile.deactivate()
    if counts["submitted"]:
        compiled = counts["done"] - counts["failed"]
        seconds = time.monotonic() - started
        logger.info(
            "compiled %d of %d GEMMs in %d processes, %.1f s", compiled, counts["submitted"], processes, seconds
        )
    for _, reason in counts["errors"][:1]:
        logger.warning("GEMMs are compiled when they are needed, because: %s", reason)


def _kill(pool: Any) -> None:  # noqa: ANN401 # QuACK has no types
    """Kills the processes of a pool that does not finish: they hold their kernels' locks, and this process's exit."""
    for process in list(pool._executor._processes.values()):  # noqa: SLF001
        process.kill()


def available_cpus() -> int:
    """Returns the number of CPUs that this process may use, at most its container's quota rounded up."""
    cpus = len(os.sched_getaffinity(0))
    if _CPU_QUOTA.exists():
        quota, period = _CPU_QUOTA.read_text().split()
        if quota != "max":
            cpus = min(cpus, -(-int(quota) // int(period)))
    return cpus
