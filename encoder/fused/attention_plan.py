"""Measures the installed attention backends for one tower on one device, and chooses one for each length class and for
batches of few rows.

Calls are timed inside a captured graph, since only device time counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from encoder.device_errors import check_device, is_out_of_memory
from encoder.fused.rope_attention import (
    FEW_ROWS,
    AttentionKernel,
    AttentionPlan,
    rotary_attention,
    table_dtype,
    tile_segments,
)
from encoder.kernels.rope import rope_table
from encoder.kernels.short_attention import LONGEST
from encoder.kernels.tiles import FEW_ROWS_TILES
from encoder.metadata.segments import AttentionBackend, Segments
from encoder.towers.backends import BackendUnavailableError, check_backend

logger = logging.getLogger(__name__)

# Upper bound of each length class and the length measured for it: windows of Qwen2.5-VL, then images of 224², 448² and
# 896² with patches of 16. The bounds themselves are multiples of every block size there and would favour one backend.
_CLASSES = {64: 64, 256: 196, 1024: 784, 4096: 3136}
# Fills a large device without taking long.
_ROWS = 8192
_CALLS, _REPLAYS = 2, 3
# Length of the one segment that is measured for batches of `FEW_ROWS`.
_FEW_LENGTH, _FEW_CALLS, _FEW_REPLAYS = 512, 8, 9
# Another kernel is preferred only if it takes less than this share of the time, so that noise does not decide.
_MARGIN = 0.97

_KERNELS = (
    AttentionKernel(AttentionBackend.TRITON, rotates=True),
    AttentionKernel(AttentionBackend.TRITON),
    AttentionKernel(AttentionBackend.VARLEN),
    AttentionKernel(AttentionBackend.FLASH_ATTN),
    AttentionKernel(AttentionBackend.FA3),
    AttentionKernel(AttentionBackend.FA4),
)


def measure_backends(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    """Returns the fastest kernel, rotary positions included, for each length class and for batches of few rows; logs
    the choices and the times.

    Takes some tenths of a second, and 1 to 2 s more if FlashAttention-4 must be compiled. Raises
    `BackendUnavailableError` if no backend fits.
    """
    measure = partial(_microseconds, heads=heads, head_dim=head_dim, dtype=dtype, device=device)
    kernels = [
        kernel for kernel in _KERNELS if _available(kernel, dtype, head_dim, device) and _runs(kernel, measure, device)
    ]
    if not kernels:
        raise BackendUnavailableError(f"no attention backend for {dtype}, head dimension {head_dim}, on {device}")
    # float32 is for parity and has one kernel, so one length is measured.
    classes = dict(_CLASSES) if dtype != torch.float32 else {64: 64}
    costs = {
        bound: {
            kernel: measure(kernel, length, _ROWS // length, calls=_CALLS, replays=_REPLAYS)
            for kernel in kernels
            if not kernel.rotates or length <= LONGEST
        }
        for bound, length in classes.items()
    }
    best = chosen_kernels(list(costs.values()))
    for (bound, measured), chosen in zip(costs.items(), best, strict=True):
        logger.info("attention over segments of up to %d patches: %s", bound, _described(chosen, measured))
    few_rows = None
    if dtype != torch.float32:
        measured = {
            kernel: measure(kernel, _FEW_LENGTH, 1, calls=_FEW_CALLS, replays=_FEW_REPLAYS)
            for kernel in _with_tiles(kernels)
        }
        few_rows = min(measured, key=measured.__getitem__)
        logger.info("attention over %d to %d rows: %s", FEW_ROWS[0], FEW_ROWS[-1], _described(few_rows, measured))
    return AttentionPlan(tuple(classes), tuple(best), few_rows)


def _described(chosen: AttentionKernel, measured: Mapping[AttentionKernel, float]) -> str:
    return f"{chosen} ({', '.join(f'{kernel} {cost:.1f} µs' for kernel, cost in measured.items())})"


def _with_tiles(kernels: Iterable[AttentionKernel]) -> list[AttentionKernel]:
    """Returns the kernels that do not rotate, Triton's with each tile for few rows."""
    return [
        replace(kernel, tile=tile)
        for kernel in kernels
        if not kernel.rotates
        for tile in (FEW_ROWS_TILES if kernel.backend is AttentionBackend.TRITON else (None,))
    ]


def chosen_kernels(costs: Sequence[Mapping[AttentionKernel, float]]) -> list[AttentionKernel]:
    """Returns the kernel of each length class, in ascending order, by measured time.

    In a tie, the kernel of the preceding class is kept, since each change of kernels needs separate graphs.
    """
    best: list[AttentionKernel] = []
    for measured in costs:
        fastest = min(measured, key=measured.__getitem__)
        before = best[-1] if best else next(iter(measured))
        draws = before in measured and _MARGIN * measured[before] <= measured[fastest]
        best.append(before if draws else fastest)
    return best


def _available(kernel: AttentionKernel, dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    try:
        check_backend(kernel.backend, dtype, head_dim, device)
    except BackendUnavailableError:
        return False
    return True


def _runs(kernel: AttentionKernel, measure: Callable[..., float], device: torch.device) -> bool:
    """Whether a kernel runs: an installed package need not have it for this GPU. Raises if it left the device
    unusable."""
    try:
        measure(kernel, 64, _ROWS // 64, calls=1, replays=1)
    except Exception as error:  # kernel compilers raise exceptions of their own classes
        if is_out_of_memory(error):
            raise
        check_device(device)
        logger.warning("attention is computed without %s, which failed: %s", kernel, error)
        return False
    return True


@torch.inference_mode()
def _microseconds(
    kernel: AttentionKernel,
    length: int,
    segments: int,
    *,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    calls: int,
    replays: int,
) -> float:
    """Device time of a layer's rotary positions and attention over `segments` of `length`: the median of `replays`
    replays of a graph of `calls` calls."""
    rows = segments * length
    with torch.cuda.device(device):
        qkv = torch.randn(rows, 3 * heads * head_dim, device=device, dtype=dtype)
        borders = torch.arange(0, rows + 1, length, dtype=torch.int32, device=device)
        positions = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        frequencies = torch.ones(head_dim // 4, device=device)
        table = rope_table(positions, frequencies, table_dtype(dtype))
        tiled = tile_segments(Segments(kernel.backend, borders, length), rows, dtype, AttentionPlan.single(kernel))

        def run() -> None:
            for _ in range(calls):
                rotary_attention(qkv, table, tiled, heads)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        times = []
        for _ in range(replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)))
        return 1000 * sorted(times)[len(times) // 2] / calls
