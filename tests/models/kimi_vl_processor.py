"""Processor of the Kimi-VL checkpoint, which is copied into it: transformers has none. Patches of 14 x 14 pixels, each
image padded to whole groups of 2 x 2 patches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, BatchFeature
from transformers.processing_utils import ProcessorMixin

PATCH = 14
MERGE = 2
MAX_PATCHES = 1024


class KimiVLProcessor(ProcessorMixin):  # type: ignore[misc]  # untyped: transformers
    image_token = "<|media_pad|>"
    # Its fields are what vLLM computes the number of tokens from.
    image_processor = SimpleNamespace(patch_size=PATCH, merge_kernel_size=[MERGE, MERGE], in_token_limit=MAX_PATCHES)

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, path: str, *_: object, tokenizer: object = None, **_options: object) -> KimiVLProcessor:
        return cls(tokenizer or AutoTokenizer.from_pretrained(path))

    def __call__(self, text: str, images: list[Image.Image], **_options: object) -> BatchFeature:
        patches, grids = zip(*map(_patches, images), strict=True)
        tokens = self.tokenizer(text, return_tensors="pt")
        return BatchFeature({**tokens, "pixel_values": torch.cat(patches), "image_grid_hws": torch.tensor(grids)})


def _patches(image: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
    """Returns `[height * width, 3, 14, 14]`, and height and width in patches."""
    number = (image.width // PATCH) * (image.height // PATCH)
    if number > MAX_PATCHES:
        scale = (MAX_PATCHES / number) ** 0.5
        image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BICUBIC)
    pixels = np.asarray(image.convert("RGB"), np.float32) / 127.5 - 1
    unit = PATCH * MERGE
    pixels = np.pad(pixels, ((0, -image.height % unit), (0, -image.width % unit), (0, 0)))
    height, width = (side // PATCH for side in pixels.shape[:2])
    patches = pixels.reshape(height, PATCH, width, PATCH, 3).transpose(0, 2, 4, 1, 3)
    return torch.from_numpy(patches.reshape(-1, 3, PATCH, PATCH).copy()), (height, width)
