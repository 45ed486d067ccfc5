"""The encoder: pack → replay or run eagerly → split. One owner, no threads.

`Encoder.encode` is the whole library for a user with images; a server decodes elsewhere and feeds `encode_batches`. How
a batch runs is the business of `encoder.runner`. This module must not know of queues, caches, requests or processes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from configs.encoder_config import EncoderConfig
from encoder.decoded import Decoded
from encoder.forwards import choose_forward
from encoder.identity import EncoderIdentity
from encoder.image_size import ImageRules, PixelBounds, resized
from encoder.lanes import lanes_of
from encoder.packing import Batch
from encoder.pipeline import Pipeline, UnderWay
from encoder.preprocess import Pixels, Preprocessor
from encoder.run_counts import RunCounts
from encoder.runner import TowerRunner
from encoder.staging import Staging, StagingBounds, StagingCounts
from encoder.vision_config import VisionConfig
from encoder.weights import load_tower, weights_identity

logger = logging.getLogger(__name__)

WARM_UP_TOKENS_PER_SIDE = 8
DEEP = 4
"""Of the largest batches: where so many wait, what counts is how fast all of them are done."""


@dataclass(frozen=True)
class Embedding:
    """One image as the language model sees it."""

    tokens: torch.Tensor
    """`[num_tokens, width]`, `width = out_hidden * (1 + deepstack levels)`, on the encoder's device."""
    grid_thw: tuple[int, int, int]
    """Patches in time, height and width; `num_tokens = t * h * w / merge**2`."""
    digest: str
    """64 hex characters over the image and everything else that decides `tokens`."""


class Encoder:
    """A vision tower with its checkpoint's preprocessing. The thread that first encodes owns it."""

    def __init__(self, runner: TowerRunner, identity: EncoderIdentity, config: EncoderConfig) -> None:
        self.identity = identity
        self.preprocessor = Preprocessor(identity.rules)
        self.runner = runner
        self._verbose = config.encoder_cudagraph_verbose
        bounds = StagingBounds(pinned=config.staging_pinned_bytes)
        staging = Staging(identity.rules, lanes_of(runner.forward.device), bounds)
        self._pipeline = Pipeline(staging, runner.plan, runner.run, dtype=runner.forward.dtype)
        self._owner: int | None = None

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, config: EncoderConfig | None = None, *, device: str = "auto", progress: bool = False
    ) -> Encoder:
        """Loads the vision tensors of the checkpoint folder `path`, and nothing else of it; captures graphs on a GPU.

        Args:
            config: None takes the defaults.
            device: "auto" is "cuda" where there is one, else "cpu".
            progress: show a bar on stderr while graphs are captured.

        Raises:
            ValueError, BackendUnavailableError: something is asked for that cannot be had on the device.
        """
        path, config = Path(path), config or EncoderConfig()
        resolved = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        vision, rules = VisionConfig.from_checkpoint(path), ImageRules.from_checkpoint(path)
        _check_agreement(vision, rules)
        dtype_name = vision.dtype if config.dtype == "auto" else config.dtype
        tower = load_tower(path, dtype=getattr(torch, dtype_name), device=resolved)
        forward = choose_forward(tower, config, rules)
        del tower  # what was repacked for the forward is kept once
        identity = EncoderIdentity(weights_identity(path), vision, dtype_name, rules, forward.name)
        runner = TowerRunner.of(forward, config, progress=progress, fingerprint=identity.fingerprint)
        sizes = [resized(width, height, rules, None) for width, height in config.warm_grids]
        runner.warm([(1, height // rules.patch_size, width // rules.patch_size) for width, height in sizes])
        return cls(runner, identity, config)

    def encode(self, images: Sequence[Image.Image | bytes], *, bounds: PixelBounds | None = None) -> list[Embedding]:
        """Embeddings of PIL images or encoded files, in order. An image's embedding does not depend on its batch-mates.

        Raises:
            encoder.image_size.ImageError: an image cannot be read or is out of bounds; nothing was encoded then.
        """
        prepare = self.preprocessor.decoded if self.resizes else self.preprocessor.pixels
        pixels = [prepare(image, bounds) for image in images]
        tokens: dict[int, torch.Tensor] = {}
        for batch, outputs in self.encode_batches(pixels):
            tokens.update(zip(batch.indices, outputs, strict=True))
        digests = [self.identity.digest(image, bounds) for image in images]
        return [Embedding(tokens[i], pixels[i].grid_thw, digests[i]) for i in range(len(images))]

    def warm_up(self) -> None:
        """Encodes a blank image: the first run of a device loads its kernels, which takes seconds on a GPU."""
        side = WARM_UP_TOKENS_PER_SIDE * self.identity.rules.factor
        patches = side // self.identity.rules.patch_size
        for _ in self.encode_batches([Pixels(np.zeros((3, side, side), np.uint8), (1, patches, patches))]):
            pass

    def encode_batches(self, pixels: Sequence[Pixels | Decoded]) -> Iterator[tuple[Batch, list[torch.Tensor]]]:
        """Packs, and yields each batch with its images' tokens as soon as the device has been given it.

        The tensors `[num_tokens, width]` are on the encoder's device and are the caller's to keep.
        """
        for launched in self.launch_batches(pixels):
            yield launched.batch, launched.on_device()

    def launch_batches(self, pixels: Sequence[Pixels | Decoded]) -> Iterator[UnderWay]:
        """Packs, and yields each batch as soon as the device has been given it, to be fetched on another thread.

        Two batches are under way at most; a third waits here. A batch that fails spoils no other.
        """
        self._check_owner()
        for launched in self._pipeline.launch(pixels):
            if self._verbose:
                batch, total = launched.batch, sum(launched.num_tokens)
                padding = 0 if batch.budget is None else batch.budget - total
                images = len(batch.indices)
                logger.info("encoded images=%d tokens=%d budget=%s padding=%d", images, total, batch.budget, padding)
            yield replace(launched, ran=self.runner.ran)

    def wait_for_room(self) -> None:
        """Blocks while two batches are under way: what has come until then makes the fullest batches."""
        self._pipeline.wait_for_room()

    def worth_launching(self, num_tokens: Sequence[int], waiting: int) -> int:
        """How many of the first images in line, of `num_tokens` each, to launch together where `waiting` tokens wait.

        As many as are worth a launch, so that the first are there before the last are begun; all where DEEP of the
        largest batches wait, so that nothing of the device's speed is given away.
        """
        enough = self.runner.worthwhile_tokens
        if enough is None or waiting > DEEP * self.runner.largest_budget:
            return len(num_tokens)
        return max(1, sum(total <= enough for total in accumulate(num_tokens)))

    @property
    def staging_counts(self) -> StagingCounts:
        """What went to the device, and how, since the start."""
        return self._pipeline.staging.counts

    @property
    def resizes(self) -> bool:
        """Whether images that are only decoded are resized on the device faster than by whoever decodes."""
        return self.runner.forward.device.type == "cuda"

    def idle_step(self) -> bool:
        """At most one capture of a graph, or one adaptation: for moments without work. Whether there was one to do."""
        self._check_owner()
        return self.runner.idle_step()

    @property
    def counts(self) -> RunCounts:
        """Since the start: replays, eager runs by reason, captures, tokens, padding, known grids."""
        return self.runner.counts

    def close(self) -> None:
        """Keeps what the traffic asked for, where the settings name a folder for it."""
        self.runner.close()

    def _check_owner(self) -> None:
        thread = threading.get_ident()
        if self._owner is None:
            self._owner = thread
        elif self._owner != thread:
            raise RuntimeError(
                f"this Encoder belongs to thread {self._owner} and was called from {thread}: use a queue"
            )


def _check_agreement(vision: VisionConfig, rules: ImageRules) -> None:
    """The checkpoint's two files must tell the same story, or patches would be cut for another tower."""
    for name, ours, theirs in (
        ("patch_size", rules.patch_size, vision.patch_size),
        ("temporal_patch_size", rules.temporal_patch_size, vision.temporal_patch_size),
        ("merge_size", rules.merge_size, vision.spatial_merge_size),
    ):
        if ours != theirs:
            raise ValueError(
                f"{name} is {ours} in the checkpoint's preprocessor config and {theirs} in its config.json"
            )
