"""The fused towers against the eager ones: numbers, padding, graphs, and no waiting for the device."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="the fused towers are made of Triton's kernels")

from benchmarks.ladder.towers import config_of, random_tower  # noqa: E402
from configs.encoder_config import EncoderConfig  # noqa: E402
from encoder.forwards import choose_forward  # noqa: E402
from encoder.fused.gemm import CublasGemm  # noqa: E402
from encoder.fused.rope_attention import AttentionKernel, AttentionPlan  # noqa: E402
from encoder.fused.tower import FusedTower, fuse  # noqa: E402
from encoder.metadata.segments import AttentionBackend, Segments  # noqa: E402
from encoder.metadata.tower_metadata import TowerMetadata  # noqa: E402
from encoder.start_check import StartCheck  # noqa: E402
from encoder.towers.weights import load_tower  # noqa: E402
from tests.gpu.test_towers_gpu import synchronisation_is_an_error  # noqa: E402
from tests.parity.reference_towers import Grid, Reference, make_reference, random_patches, relative_error  # noqa: E402

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16]

GRIDS: list[Grid] = [(1, 6, 10), (2, 10, 12), (1, 8, 8), (3, 4, 18), (1, 2, 2), (1, 34, 22), (1, 2, 120), (1, 50, 64)]
COUNTS = [t * h * w // 4 for t, h, w in GRIDS]
PLANS = {
    "ours": AttentionPlan.single(AttentionKernel(AttentionBackend.TRITON, rotates=True)),
    "ours, turned before": AttentionPlan.single(AttentionKernel(AttentionBackend.TRITON)),
    "torch's": AttentionPlan(
        (64,), (AttentionKernel(AttentionBackend.TRITON, rotates=True), AttentionKernel(AttentionBackend.VARLEN))
    ),
}
# Other kernels sum in another order. In bfloat16 the fused tower rounds less often than the eager one, and less may be
# no more than chance allows.
FLOAT32_TOLERANCE = 1e-4
BFLOAT16_RATIO = 1.2
# Split products and other blocks change single roundings, whose size the distance from float32 shows: 1e-2.
BATCH_TOLERANCE = 2e-2


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


def exact(reference: Reference, patches: Tensor, grid_thw: list[Grid]) -> Tensor:
    tower = load_tower(reference.path, dtype=torch.float32, device=CPU)
    return tower(patches, tower.prepare(grid_thw))


def fused(reference: Reference, dtype: torch.dtype, plan: str = "ours") -> FusedTower:
    return fuse(load_tower(reference.path, dtype=dtype, device=CUDA), PLANS[plan], CublasGemm())


def patches_of(reference: Reference, grid_thw: list[Grid]) -> Tensor:
    return random_patches(grid_thw, load_tower(reference.path, dtype=torch.float32, device=CPU).config.patch_dim)


@pytest.mark.parametrize("plan", ["ours", "ours, turned before"])
def test_float32_equals_the_eager_tower_for_each_image(reference: Reference, plan: str) -> None:
    patches = patches_of(reference, GRIDS)
    tower = fused(reference, torch.float32, plan)
    found = tower(patches.to(CUDA), tower.prepare(GRIDS)).cpu().split(COUNTS)
    for grid, ours, theirs in zip(GRIDS, found, exact(reference, patches, GRIDS).split(COUNTS), strict=True):
        assert relative_error(ours, theirs) < FLOAT32_TOLERANCE, f"grid {grid}"


@pytest.mark.parametrize("plan", PLANS)
def test_bfloat16_is_as_close_to_float32_as_the_eager_tower(reference: Reference, plan: str) -> None:
    patches = patches_of(reference, GRIDS)
    expected = exact(reference, patches, GRIDS)
    eager = load_tower(reference.path, dtype=torch.bfloat16, device=CUDA)
    theirs = relative_error(eager(patches.to(CUDA), eager.prepare(GRIDS)).cpu(), expected)
    tower = fuse(eager, PLANS[plan], CublasGemm())
    assert relative_error(tower(patches.to(CUDA), tower.prepare(GRIDS)).cpu(), expected) <= BFLOAT16_RATIO * theirs


def test_what_is_installed_is_chosen_and_right(reference: Reference) -> None:
    """All that `fuse` chooses by itself: backends by measuring, products by what is there."""
    grid_thw: list[Grid] = [(1, 40, 60), (1, 34, 22), (2, 10, 12)]
    patches = patches_of(reference, grid_thw)
    expected = exact(reference, patches, grid_thw)
    eager = load_tower(reference.path, dtype=torch.bfloat16, device=CUDA)
    theirs = relative_error(eager(patches.to(CUDA), eager.prepare(grid_thw)).cpu(), expected)
    tower = fuse(eager)
    assert (tower.config, tower.dtype, tower.device) == (eager.config, eager.dtype, eager.device)
    found = tower(patches.to(CUDA), tower.prepare(grid_thw))
    assert relative_error(found.cpu(), expected) <= BFLOAT16_RATIO * theirs


def test_the_check_at_the_start_takes_less_than_two_seconds() -> None:
    """Of Qwen3-VL-8B's tower with random weights, once its kernels are compiled, which is what the first check does."""
    config = config_of("qwen3_vl", tiny=False, dtype="bfloat16")
    tower = random_tower(config, seed=0, dtype=torch.bfloat16, device=CUDA)
    forward = choose_forward(tower, EncoderConfig(fused_kernels=True))  # with the first check
    torch.cuda.synchronize()
    began = time.perf_counter()
    StartCheck(tower)(forward.run_grids)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 2


def padded(
    patches: Tensor, metadata: TowerMetadata, rows: int, segments: int, longest: int, garbage: float
) -> tuple[Tensor, TowerMetadata]:
    """The batch in fixed sizes: borders padded with the last one, everything else past the batch garbage in range."""
    tokens, extra = rows // 4, rows - metadata.num_patches

    def more(tensor: Tensor | None, fill: float) -> Tensor | None:
        if tensor is None:
            return None
        return torch.cat((tensor, tensor.new_full((extra, *tensor.shape[1:]), fill)))

    def cut(part: Segments | None, bound: int) -> Segments | None:
        if part is None:
            return None
        last = part.cu_seqlens[-1:].expand(segments + 1 - part.cu_seqlens.numel())
        return dataclasses.replace(part, cu_seqlens=torch.cat((part.cu_seqlens, last)), max_seqlen=bound)

    rope, frames = more(metadata.rope_positions, 999), cut(metadata.frames, longest)
    wide = more(patches, garbage)
    assert rope is not None
    assert frames is not None
    assert wide is not None
    in_place = torch.arange(metadata.num_tokens, tokens, device=CUDA, dtype=torch.int32)
    order, inverse = metadata.window_order, metadata.window_inverse
    return wide, dataclasses.replace(
        metadata,
        num_patches=rows,
        num_tokens=tokens,
        rope_positions=rope,
        frames=frames,
        windows=cut(metadata.windows, 64),
        position_indices=more(metadata.position_indices, 2303),
        position_weights=more(metadata.position_weights, garbage),
        window_order=None if order is None else torch.cat((order, in_place)),
        window_inverse=None if inverse is None else torch.cat((inverse, in_place)),
    )


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_garbage_in_padding_changes_nothing(reference: Reference, dtype: torch.dtype, garbage: float) -> None:
    tower = fused(reference, dtype)
    patches = patches_of(reference, GRIDS).to(CUDA, dtype)
    metadata = tower.prepare(GRIDS)
    rows = metadata.num_patches + 412
    clean = tower(*padded(patches, metadata, rows, 400, 5000, 0.0))
    spoilt = tower(*padded(patches, metadata, rows, 400, 5000, garbage))
    assert torch.equal(clean[: metadata.num_tokens], spoilt[: metadata.num_tokens])
    expected = tower(patches, metadata)
    assert relative_error(spoilt[: metadata.num_tokens], expected) < (
        1e-5 if dtype == torch.float32 else BATCH_TOLERANCE
    )


@pytest.mark.parametrize("plan", ["ours", "torch's"])
def test_one_graph_serves_every_layout(reference: Reference, plan: str) -> None:
    """Layouts with the same and with smaller sums, one after the other, the padding full of NaN."""
    rows, longest = 1200, 1200
    layouts: list[list[Grid]] = [
        [(1, 30, 40)],
        [(1, 20, 30), (1, 30, 20)],
        [(1, 8, 8)] * 5,
        [(1, 2, 2)],
        [(2, 10, 12), (1, 34, 22)],
    ]
    tower = fused(reference, torch.bfloat16, plan)

    def batch(grid_thw: list[Grid]) -> tuple[Tensor, TowerMetadata]:
        patches = patches_of(reference, grid_thw).to(CUDA, torch.bfloat16)
        return padded(patches, tower.prepare(grid_thw), rows, 400, longest, float("nan"))

    static_patches, static = batch(layouts[0])
    tower(static_patches, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tower(static_patches, static)
    for grid_thw in layouts:
        patches, metadata = batch(grid_thw)
        static_patches.copy_(patches)
        copy_into(static, metadata)
        graph.replay()
        tokens = sum(t * h * w for t, h, w in grid_thw) // 4
        alone = tower(patches_of(reference, grid_thw).to(CUDA), tower.prepare(grid_thw))
        assert relative_error(out[:tokens], alone) < BATCH_TOLERANCE, grid_thw


def copy_into(static: TowerMetadata, metadata: TowerMetadata) -> None:
    for field in dataclasses.fields(metadata):
        target, source = getattr(static, field.name), getattr(metadata, field.name)
        if isinstance(target, Segments):
            target, source = target.cu_seqlens, source.cu_seqlens
        if isinstance(target, Tensor):
            target.copy_(source)


@pytest.mark.parametrize("plan", PLANS)
def test_neither_prepare_nor_forward_waits_for_the_device(reference: Reference, plan: str) -> None:
    tower = fused(reference, torch.bfloat16, plan)
    patches = patches_of(reference, GRIDS).to(CUDA)
    before = tower(patches, tower.prepare(GRIDS))
    with synchronisation_is_an_error():
        again = tower(patches, tower.prepare(GRIDS))
    assert torch.equal(before, again)


def test_an_image_alone_equals_the_image_among_others(reference: Reference) -> None:
    tower = fused(reference, torch.bfloat16)
    patches = patches_of(reference, GRIDS).to(CUDA)
    together = tower(patches, tower.prepare(GRIDS)).split(COUNTS)
    for grid, rows, among in zip(GRIDS, patches.split([4 * count for count in COUNTS]), together, strict=True):
        assert relative_error(among, tower(rows, tower.prepare([grid]))) < BATCH_TOLERANCE, f"grid {grid}"


def test_the_patches_and_the_weights_are_left_alone(reference: Reference) -> None:
    eager = load_tower(reference.path, dtype=torch.bfloat16, device=CUDA)
    weights = {name: tensor.clone() for name, tensor in eager.state_dict().items()}
    tower = fuse(eager, PLANS["ours"], CublasGemm())
    patches = patches_of(reference, GRIDS).to(CUDA, torch.bfloat16)
    before = patches.clone()
    tower(patches, tower.prepare(GRIDS))
    assert torch.equal(patches, before)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in eager.state_dict().items())


def test_wrong_shapes_and_devices_are_refused(reference: Reference) -> None:
    tower = fused(reference, torch.bfloat16)
    with pytest.raises(ValueError, match=r"patches have shape \(56, \d+\), not \(60, \d+\)"):
        tower(torch.zeros(56, tower.config.patch_dim, device=CUDA), tower.prepare([(1, 6, 10)]))
    with pytest.raises(ValueError, match="needs a CUDA device, and the tower is on cpu"):
        fuse(load_tower(reference.path, dtype=torch.float32, device=CPU))
