"""Measures the attention backends that are there, for one tower on one device, and says which runs where.

Device time alone counts, so calls are timed inside a captured graph. It must not know layers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from encoder.attention import AttentionBackend, Segments
from encoder.attention_backends import BackendUnavailableError, load, unfit
from encoder.fused_attention import AttentionPlan, Way, cut_rows, rotary_attention, table_dtype
from encoder.kernels.rope import rope_table
from encoder.kernels.short_attention import LONGEST

logger = logging.getLogger(__name__)

# Classes of lengths, and the length that speaks for each: windows of Qwen2.5-VL, then images of 224², 448² and 896²
# with patches of 16. Not the bounds themselves: a multiple of every block there is flatters the one it fits best.
_CLASSES = {64: 64, 256: 196, 1024: 784, 4096: 3136}
# Enough to fill a large device, not enough to take long.
_ROWS = 8192
_CALLS, _REPLAYS = 2, 3
# A way that is not clearly better must not be preferred by chance.
_MARGIN = 0.97

_WAYS = (
    Way(AttentionBackend.TRITON, turns=True),
    Way(AttentionBackend.TRITON),
    Way(AttentionBackend.VARLEN),
    Way(AttentionBackend.FLASH_ATTN),
    Way(AttentionBackend.FA3),
    Way(AttentionBackend.FA4),
)


def measure_backends(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    """The fastest way, rotary positions included, for each class of segment lengths; logs what it chose and why.

    Takes some tenths of a second, and 1 to 2 s more where FlashAttention-4 has to be compiled.
    """
    ways = [way for way in _WAYS if _there(way, dtype, head_dim, device)]
    if not ways:
        raise BackendUnavailableError(f"no attention backend for {dtype}, head dimension {head_dim}, on {device}")
    # float32 is there for parity and has one way: measuring it at one length says which.
    classes = dict(_CLASSES) if dtype != torch.float32 else {64: 64}
    costs = {
        bound: {
            way: _microseconds(way, length, heads, head_dim, dtype, device)
            for way in ways
            if not way.turns or length <= LONGEST
        }
        for bound, length in classes.items()
    }
    best = chosen_ways(list(costs.values()))
    for (bound, measured), chosen in zip(costs.items(), best, strict=True):
        logger.info(
            "attention over segments of up to %d patches: %s (%s)",
            bound,
            chosen,
            ", ".join(f"{way} {cost:.0f} µs" for way, cost in measured.items()),
        )
    return AttentionPlan(tuple(classes), tuple(best))


def chosen_ways(costs: Sequence[Mapping[Way, float]]) -> list[Way]:
    """The way of each class of lengths, ascending, by what each way costs there.

    A draw goes to the way of the class before: each change of ways asks for graphs of its own.
    """
    best: list[Way] = []
    for measured in costs:
        fastest = min(measured, key=measured.__getitem__)
        before = best[-1] if best else next(iter(measured))
        draws = before in measured and _MARGIN * measured[before] <= measured[fastest]
        best.append(before if draws else fastest)
    return best


def check_plan(plan: AttentionPlan, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises `BackendUnavailableError` for a backend that does not fit, or that is missing, with what to install."""
    for way in plan.ways:
        reason = unfit(way.backend, torch.cuda.get_device_capability(device), dtype, head_dim)
        if reason is not None:
            raise BackendUnavailableError(f"attention backend {way.backend.value!r}: {reason}")
        load(way.backend)


def _there(way: Way, dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    try:
        check_plan(AttentionPlan.single(way), head_dim, dtype, device)
    except BackendUnavailableError:
        return False
    return True


@torch.inference_mode()
def _microseconds(way: Way, length: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> float:
    """Of one layer's rotary positions and attention over about `_ROWS` rows cut into segments of `length`."""
    rows = _ROWS // length * length
    with torch.cuda.device(device):
        qkv = torch.randn(rows, 3 * heads * head_dim, device=device, dtype=dtype)
        borders = torch.arange(0, rows + 1, length, dtype=torch.int32, device=device)
        positions = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        frequencies = torch.ones(head_dim // 4, device=device)
        table = rope_table(positions, frequencies, table_dtype(dtype))
        cut = cut_rows(Segments(way.backend, borders, length), rows, dtype, AttentionPlan.single(way))

        def run() -> None:
            for _ in range(_CALLS):
                rotary_attention(qkv, table, cut, heads)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        times = []
        for _ in range(_REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)))
        return 1000 * sorted(times)[len(times) // 2] / _CALLS
