"""Images to a GPU and back: the kernels against the CPU bit for bit, real streams, pinned shared memory."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from configs.encoder_config import EncoderConfig
from deployments.encoder_replica.gpu.jobs import Encoded
from deployments.encoder_replica.gpu.worker import GpuWorker
from deployments.transfer.shared_memory import Arena
from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.vision_config import VisionConfig
from encoder.encoder import Encoder
from encoder.images.decoded import Decoded
from encoder.images.identity import EncoderIdentity
from encoder.images.size import Grid
from encoder.packing.greedy import Batch
from encoder.pixels.device import fill_patches
from encoder.pixels.layout import plan_pixels
from encoder.pixels.preprocess import Pixels, patchify, resize
from encoder.staging.pipeline import Launched, Pipeline
from encoder.staging.staging import Staging, StagingBounds
from encoder.staging.streams import lanes_for, pin_shared, unpin_shared
from tests.parity.reference_towers import Reference, make_reference
from tests.unit.encoder.pixels.filled import patches_of

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="the kernels are Triton's")

CUDA = torch.device("cuda")
QWEN3 = ImageRules(patch_size=16, image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5))
QWEN25 = ImageRules()
OTHER = ImageRules(patch_size=5, merge_size=3, temporal_patch_size=3, rescale_factor=0.01)
# (height, width) of the file and the (rows, columns) of merge blocks it is resized to.
SIZES = [
    ((1, 1), (2, 2)), ((1, 200), (1, 6)), ((200, 1), (6, 1)), ((64, 96), (2, 3)), ((63, 97), (2, 3)),
    ((40, 30), (5, 4)), ((333, 77), (2, 1)), ((300, 500), (9, 16)), ((700, 500), (1, 1)), ((31, 96), (2, 3)),
    ((1024, 1024), (32, 32)), ((1000, 750), (31, 23)), ((3000, 4000), (14, 18)), ((2048, 2048), (63, 63)),
    ((28, 5600), (1, 200)),
]  # fmt: skip


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([height, width, seed])
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    noise[:, ::5] = 255
    noise[::3] = np.where(rng.random(noise[::3].shape) < 0.5, 0, 255)
    return noise


def by_the_cpu(image: Pixels | Decoded, rules: ImageRules) -> torch.Tensor:
    pixels = resize(image, rules) if isinstance(image, Decoded) else image
    return patchify(torch.from_numpy(pixels.values), rules)


def images_of(rules: ImageRules) -> list[Pixels | Decoded]:
    """Of all sizes, every third resized by the CPU already."""
    found: list[Pixels | Decoded] = []
    for number, (size, blocks) in enumerate(SIZES):
        image = Decoded(picture(*size), (1, blocks[0] * rules.merge_size, blocks[1] * rules.merge_size))
        found.append(resize(image, rules) if number % 3 == 2 else image)
    return found


@pytest.mark.parametrize("rules", [QWEN3, QWEN25, OTHER], ids=["16", "14", "5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_all_sizes_equals_the_cpu(rules: ImageRules, dtype: torch.dtype) -> None:
    """Bit for bit: the sums are integers, and the division is rounded as the CPU's."""
    images = images_of(rules)
    expected = torch.cat([by_the_cpu(image, rules) for image in images]).to(dtype)
    staging = Staging(rules, lanes_for(CUDA), StagingBounds(pinned_bytes=2**24))
    with staging.stage(images) as staged:
        found = staged.patches(dtype=dtype)
    assert torch.equal(found.cpu(), expected)
    assert staging.counts.bytes_unpinned > 0, "the large ones do not fit 4 MiB of pinned memory"


@pytest.mark.parametrize(("size", "blocks"), SIZES)
def test_each_size_alone_equals_the_cpu(size: tuple[int, int], blocks: tuple[int, int]) -> None:
    image = Decoded(picture(*size, seed=1), (1, 2 * blocks[0], 2 * blocks[1]))
    values = torch.from_numpy(image.values).to(CUDA)
    found = patches_of(values, image.grid_thw, QWEN3)
    assert torch.equal(found.cpu(), by_the_cpu(image, QWEN3))


def test_the_patches_of_a_graphs_buffer_are_not_touched_behind_the_batch() -> None:
    image = Decoded(picture(60, 90), (1, 4, 6))
    plan = plan_pixels([(1, 60, 90, False)], [image.grid_thw], QWEN3)
    buffer = torch.zeros(plan.buffer_bytes, dtype=torch.uint8, device=CUDA)
    buffer[: image.values.size] = torch.from_numpy(image.values.reshape(-1)).to(CUDA)
    out = torch.full((40, 1536), 7.0, dtype=torch.bfloat16, device=CUDA)
    fill_patches(plan, buffer, torch.from_numpy(plan.control).to(CUDA), QWEN3, out[:24])
    assert torch.equal(out[:24].cpu(), by_the_cpu(image, QWEN3).to(torch.bfloat16))
    assert (out[24:] == 7).all()


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Busy:
    """A tower that takes a while, so that copies run beside it: twice some columns of each token's patches."""

    def __init__(self) -> None:
        self._ballast = torch.randn(2048, 2048, device=CUDA)

    def plan(self, grids: Sequence[Grid]) -> list[Batch]:
        return [Batch(tuple(range(start, min(start + 5, len(grids)))), None) for start in range(0, len(grids), 5)]

    def run(self, patches: torch.Tensor, grids: Sequence[Grid], budget: int | None) -> torch.Tensor:
        ballast = self._ballast
        for _ in range(8):
            ballast = ballast @ self._ballast
            ballast = ballast / ballast.norm()
        return 2 * patches.view(-1, 4, 1536)[:, :, :300].flatten(1) + 0 * ballast[0, 0]


def test_batches_through_two_sets_of_buffers_on_real_streams() -> None:
    rng = np.random.default_rng(0)
    images = []
    for seed in range(300):
        grid = (1, 2 * int(rng.integers(1, 20)), 2 * int(rng.integers(1, 20)))
        height, width = (int(side) for side in rng.integers(1, 400, 2))
        images.append(Decoded(picture(height, width, seed), grid))
    expected = [2 * by_the_cpu(image, QWEN3).view(-1, 4, 1536)[:, :, :300].flatten(1) for image in images]
    staging = Staging(QWEN3, lanes_for(CUDA), StagingBounds(pinned_bytes=4 * 2**20, max_kept_bytes=2**22))
    tower = Busy()
    pipeline = Pipeline(staging, tower.plan, tower.run, dtype=torch.float32)
    waiting: list[Launched] = []
    for round_ in range(3):
        if round_ == 1:
            torch.cuda.synchronize()
            allocated = torch.cuda.memory_allocated()
        for launched in pipeline.launch(images):
            waiting.append(launched)
            if len(waiting) > 2:
                check(waiting.pop(0), expected)
        while waiting:
            check(waiting.pop(0), expected)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated + 2**22


def check(launched: Launched, expected: Sequence[torch.Tensor]) -> None:
    for index, tokens in zip(launched.batch.indices, launched.fetch(), strict=True):
        assert not tokens.is_cuda
        assert torch.equal(tokens, expected[index])


def test_a_launch_waits_for_nothing() -> None:
    tower = Busy()
    staging = Staging(QWEN3, lanes_for(CUDA), StagingBounds())
    pipeline = Pipeline(staging, tower.plan, tower.run, dtype=torch.bfloat16)
    images = [Decoded(picture(100, 120), (1, 6, 8)) for _ in range(5)]
    for _ in range(2):
        for launched in pipeline.launch(images):
            launched.fetch()
    with synchronisation_is_an_error():
        (launched,) = pipeline.launch(images)
    assert not launched.ready.is_done(), "the device has not done yet what took the host no time"
    launched.fetch()


def test_pinned_shared_memory_is_copied_straight_to_the_device() -> None:
    arena = Arena(2**22)
    pin_shared(arena.address, arena.num_bytes)
    try:
        allocation = arena.allocate(200 * 300 * 3)
        assert allocation is not None
        values = allocation.array((200, 300, 3))
        values[:] = picture(200, 300)
        assert torch.from_numpy(values).is_pinned()
        image = Decoded(values, (1, 12, 18))
        staging = Staging(QWEN3, lanes_for(CUDA), StagingBounds(pinned_bytes=2**22))
        with staging.stage([image]) as staged:
            found = staged.patches()
        assert torch.equal(found.cpu(), by_the_cpu(image, QWEN3))
        assert staging.counts.bytes_direct == values.size
        assert staging.counts.bytes_unpinned == 0
    finally:
        torch.cuda.synchronize()
        unpin_shared(arena.address)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


def jpeg(width: int, height: int, seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture(height, width, seed)).save(file, "JPEG")
    return file.getvalue()


def encoder_of(path: Path) -> Encoder:
    vision = VisionConfig.from_checkpoint(path)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "min_pixels": 3136,
        "max_pixels": 401_408,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    config = EncoderConfig(
        dtype="bfloat16",
        fused_kernels="auto",
        cudagraph_mm_encoder="auto",
        graph_capture="on_demand",
        encoder_cudagraph_token_budgets=(64, 256, 1024),
    )
    return Encoder.from_checkpoint(path, config, device="cuda")


def test_from_files_to_embeddings_as_a_replica_does_it(reference: Reference) -> None:
    """Decoder processes, shared memory, resizing on the device, captures in idle moments, fetching beside."""
    pytest.importorskip("msgspec", reason="decoders exchange msgspec messages")
    pytest.importorskip("av", reason="decoders open videos with PyAV")
    from deployments.encoder_replica.decode.pool import DecodePool

    worker = GpuWorker(lambda: encoder_of(reference.path), max_queued_tokens=10**9)
    assert worker.resizes_on_device
    assert isinstance(worker.identity, EncoderIdentity)
    pool = DecodePool(worker.identity.rules, workers=2, max_pixels=10**7, timeout_s=60, shm_bytes=2**23, resize=False)
    pin_shared(pool.arena.address, pool.arena.num_bytes)
    sizes = [(60 + 7 * number, 300 - 5 * number) for number in range(40)]
    files = [jpeg(*size, number) for number, size in enumerate(sizes)]

    async def one(number: int) -> Encoded:
        pixels = await pool.decode(files[number], None, sizes[number])
        return await asyncio.wrap_future(worker.submit(pixels))

    async def several() -> list[Encoded]:
        found = await asyncio.gather(*[one(number) for number in range(40)])
        await asyncio.sleep(2)  # idle: graphs are captured
        again = await asyncio.gather(*[one(number) for number in range(40)])
        return [*found, *again]

    try:
        found = asyncio.run(several())
    finally:
        pool.workers.stop()
        worker.stop()
        worker._thread.join(60)
        unpin_shared(pool.arena.address)
    alone = encoder_of(reference.path)
    for number, encoded in enumerate(found):
        (expected,) = alone.encode([files[number % 40]])
        tokens = expected.tokens.float().cpu()
        assert encoded.tokens.shape == tokens.shape
        # Products of other shapes, and kernels that a graph was captured with: roundings of bfloat16.
        error = torch.linalg.norm(encoded.tokens.float() - tokens) / torch.linalg.norm(tokens)
        assert error < 2e-2, (number, float(error))


def test_a_worker_answers_every_image_of_a_long_run(reference: Reference) -> None:
    """Thousands of images of few sizes in one go: nobody hangs, nothing is mixed up, memory does not grow."""
    worker = GpuWorker(lambda: encoder_of(reference.path), max_queued_tokens=10**9)
    grids: list[Grid] = [(1, 4, 4), (1, 8, 6), (1, 10, 14)]
    assert isinstance(worker.identity, EncoderIdentity)
    patch = worker.identity.rules.patch_size
    kinds = [
        Pixels(np.ascontiguousarray(picture(h * patch, w * patch, seed).transpose(2, 0, 1)), (t, h, w))
        for seed, (t, h, w) in enumerate(grids)
    ]
    firsts = [worker.submit(kind).result(60).tokens for kind in kinds]
    for _ in range(3):
        futures: list[Future[Encoded]] = [worker.submit(kinds[number % 3]) for number in range(1000)]
        for number, future in enumerate(futures):
            tokens, first = future.result(60).tokens.float(), firsts[number % 3].float()
            assert torch.linalg.norm(tokens - first) < 2e-2 * torch.linalg.norm(first)
    worker.stop()
    worker._thread.join(60)
    assert not worker.is_alive
