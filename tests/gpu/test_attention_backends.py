"""Attention backends on a CUDA device against dense attention, and the plan that measures them."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from encoder.metadata.segments import AttentionBackend, Segments
from encoder.towers.attention import attention
from encoder.towers.backends import BackendUnavailableError, load, unsupported_reason
from tests.gpu.test_kernels import borders, expected_attention, random
from tests.parity.reference_towers import relative_error

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
# Queries, weights and results are rounded to bfloat16; FlashAttention-2 rounds no more often than dense attention.
TOLERANCE = 6e-3
LENGTHS = [196, 64, 1, 1000, 300, 129]

BACKENDS = [backend for backend in AttentionBackend if backend is not AttentionBackend.SDPA]


def there(backend: AttentionBackend, head_dim: int) -> None:
    """Skips what this device or installation cannot have."""
    reason = unsupported_reason(backend, torch.cuda.get_device_capability(), torch.bfloat16, head_dim)
    if reason is not None:
        pytest.skip(f"{backend.value}: {reason}")
    try:
        load(backend)
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def packed(heads: int, dim: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of one tensor, as the towers have them."""
    q, k, v = random(rows, 3, heads, dim, dtype=torch.bfloat16).unbind(1)
    return q, k, v


@pytest.mark.parametrize("dim", [72, 80])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_dense_attention(backend: AttentionBackend, dim: int) -> None:
    there(backend, dim)
    q, k, v = packed(16, dim, sum(LENGTHS))
    found = attention(q, k, v, Segments(backend, borders(LENGTHS), max(LENGTHS)))
    assert found.shape == q.shape
    assert relative_error(found, expected_attention(q, k, v, LENGTHS)) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_every_layout_and_padding_is_inert(backend: AttentionBackend) -> None:
    """Rows past the last border are finite, as the towers leave them, and large."""
    there(backend, 72)
    rows, bound = 1024, 1024
    q, k, v = packed(2, 72, rows)
    cu_seqlens = borders([rows], 7)
    attend = load(backend)
    attend(q, k, v, cu_seqlens, bound)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k, v, cu_seqlens, bound)
    for lengths in ([1024], [100, 500, 3], [64] * 7, [1, 700]):
        total = sum(lengths)
        cu_seqlens.copy_(borders(lengths, 8 - len(lengths)))
        for tensor in (q, k, v):
            tensor.copy_(random(rows, 2, 72, dtype=torch.bfloat16, seed=total))
            tensor[total:] = 1e4
        graph.replay()
        expected = expected_attention(q[:total], k[:total], v[:total], lengths)
        assert relative_error(out[:total], expected) < TOLERANCE, lengths


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_plan_measures_and_says_what_it_chose(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton", reason="the plan may choose Triton's kernels")
    from encoder.fused.attention_plan import measure_backends

    with caplog.at_level(logging.INFO, logger="encoder.fused.attention_plan"):
        plan = measure_backends(16, 80, dtype, CUDA)
    records = list(caplog.records)
    if dtype == torch.float32:
        assert plan.few_rows is None
    else:
        assert f"attention over 257 to 1024 rows: {plan.few_rows}" in records.pop().getMessage()
    assert len(plan.kernels) == len(plan.lengths) == len(records)
    for length, way, record in zip(plan.lengths, plan.kernels, records, strict=True):
        assert f"segments of up to {length} patches: {way}" in record.getMessage()
        assert plan.kernel(length) == way
        assert unsupported_reason(way.backend, torch.cuda.get_device_capability(), dtype, 80) is None
