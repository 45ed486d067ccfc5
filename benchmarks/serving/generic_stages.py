"""Times a generic encoder on a GPU, without a server: `python benchmarks/serving/generic_stages.py glm4v gemma3`.

Random weights of a published size, images of 448 × 448 pixels. Prints the milliseconds of vLLM's processor, and for
each number of images those from its output to embeddings in host memory, with and without vLLM's encoder graphs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from benchmarks.ladder.measure import timed
from benchmarks.serving.checkpoint import GENERIC, make_generic
from configs.encoder_config import EncoderConfig
from deployments.vllm.preparer import Preparer, VllmInputs
from deployments.vllm.vllm_encoder import VllmEncoder, VllmTower
from tests.models.media import image

SIDE, ROUNDS = 448, 7
COUNTS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
ENGINE: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 16384}


def milliseconds(run: Callable[[], object]) -> float:
    """Returns the median of ROUNDS runs after one more."""
    device = torch.device("cuda")
    return round(median([timed(run, device) for _ in range(ROUNDS + 1)][1:]), 2)


def encode(encoder: VllmEncoder, items: Sequence[VllmInputs]) -> None:
    for batch in list(encoder.launch_batches(items)):  # a server fetches in another thread
        batch.fetch()


def measure(name: str, folder: Path) -> None:
    path = make_generic(name, folder / name)
    preparer = Preparer(path, ENGINE)
    files = [image(seed, SIDE, SIDE) for seed in range(max(COUNTS))]
    items = [preparer.prepare(file, "image", f"{seed:064x}") for seed, file in enumerate(files)]
    took = milliseconds(lambda: preparer.prepare(files[0], "image", "0" * 64))
    print(f"{name}: processor {took} ms, {len(items[0].inputs)} bytes, {items[0].num_tokens} tokens", flush=True)
    for graphs in (False, True):
        config = EncoderConfig(cudagraph_mm_encoder=graphs)
        encoder = VllmEncoder(VllmTower(path, config, ENGINE), config)
        began = time.perf_counter()
        encoder.warm_up(["image"], lambda file, modality: preparer.prepare(file, modality, "0" * 64))
        print(f"{name}, graphs {graphs}: warm-up {time.perf_counter() - began:.2f} s", flush=True)
        for count in COUNTS:
            took = milliseconds(partial(encode, encoder, items[:count]))
            print(f"{name}, graphs {graphs}, {count} images: {took} ms", flush=True)
        print(f"{name}, graphs {graphs}: {encoder.counts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a generic encoder.")
    parser.add_argument("names", nargs="+", choices=tuple(GENERIC))
    torch.set_num_threads(1)
    for name in parser.parse_args().names:
        with tempfile.TemporaryDirectory() as folder:
            measure(name, Path(folder))


if __name__ == "__main__":
    main()
