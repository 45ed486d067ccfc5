"""Loads the encoder of a checkpoint, warms it up, and prints as JSON what each of several batches compiles and takes,
and how many of QuACK's GEMMs this process loaded and compiled.

`python -m tests.gpu.after_warm_up CHECKPOINT`: in a process of its own, since other images would compile kernels too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import triton

from configs.encoder_config import EncoderConfig
from encoder import Encoder
from encoder.images.decoded import Decoded

BUDGETS = (64, 128, 512, 1024)


def image(encoder: Encoder, size: tuple[int, int], blocks: tuple[int, int], frames: int | None = None) -> Decoded:
    """Returns a blank image, or a video, of `size` (height, width) that is resized to blocks of merged patches."""
    rules = encoder.identity.rules
    times = 1 if frames is None else -(-frames // rules.temporal_patch_size)
    shape = (*size, 3) if frames is None else (frames, *size, 3)
    grid = (times, blocks[0] * rules.merge_size, blocks[1] * rules.merge_size)
    return Decoded(np.zeros(shape, np.uint8), grid)


def batches(encoder: Encoder) -> dict[str, Sequence[Decoded]]:
    unit = encoder.identity.rules.factor
    plain, resized = image(encoder, (4 * unit, 6 * unit), (4, 6)), image(encoder, (333, 77), (5, 3))
    large = image(encoder, (900, 1200), (28, 38))
    return {
        "one": [plain],
        "two": [plain, plain],
        "resized": [resized],
        "two resized": [resized, resized],
        "large": [large],
        "three": [plain, resized, large],
        "beyond the largest budget": [image(encoder, (2000, 3000), (40, 50))],
        "video": [image(encoder, (99, 150), (4, 6), 5)],
        "seven": [image(encoder, (2 * unit, 2 * unit), (2, 2))] * 7,
    }


def run(encoder: Encoder, batch: Sequence[Decoded]) -> float:
    """Returns the milliseconds until the embeddings of a batch are on the device."""
    began = time.perf_counter()
    for _ in encoder.encode_batches(batch):
        pass
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def gemms() -> dict[str, int] | None:
    """Returns the numbers of GEMMs that were loaded and that were compiled here; None without QuACK."""
    if "quack" not in sys.modules:
        return None
    from quack.gemm_runtime.host import _compile_gemm_epi

    info = _compile_gemm_epi.cache_info()
    return {"loaded": info.currsize - info.misses, "compiled": info.misses}


def main() -> None:
    config = EncoderConfig(
        dtype="bfloat16", encoder_cudagraph_token_budgets=BUDGETS, encoder_cudagraph_max_images_per_batch=8
    )
    encoder = Encoder.from_checkpoint(Path(sys.argv[1]), config, device="cuda")
    encoder.warm_up()
    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **found: compiled.append(found["fn"].name)
    found = {}
    for name, batch in batches(encoder).items():
        compiled.clear()
        found[name] = {"first_ms": run(encoder, batch), "compiled": list(compiled), "again_ms": run(encoder, batch)}
    print(json.dumps({"batches": found, "gemms": gemms()}))


if __name__ == "__main__":
    main()
