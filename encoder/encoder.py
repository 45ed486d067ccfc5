"""The encoder's public API: pack → replay or run eagerly → split. It is owned by one thread and starts none.

`Encoder.encode` takes images; a server decodes in other processes and calls `launch_batches`. `encoder.runner` runs the
batches.
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
from encoder.checkpoint.vision_config import VisionConfig, image_token_id
from encoder.forwards import choose_forward
from encoder.images.decoded import Decoded, decode
from encoder.images.identity import EncoderIdentity
from encoder.images.size import ImageRules, PixelBounds, image_grid, num_tokens
from encoder.packing.greedy import Batch
from encoder.packing.run_counts import RunCounts
from encoder.pixels.preprocess import Pixels, resize
from encoder.runner import TowerRunner
from encoder.staging.pipeline import Launched, Pipeline
from encoder.staging.staging import Staging, StagingBounds, StagingCounts
from encoder.staging.streams import lanes_for
from encoder.towers.weights import load_tower, weights_identity

logger = logging.getLogger(__name__)

WARM_UP_TOKENS_PER_SIDE = 8
DEEP_QUEUE_BATCHES = 4
"""Queue depth, in batches of the largest budget, above which throughput counts more than the first images' latency."""


@dataclass(frozen=True)
class Embedding:
    """Embedding of one image."""

    tokens: torch.Tensor
    """`[num_tokens, width]`, `width = out_hidden * (1 + deepstack levels)`, on the encoder's device."""
    grid_thw: tuple[int, int, int]
    """Patches in time, height and width; `num_tokens = t * h * w / merge**2`."""
    digest: str
    """64 hex characters over the image and everything else that determines `tokens`."""


class Encoder:
    """A vision tower with its checkpoint's preprocessing, owned by the first thread that encodes with it.

    encoder = Encoder.from_checkpoint("Qwen3-VL-8B-Instruct")
    [embedding] = encoder.encode([Path("cat.jpg").read_bytes()])
    embedding.tokens  # [num_tokens, width] on the encoder's device
    """

    def __init__(self, runner: TowerRunner, identity: EncoderIdentity, config: EncoderConfig) -> None:
        self.identity = identity
        self.runner = runner
        self._verbose = config.encoder_cudagraph_verbose
        bounds = StagingBounds(pinned_bytes=config.staging_pinned_bytes)
        staging = Staging(identity.rules, lanes_for(runner.forward.device), bounds)
        self._pipeline = Pipeline(staging, runner.plan_batches, runner.run, dtype=runner.forward.dtype)
        self._owner: int | None = None

    @classmethod
    def from_checkpoint(cls, path: str | Path, config: EncoderConfig | None = None, *, device: str = "auto") -> Encoder:
        """Loads only the vision tensors of the checkpoint folder `path`, and captures graphs on a GPU.

        Args:
            config: None takes the defaults.
            device: "auto" is "cuda" if available, else "cpu".

        Raises:
            ValueError, BackendUnavailableError: the device does not support a setting, or the checkpoint's configs
                disagree.
        """
        path, config = Path(path), config or EncoderConfig()
        resolved = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        vision, rules = VisionConfig.from_checkpoint(path), ImageRules.from_checkpoint(path)
        _check_agreement(vision, rules)
        dtype_name = vision.dtype if config.dtype == "auto" else config.dtype
        tower = load_tower(path, dtype=getattr(torch, dtype_name), device=resolved)
        forward = choose_forward(tower, config, rules)
        del tower  # frees the weights that the forward has repacked
        identity = EncoderIdentity(
            weights_identity(path), vision, dtype_name, rules, forward.name, image_token_id(path)
        )
        runner = TowerRunner.build(forward, config)
        runner.warm([image_grid(width, height, rules) for width, height in config.warm_image_sizes])
        return cls(runner, identity, config)

    def encode(self, images: Sequence[Image.Image | bytes], *, bounds: PixelBounds | None = None) -> list[Embedding]:
        """Encodes PIL images or encoded files. Returns embeddings in the same order, each independent of its batch.

        Raises:
            encoder.images.size.ImageError: an image cannot be read or is out of bounds; no image was encoded.
        """
        pixels = [self.prepare(image, bounds) for image in images]
        tokens: dict[int, torch.Tensor] = {}
        for batch, outputs in self.encode_batches(pixels):
            tokens.update(zip(batch.indices, outputs, strict=True))
        digests = [self.identity.digest(image, bounds) for image in images]
        return [Embedding(tokens[i], pixels[i].grid_thw, digests[i]) for i in range(len(images))]

    def prepare(self, image: Image.Image | bytes, bounds: PixelBounds | None = None) -> Pixels | Decoded:
        """Decodes an image, and resizes it if the device does not. Stateless: any thread may call it.

        Raises ImageError.
        """
        decoded = decode(image, self.identity.rules, bounds)
        return decoded if self.resizes_on_device else resize(decoded, self.identity.rules)

    def warm_up(self) -> None:
        """Encodes a blank image that is resized in both directions: the first run compiles and loads kernels, which
        takes seconds on a GPU."""
        side = WARM_UP_TOKENS_PER_SIDE * self.identity.rules.factor
        patches = side // self.identity.rules.patch_size
        for _ in self.encode_batches([Decoded(np.zeros((side - 1, side - 1, 3), np.uint8), (1, patches, patches))]):
            pass

    def encode_batches(self, pixels: Sequence[Pixels | Decoded]) -> Iterator[tuple[Batch, list[torch.Tensor]]]:
        """Packs images and yields each batch with its images' tokens once it is launched.

        The tensors `[num_tokens, width]` are on the encoder's device; the caller owns them.
        """
        for launched in self.launch_batches(pixels):
            yield launched.batch, launched.on_device()

    def launch_batches(self, pixels: Sequence[Pixels | Decoded]) -> Iterator[Launched]:
        """Packs images and yields each batch once it is launched; another thread may fetch it.

        At most two batches are in flight; this waits before it launches a third. A failed batch does not affect others.
        """
        self._check_owner()
        for launched in self._pipeline.launch(pixels):
            ran = self.runner.last_run
            if self._verbose and ran is not None:
                padding = 0 if ran.budget is None else ran.budget - ran.num_tokens
                logger.info(
                    "encoded images=%d tokens=%d budget=%s padding=%d",
                    ran.num_images, ran.num_tokens, ran.budget, padding,
                )  # fmt: skip
            yield replace(launched, run_record=ran)

    def wait_for_room(self) -> None:
        """Blocks while two batches are in flight. Images collected after it returns make the fullest batches."""
        self._pipeline.wait_for_room()

    def num_to_launch(self, num_tokens: Sequence[int], waiting: int) -> int:
        """Returns how many of the first queued images, of `num_tokens` each, to launch together.

        That is as many as fill `TowerRunner.worthwhile_tokens`, so that the first embeddings are ready before the last
        images start; or all if more tokens than in DEEP_QUEUE_BATCHES largest batches are `waiting`, for maximum
        throughput.
        """
        enough = self.runner.worthwhile_tokens
        if enough is None or waiting > DEEP_QUEUE_BATCHES * self.runner.largest_budget:
            return len(num_tokens)
        return max(1, sum(total <= enough for total in accumulate(num_tokens)))

    def count_tokens(self, image: Pixels | Decoded) -> int:
        return num_tokens(image.grid_thw, self.identity.rules.merge_size)

    @property
    def staging_counts(self) -> StagingCounts:
        """Counts of copies to and from the device since start-up."""
        return self._pipeline.staging.counts

    @property
    def resizes_on_device(self) -> bool:
        """Whether the encoder should get decoded images and resize them on the device (a GPU)."""
        return self.runner.forward.device.type == "cuda"

    def idle_step(self) -> bool:
        """Captures at most one graph or times the captured ones; call it when idle. Returns whether it did."""
        self._check_owner()
        return self.runner.idle_step()

    @property
    def counts(self) -> RunCounts:
        """Counts since start-up: replays, eager runs by reason, captures, tokens, padding, grid cache."""
        return self.runner.counts

    def _check_owner(self) -> None:
        thread = threading.get_ident()
        if self._owner is None:
            self._owner = thread
        elif self._owner != thread:
            raise RuntimeError(
                f"this Encoder belongs to thread {self._owner} and was called from {thread}: use a queue"
            )


def _check_agreement(vision: VisionConfig, rules: ImageRules) -> None:
    """Raises ValueError if the checkpoint's preprocessor config and config.json disagree on the patch geometry."""
    for name, ours, theirs in (
        ("patch_size", rules.patch_size, vision.patch_size),
        ("temporal_patch_size", rules.temporal_patch_size, vision.temporal_patch_size),
        ("merge_size", rules.merge_size, vision.spatial_merge_size),
    ):
        if ours != theirs:
            raise ValueError(
                f"{name} is {ours} in the checkpoint's preprocessor config and {theirs} in its config.json"
            )
