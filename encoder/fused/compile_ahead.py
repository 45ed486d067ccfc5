"""Compiles a tower's kernels before its first run, QuACK's GEMMs in parallel: one after the other, they are most of the
start of an encoder whose cache is empty.

QuACK's pool of processes compiles them without a GPU, into the cache on disk. A GEMM whose kernel is not ready leaves
its result undefined, so a forward runs to its end and names every kernel that it needs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from typing import Any

from encoder.metadata.geometry import Grid

logger = logging.getLogger(__name__)

# Eight processes and the one that they are forked from take 2.4 GiB of host memory. Fewer than four hardly help.
_MOST_PROCESSES, _FEWEST_CPUS = 8, 4
_LONGEST_S = 300.0
# Together they need every tile of published towers (tests/unit/encoder/fused/test_compile_ahead.py).
ROWS = (272, *range(64, 3457, 64))
_HEIGHT = 8


def start_pool_early() -> None:
    """Starts the process that the pool forks from if QuACK's cache is empty, and does not wait: it imports for
    seconds."""
    from quack.cache import get_cache_path

    if _cpus() >= _FEWEST_CPUS and not any(get_cache_path().rglob("*.o")):
        forkserver.set_forkserver_preload(["quack.cache._pool_preload"])
        forkserver.ensure_running()


def compile_ahead(run: Callable[[Sequence[Grid]], object], batches: Sequence[Sequence[Grid]]) -> int:
    """Compiles the kernels that `run` needs for any number of rows, and for `batches` of grids.

    Returns the number of GEMMs that were missing. What `run` computes is undefined.
    """
    from quack.cache import async_compile

    processes = min(_MOST_PROCESSES, _cpus())
    if processes < _FEWEST_CPUS:
        return 0
    started = time.monotonic()
    pool = async_compile.activate(processes)
    try:
        for grids in [*([(1, _HEIGHT, rows // _HEIGHT)] for rows in ROWS), *batches]:
            run(grids)
        while _unfinished(pool) and time.monotonic() - started < _LONGEST_S:
            time.sleep(0.02)
    finally:
        async_compile.deactivate()
        if not _unfinished(pool):
            # Nothing else ends it before this process does.
            forkserver._forkserver._stop()  # type: ignore[attr-defined] # noqa: SLF001
    counts = pool.stats()
    if counts["submitted"]:
        logger.info(
            "compiled %d of %d GEMMs in %d processes, %.1f s",
            counts["done"] - counts["failed"],
            counts["submitted"],
            processes,
            time.monotonic() - started,
        )
    return int(counts["submitted"])


def _unfinished(pool: Any) -> bool:  # noqa: ANN401 # QuACK has no types
    counts = pool.stats()
    return bool(counts["done"] < counts["submitted"])


def _cpus() -> int:
    return len(os.sched_getaffinity(0))
