"""The generic encoder of a replica on a small Mistral 3: workers with vLLM's processor, a thread with its towers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from configs.schema import AppConfig
from deployments.common.model_path import encoder_checkpoint, expected_tower, uses_own_tower
from deployments.encoder_replica.decode.prepare_pool import ItemFile, PreparePool
from deployments.encoder_replica.generic import load_generic_encoder
from deployments.encoder_replica.gpu.worker import GpuWorker
from deployments.vllm.preparer import VllmInputs
from encoder.images.generic_identity import MEASURED_SIDES, GenericIdentity
from encoder.images.size import ImageError
from encoder.item_header import ItemHeader
from tests.models import media
from tests.models.checkpoints import make

MAX_PIXELS = 1100 * 1100
WAIT_S = 60
DIGEST = "d" * 64

pytestmark = pytest.mark.slow


class Started:
    """What a replica starts."""

    def __init__(self, folder: Path) -> None:
        make("mistral3", folder)
        self.config = AppConfig.model_validate(
            {
                "model": str(folder),
                "encoder_replica": {"decode_workers": 1, "decode_timeout_s": WAIT_S},
                "llm": {"engine_args": {"dtype": "float32", "max_model_len": 4096, "max_num_seqs": 2}},
                "ingress": {"max_image_pixels": MAX_PIXELS},
            }
        )
        path = encoder_checkpoint(self.config)
        self.pool = PreparePool(path, self.config)
        self.worker = GpuWorker(lambda: load_generic_encoder(path, self.config, self.pool), max_queued_tokens=10**6)

    def encode(self, *files: bytes) -> list[tuple[ItemHeader, torch.Tensor]]:
        """Queues all files together."""
        items = asyncio.run(self._prepare(files))
        futures = [self.worker.submit(item) for item in items]
        return [(item.header, done.result(WAIT_S).tokens) for item, done in zip(items, futures, strict=True)]

    async def _prepare(self, files: tuple[bytes, ...]) -> list[VllmInputs]:
        return list(await asyncio.gather(*(self.pool.prepare(ItemFile(file), DIGEST) for file in files)))

    def close(self) -> None:
        self.worker.stop(wait=True)
        self.pool.workers.stop()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    with closing(Started(tmp_path_factory.mktemp("mistral3"))) as started:
        yield started


def test_auto_takes_vllms_class_where_no_tower_of_ours_fits(started: Started) -> None:
    assert not uses_own_tower(started.config)
    assert uses_own_tower(AppConfig(model="models/scenes-8m"))


def test_embeddings_have_the_rows_of_their_headers_and_depend_on_the_picture(started: Started) -> None:
    (header, one), (other_header, other), (small_header, small) = started.encode(
        *media.items("image")[::2], media.image(2, 128, 128)
    )
    assert (header.num_embeds, other_header.num_embeds, small_header.num_embeds) == tuple(map(len, (one, other, small)))
    assert header == other_header, "they have one size"
    assert header.digest == DIGEST
    assert (one - other).abs().max() > 0.01
    assert header.num_embeds > small_header.num_embeds
    assert torch.equal(started.encode(media.image(1))[0][1], one), "it does not depend on its batch"


def test_the_ingress_estimates_the_tokens_of_any_size(started: Started) -> None:
    """Within a factor of two, though this processor bounds the longer side, so that tokens depend on its ratio."""
    identity = started.worker.identity
    assert isinstance(identity, GenericIdentity)
    assert identity.tower == expected_tower(started.config)
    assert len(identity.token_counts) == len(MEASURED_SIDES)
    for height, width in ((192, 320), (300, 300), (90, 700)):
        estimate, _ = identity.plan_image("d" * 64, width, height, None)
        [(header, _)] = started.encode(media.image(1, height, width))
        assert 0.5 < estimate / header.num_embeds < 2


def test_bad_files_are_refused_and_cost_nothing_else(started: Started) -> None:
    for file in (b"", b"not an image", media.image(1)[:-200], media.image(1, 1200, 1200)):
        with pytest.raises(ImageError):
            started.encode(file)
    assert started.encode(media.image(1))


def test_graphs_that_must_be_there_are_an_error_on_a_cpu(tmp_path: Path) -> None:
    """In a process of its own: it would replace the towers' process group."""
    make("mistral3", tmp_path)
    source = (
        "from configs.encoder_config import EncoderConfig\n"
        "from deployments.vllm.vllm_encoder import VllmTower\n"
        "options = {'dtype': 'float32', 'max_model_len': 4096}\n"
        f"VllmTower({str(tmp_path)!r}, EncoderConfig(cudagraph_mm_encoder=True), options)\n"
    )
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert "cudagraph_mm_encoder is true, and CUDA graphs are not available: cpu_device" in ran.stderr
