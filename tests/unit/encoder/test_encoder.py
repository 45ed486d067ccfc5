"""The encoder as a library: images in, embeddings out, in order, whatever was packed with what."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

import encoder as package
from configs.encoder_config import Dtype, EncoderConfig
from encoder import Embedding, Encoder
from encoder.images.decoded import Decoded
from encoder.images.size import Grid, ImageError, PixelBounds, num_tokens
from encoder.packing.run_counts import RunRecord
from encoder.pixels.preprocess import Pixels, resize
from encoder.runner import TowerRunner
from encoder.video.size import plan_chunks
from training.checkpoints import make_checkpoint

ARCHITECTURES = ("qwen3_vl", "qwen2_5_vl")
# Products of other shapes are summed in another order: float32 rounding, relative to the embedding's norm.
ROUNDING = 1e-5
SMALL_BATCHES = EncoderConfig(encoder_cudagraph_token_budgets=(16, 32), encoder_cudagraph_max_images_per_batch=3)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {arch: make_checkpoint(arch, folder / arch) for arch in ARCHITECTURES}


@pytest.fixture(params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    return checkpoints[request.param]


@pytest.mark.parametrize(
    ("enough", "waiting", "expected"), [(100, 400, 2), (99, 400, 1), (10, 400, 1), (100, 401, 4), (None, 1, 4)]
)
def test_what_is_worth_a_launch_is_launched_unless_much_waits(enough: int | None, waiting: int, expected: int) -> None:
    encoder = Encoder.__new__(Encoder)
    encoder.runner = cast(TowerRunner, SimpleNamespace(worthwhile_tokens=enough, largest_budget=100))
    assert encoder.num_to_launch([50, 50, 50, 50], waiting) == expected


def test_a_cpu_launches_as_many_as_it_gains_from(checkpoint: Path) -> None:
    """So that the first chunk of a video's frames is not held back by the others."""
    encoder = Encoder.from_checkpoint(checkpoint, SMALL_BATCHES)
    assert encoder.num_to_launch([100, 100, 100], 1) == 2
    assert encoder.num_to_launch([784, 784], 1) == 1


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise, so that no two patches are alike."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.dist(found, expected) <= ROUNDING * torch.linalg.norm(expected)


def load(checkpoint: Path, config: EncoderConfig | None = None) -> Encoder:
    return Encoder.from_checkpoint(checkpoint, config, device="cpu")


def tower_of(encoder: Encoder) -> torch.nn.Module:
    tower = encoder.runner.forward.run
    assert isinstance(tower, torch.nn.Module)
    return tower


def tokens_of(encoder: Encoder, images: Sequence[Image.Image | bytes]) -> list[torch.Tensor]:
    return [embedding.tokens for embedding in encoder.encode(images)]


def test_an_embedding_has_a_row_for_every_token(checkpoint: Path) -> None:
    encoder = load(checkpoint)
    (embedding,) = encoder.encode([picture(160, 96)])
    vision, rules = encoder.identity.vision, encoder.identity.rules
    assert embedding.tokens.shape == (num_tokens(embedding.grid_thw, rules.merge_size), vision.width)
    assert embedding.tokens.dtype == torch.float32
    assert not embedding.tokens.requires_grad
    assert len(embedding.digest) == 64


def test_pil_images_and_files_give_the_same_embedding(checkpoint: Path) -> None:
    image = picture(100, 70)
    pil, file = load(checkpoint).encode([image, png(image)])
    assert_close(pil.tokens, file.tokens)
    assert pil.grid_thw == file.grid_thw
    assert pil.digest != file.digest, "a PIL image has no encoded bytes to be named by"


def test_the_order_is_the_callers_over_many_batches(checkpoint: Path) -> None:
    """More images than a batch takes, falling and rising in size, one of them over the largest budget."""
    sizes = [(160, 96), (64, 64), (320, 320), (96, 64), (64, 96), (128, 128), (64, 64), (96, 96)]
    images = [picture(*size, seed) for seed, size in enumerate(sizes)]
    encoder = load(checkpoint, SMALL_BATCHES)
    counts = [len(tokens) for tokens in tokens_of(encoder, images)]
    assert max(counts) > 32, "one image is over the largest budget"
    batches = list(encoder.encode_batches([encoder.prepare(image) for image in images]))
    assert len(batches) >= 4
    assert any(batch.budget is None and len(batch.indices) == 1 for batch, _ in batches)
    assert max(len(batch.indices) for batch, _ in batches) == 3
    alone = load(checkpoint)
    for image, found in zip(images, tokens_of(encoder, images), strict=True):
        assert_close(found, tokens_of(alone, [image])[0])


def test_batch_mates_do_not_change_an_embedding(checkpoint: Path) -> None:
    encoder = load(checkpoint)
    image = picture(96, 64)
    (alone,) = tokens_of(encoder, [image])
    for others in ([picture(64, 64, 1)], [picture(320, 64, 2), picture(64, 320, 3)], [image] * 3):
        assert_close(tokens_of(encoder, [image, *others])[0], alone)
        assert_close(tokens_of(encoder, [*others, image])[-1], alone)


def test_other_pictures_have_other_embeddings(checkpoint: Path) -> None:
    """The tolerance of the tests here would not let one pass for another."""
    one, other = tokens_of(load(checkpoint), [picture(96, 64), picture(96, 64, 1)])
    assert torch.dist(one, other) > 0.1 * torch.linalg.norm(one)


def test_an_embedding_keeps_no_more_memory_than_its_own(checkpoint: Path) -> None:
    """A view would keep its whole batch for as long as somebody keeps one image."""
    for tokens in tokens_of(load(checkpoint), [picture(64, 64), picture(320, 320, 1)]):
        assert tokens.untyped_storage().nbytes() == tokens.numel() * tokens.element_size()


def test_nothing_gives_nothing(checkpoint: Path) -> None:
    assert load(checkpoint).encode([]) == []


def test_warming_up_changes_no_embedding(checkpoint: Path) -> None:
    """It runs the tower; on a GPU that is what loads the kernels."""
    encoder, ran = load(checkpoint), list[object]()
    hook = tower_of(encoder).register_forward_hook(lambda *_: ran.append(1))
    staging = encoder._pipeline.staging
    with mock.patch.object(staging, "stage", wraps=staging.stage) as staged:
        encoder.warm_up()
    assert ran == [1]
    hook.remove()
    # Both kernels that resize are compiled with it.
    (image,), patch = staged.call_args.args[0], encoder.identity.rules.patch_size
    (height, width, _), (_, rows, columns) = image.values.shape, image.grid_thw
    assert height != rows * patch
    assert width != columns * patch
    assert_close(tokens_of(encoder, [picture(96, 64)])[0], tokens_of(load(checkpoint), [picture(96, 64)])[0])


def test_bounds_decide_the_size(checkpoint: Path) -> None:
    encoder = load(checkpoint)
    image = png(picture(320, 320))
    factor = encoder.identity.rules.factor
    (free,) = encoder.encode([image])
    (small,) = encoder.encode([image], bounds=PixelBounds(None, 4 * factor**2))
    (large,) = encoder.encode([image], bounds=PixelBounds(640 * 640, None))
    assert len(small.tokens) == 4 < len(free.tokens) < len(large.tokens)
    assert len({free.digest, small.digest, large.digest}) == 3


def test_the_digest_is_that_of_the_identity(checkpoint: Path) -> None:
    encoder, bounds, file = load(checkpoint), PixelBounds(None, 10_000), png(picture(96, 96))
    assert encoder.encode([file], bounds=bounds)[0].digest == encoder.identity.digest(file, bounds)


@pytest.mark.parametrize("bad", [b"no image", b"", png(picture(64, 64))[:60], picture(3000, 10)])
def test_a_bad_image_leaves_nothing_behind(checkpoint: Path, bad: bytes | Image.Image) -> None:
    encoder = load(checkpoint)
    expected = tokens_of(encoder, [picture(64, 64)])
    ran: list[object] = []
    hook = tower_of(encoder).register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(ImageError):
        encoder.encode([picture(64, 64), bad, picture(64, 64)])
    assert ran == []
    hook.remove()
    assert_close(tokens_of(encoder, [picture(64, 64)])[0], expected[0])


def test_a_failure_of_the_tower_leaves_nothing_behind(checkpoint: Path) -> None:
    encoder = load(checkpoint)
    expected = tokens_of(encoder, [picture(64, 64)])

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = tower_of(encoder).register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        encoder.encode([picture(96, 96, 1)])
    hook.remove()
    assert_close(tokens_of(encoder, [picture(64, 64)])[0], expected[0])


def test_a_second_thread_is_refused(checkpoint: Path) -> None:
    encoder = load(checkpoint)
    encoder.encode([picture(64, 64)])
    refused: list[str] = []

    def encode_there() -> None:
        try:
            encoder.encode([picture(64, 64)])
        except RuntimeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=encode_there)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert str(threading.get_ident()) in refused[0]
    assert len(encoder.encode([picture(64, 64)])) == 1, "the owner goes on"


def test_the_thread_that_first_encodes_owns_it(checkpoint: Path) -> None:
    """It may be loaded on another."""
    encoder = load(checkpoint)
    found: list[Embedding] = []
    thread = threading.Thread(target=lambda: found.extend(encoder.encode([picture(64, 64)])))
    thread.start()
    thread.join()
    assert len(found) == 1
    with pytest.raises(RuntimeError, match="belongs to thread"):
        encoder.encode([picture(64, 64)])


@pytest.mark.parametrize(("key", "value"), [("patch_size", 8), ("temporal_patch_size", 1), ("merge_size", 4)])
def test_a_preprocessor_that_disagrees_with_the_tower_is_refused(
    checkpoint: Path, tmp_path: Path, key: str, value: int
) -> None:
    """Patches would be cut for another tower: of the right size in bytes, perhaps, and of the wrong pixels."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    for file in (folder / "preprocessor_config.json", folder / "processor_config.json"):
        if file.is_file():
            settings = json.loads(file.read_text())
            settings.get("image_processor", settings)[key] = value
            file.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=rf"{key} is {value} in the checkpoint's preprocessor config and \d+ in"):
        load(folder)


def test_the_dtype_is_the_checkpoints_or_the_operators(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    half = make_checkpoint("qwen3_vl", tmp_path / "half", dtype="bfloat16")
    full = checkpoints["qwen3_vl"]
    image = picture(96, 96)
    cases: list[tuple[Path, Dtype, torch.dtype]] = [
        (half, "auto", torch.bfloat16),
        (half, "float32", torch.float32),
        (full, "auto", torch.float32),
        (full, "bfloat16", torch.bfloat16),
    ]
    for folder, asked, dtype in cases:
        encoder = load(folder, EncoderConfig(dtype=asked))
        assert encoder.encode([image])[0].tokens.dtype == dtype
        assert encoder.identity.dtype == str(dtype).removeprefix("torch.")


def test_an_image_in_another_dtype_has_another_digest(checkpoint: Path) -> None:
    digests = {load(checkpoint, EncoderConfig(dtype=dtype)).encode([picture(64, 64)])[0].digest
               for dtype in ("float32", "bfloat16")}  # fmt: skip
    assert len(digests) == 2


def test_verbose_logs_every_batch(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = dataclasses.replace(SMALL_BATCHES, encoder_cudagraph_verbose=True)
    images = [picture(64, 64, seed) for seed in range(4)]
    with caplog.at_level(logging.INFO, logger="encoder"):
        counts = [len(tokens) for tokens in tokens_of(load(checkpoint, config), images)]
    lines = [line for line in caplog.messages if line.startswith("encoded")]
    total = 3 * counts[0]
    assert lines[0] == f"encoded images=3 tokens={total} budget=None padding=0", "a CPU has no graphs"
    assert len(lines) == 2


def test_verbose_logs_the_graph_that_ran(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the budget that the batch was packed for."""
    encoder = load(checkpoint, dataclasses.replace(SMALL_BATCHES, encoder_cudagraph_verbose=True))
    run = encoder.runner._run

    def replayed(patches: torch.Tensor, grids: Sequence[Grid], budget: int | None) -> torch.Tensor:
        outputs = run(patches, grids, budget)
        encoder.runner.last_run = RunRecord(64, None, len(outputs), len(grids))
        return outputs

    monkeypatch.setattr(encoder.runner, "_run", replayed)
    with caplog.at_level(logging.INFO, logger="encoder"):
        [tokens] = tokens_of(encoder, [picture(64, 64)])
    assert f"encoded images=1 tokens={len(tokens)} budget=64 padding={64 - len(tokens)}" in caplog.messages


def test_the_package_gives_its_three_names_and_no_others() -> None:
    assert (package.Encoder, package.Embedding, package.EncoderConfig) == (Encoder, Embedding, EncoderConfig)
    with pytest.raises(AttributeError, match="no attribute 'Decoder'"):
        _ = package.Decoder


def test_warming_up_changes_nothing(checkpoint: Path) -> None:
    cold, warm = Encoder.from_checkpoint(checkpoint), Encoder.from_checkpoint(checkpoint)
    warm.warm_up()
    image = Image.radial_gradient("L").resize((96, 64))
    assert torch.equal(cold.encode([image])[0].tokens, warm.encode([image])[0].tokens)


def test_the_batch_with_the_first_image_runs_first(checkpoints: dict[str, Path]) -> None:
    """The packer puts small images first; a server's line says who is, and one that yields would wait for ever."""
    encoder = load(checkpoints["qwen3_vl"], SMALL_BATCHES)
    sides = ((160, 160), (32, 32), (160, 128), (32, 64), (64, 32), (96, 96))
    pixels = [encoder.prepare(picture(*size, seed)) for seed, size in enumerate(sides)]
    planned = [batch.indices for batch in encoder.runner.plan_batches([image.grid_thw for image in pixels])]
    ran = [batch.indices for batch, _ in encoder.encode_batches(pixels)]
    assert 0 not in planned[0], "else this tests nothing"
    assert sorted(ran) == sorted(planned)
    assert [min(indices) for indices in ran] == sorted(min(indices) for indices in ran)


def test_videos_are_packed_together_with_images(checkpoint: Path) -> None:
    """A video of seven frames, whole and in chunks, among images: the same rows as alone."""
    encoder = Encoder.from_checkpoint(checkpoint, SMALL_BATCHES, device="cpu")
    rules = encoder.identity.rules
    frames = np.random.default_rng(5).integers(0, 256, (7, 40, 60, 3), dtype=np.uint8)
    whole = Decoded(frames, (4, 2 * rules.merge_size, 3 * rules.merge_size))
    chunks = [
        Decoded(frames[chunk.first_frame :][: chunk.num_frames], chunk.grid_thw)
        for chunk in plan_chunks(whole.grid_thw, len(frames), 2, rules)
    ]
    items = [encoder.prepare(picture(64, 64)), resize(whole, rules), *(resize(chunk, rules) for chunk in chunks), whole]

    def encoded(*batch: Pixels | Decoded) -> dict[int, torch.Tensor]:
        return {
            index: tokens
            for launched, outputs in encoder.encode_batches(batch)
            for index, tokens in zip(launched.indices, outputs, strict=True)
        }

    together = encoded(*items)
    [alone] = encoded(items[1]).values()
    assert alone.shape[0] == 24
    assert_close(together[1], alone)
    assert_close(together[4], alone)
    assert_close(torch.cat([together[2], together[3]]), alone)
    assert torch.dist(alone[:6], alone[6:12]) > 0.1 * torch.linalg.norm(alone[:6])
