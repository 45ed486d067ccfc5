"""The towers on a CUDA device: variable-length attention, dense attention in float32, and no waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from encoder.metadata.segments import AttentionBackend
from encoder.towers.attention import choose_backend
from encoder.towers.weights import load_tower
from tests.parity.reference_towers import Grid, Reference, make_reference, random_patches, relative_error

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

GRIDS: list[Grid] = [(1, 6, 10), (2, 10, 12), (1, 8, 8), (3, 4, 18), (1, 2, 2), (1, 34, 22), (1, 2, 120), (1, 50, 64)]
COUNTS = [t * h * w // 4 for t, h, w in GRIDS]

# Other kernels sum in another order. In float32 that stays where transformers' own kernels are; in bfloat16 the device
# rounds at the same places as the CPU, so its distance from float32 is the CPU's, up to chance.
FLOAT32_TOLERANCE = 1e-4
BFLOAT16_RATIO = 1.25
# Split products and another blocking of attention change single roundings, whose size the CPU's distance shows: 1e-2.
BATCH_TOLERANCE = 2e-2


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bfloat16_is_as_close_to_float32_as_the_cpu_is(reference: Reference) -> None:
    exact = load_tower(reference.path, dtype=torch.float32, device=CPU)
    patches = random_patches(GRIDS, exact.config.patch_dim)
    expected = exact(patches, exact.prepare(GRIDS))
    on_cpu = load_tower(reference.path, dtype=torch.bfloat16, device=CPU)
    on_gpu = load_tower(reference.path, dtype=torch.bfloat16, device=CUDA)
    assert choose_backend(on_gpu.device, on_gpu.dtype, on_gpu.config.head_dim) is AttentionBackend.VARLEN
    bound = BFLOAT16_RATIO * relative_error(on_cpu(patches, on_cpu.prepare(GRIDS)), expected)
    assert relative_error(on_gpu(patches.to(CUDA), on_gpu.prepare(GRIDS)).cpu(), expected) <= bound


def test_float32_uses_dense_attention_and_equals_the_cpu(reference: Reference) -> None:
    exact = load_tower(reference.path, dtype=torch.float32, device=CPU)
    tower = load_tower(reference.path, dtype=torch.float32, device=CUDA)
    assert choose_backend(tower.device, tower.dtype, tower.config.head_dim) is AttentionBackend.SDPA
    patches = random_patches(GRIDS, exact.config.patch_dim)
    expected = exact(patches, exact.prepare(GRIDS)).split(COUNTS)
    found = tower(patches.to(CUDA), tower.prepare(GRIDS)).cpu().split(COUNTS)
    for grid, ours, theirs in zip(GRIDS, found, expected, strict=True):
        assert relative_error(ours, theirs) < FLOAT32_TOLERANCE, f"grid {grid}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_prepare_nor_forward_waits_for_the_device(reference: Reference, dtype: torch.dtype) -> None:
    tower = load_tower(reference.path, dtype=dtype, device=CUDA)
    patches = random_patches(GRIDS, tower.config.patch_dim).to(CUDA)
    before = tower(patches, tower.prepare(GRIDS))
    with synchronisation_is_an_error():
        again = tower(patches, tower.prepare(GRIDS))
    assert torch.equal(before, again)


def test_an_image_alone_equals_the_image_among_others(reference: Reference) -> None:
    tower = load_tower(reference.path, dtype=torch.bfloat16, device=CUDA)
    patches = random_patches(GRIDS, tower.config.patch_dim).to(CUDA)
    together = tower(patches, tower.prepare(GRIDS)).split(COUNTS)
    for grid, rows, among in zip(GRIDS, patches.split([4 * count for count in COUNTS]), together, strict=True):
        alone = tower(rows, tower.prepare([grid]))
        assert relative_error(among, alone) < BATCH_TOLERANCE, f"grid {grid}"
