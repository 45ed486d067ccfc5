"""Throughput from JPEG files to embeddings, compared with the GPU alone: `python benchmarks/bench_decode.py`.

Measures three paths to the same embeddings, over the same photos with the same tower, in images per second. `tower`:
patches are on the device, and embeddings stay there. `device`: decoded pixels are in host memory; copies, resizing and
the tower are timed. `files`: worker processes decode JPEG files and pass pixels through shared memory as in a replica,
without Ray and cache. `decoders` is the throughput of the worker processes alone. Needs torch, numpy, pillow and
safetensors, on a GPU triton. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from PIL import Image, ImageFilter

from benchmarks.ladder.towers import ARCHITECTURES, config_of, random_tower
from benchmarks.record import gpu, provenance, save, write
from configs.encoder_config import EncoderConfig
from deployments.encoder_replica.decode.pool import DecodePool
from deployments.encoder_replica.gpu.worker import GpuWorker
from encoder.encoder import Encoder
from encoder.forwards import choose_forward
from encoder.images.decoded import Decoded, decode
from encoder.images.identity import EncoderIdentity
from encoder.images.size import ImageRules, image_grid, num_tokens
from encoder.runner import TowerRunner
from encoder.staging.pipeline import Launched
from encoder.staging.staging import Staging
from encoder.staging.streams import lanes_for, pin_shared, unpin_shared

TOWERS = tuple(dict.fromkeys(ARCHITECTURES.values()))
"""One tower of each architecture, because the stages before the tower do not depend on its size."""
MAX_PIXELS = 64_000_000
QUALITY = 90
DISTINCT = 16


@dataclass(frozen=True)
class Options:
    side: int
    images: int
    workers: int
    in_flight: int
    shared_bytes: int
    tiny: bool
    device: torch.device
    seed: int


def make_photos(side: int, count: int, seed: int) -> list[bytes]:
    """Returns JPEG files of smoothed noise, with about the bytes per pixel and the decoding time of photographs."""
    rng = np.random.default_rng(seed)
    files = []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8))
        grain = rng.normal(0, 12, (side, side, 3))
        picture = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), np.float64) + grain
        smooth = Image.fromarray(picture.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(0.7))
        file = io.BytesIO()
        smooth.save(file, "JPEG", quality=QUALITY)
        files.append(file.getvalue())
    return files


def make_encoder(arch: str, asked: Options) -> Encoder:
    """Returns an encoder of the published size with random weights and default settings."""
    dtype = torch.bfloat16 if asked.device.type == "cuda" else torch.float32
    vision = config_of(arch, tiny=asked.tiny, dtype=str(dtype).removeprefix("torch."))
    half = (0.5, 0.5, 0.5)
    rules = (
        ImageRules(patch_size=16, min_pixels=65_536, max_pixels=16_777_216, image_mean=half, image_std=half)
        if arch == "qwen3_vl"
        else ImageRules(max_pixels=12_845_056)
    )
    config = EncoderConfig(fused_kernels="auto", cudagraph_mm_encoder="auto")
    tower = random_tower(vision, seed=asked.seed, dtype=dtype, device=asked.device)
    runner = TowerRunner.build(choose_forward(tower, config), config)
    del tower
    encoder = Encoder(runner, EncoderIdentity("random", vision, str(dtype), rules), config)
    encoder.warm_up()
    return encoder


def rate(images: int, run: Callable[[], object], device: torch.device) -> float:
    """Returns images per second of `run`, which the caller has warmed up."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return images / (time.perf_counter() - began)


def measure(arch: str, asked: Options, files: Sequence[bytes]) -> dict[str, object]:
    """Measures all paths of one tower in images per second."""
    made: list[tuple[Encoder, float, float]] = []

    def make() -> Encoder:
        """Runs on the thread that will own the encoder; measures the two paths without files there too."""
        encoder = make_encoder(arch, asked)
        rules = encoder.identity.rules
        decoded = [decode(file, rules, None, max_pixels_decoded=MAX_PIXELS) for file in files]
        made.append((encoder, tower_rate(encoder, decoded, asked), device_rate(encoder, decoded, asked)))
        return encoder

    worker = GpuWorker(make, max_queued_tokens=10**9)
    ((encoder, tower, device),) = made
    rules = encoder.identity.rules
    pool = DecodePool(
        rules,
        workers=asked.workers,
        max_pixels=MAX_PIXELS,
        timeout_s=120,
        shm_bytes=asked.shared_bytes,
        resize=not encoder.resizes_on_device,
    )
    if encoder.resizes_on_device:
        pin_shared(pool.arena.address, pool.arena.num_bytes)
    try:
        decoders, whole = asyncio.run(file_rates(pool, worker, files, asked))
    finally:
        pool.workers.stop()
        worker.stop(wait=True)  # a thread that ends together with the process may abort the process
        if encoder.resizes_on_device:
            unpin_shared(pool.arena.address)
    return {
        "tokens_per_image": num_tokens(image_grid(asked.side, asked.side, rules), rules.merge_size),
        "tower_images_per_s": tower,
        "device_images_per_s": device,
        "decoders_images_per_s": decoders,
        "files_images_per_s": whole,
        "files_over_tower": whole / tower,
        "staging": asdict(encoder.staging_counts),
        "runs": asdict(encoder.counts),
    }


def tower_rate(encoder: Encoder, decoded: Sequence[Decoded], asked: Options) -> float:
    """Measures patches to embeddings, both on the device, in the batches that the encoder makes of all images."""
    rules, runner = encoder.identity.rules, encoder.runner
    staging = Staging(rules, lanes_for(asked.device))
    patches = []
    for image in decoded:
        with staging.stage([image]) as staged:
            patches.append(staged.patches(dtype=runner.forward.dtype))
    chosen = [number % len(decoded) for number in range(asked.images)]
    grids = [decoded[number].grid_thw for number in chosen]
    batches = [
        (torch.cat([patches[chosen[i]] for i in batch.indices]), [grids[i] for i in batch.indices], batch.budget)
        for batch in runner.plan_batches(grids[: asked.in_flight])
    ]
    rounds = max(1, asked.images // asked.in_flight)

    def run(rounds: int = rounds) -> None:
        for _ in range(rounds):
            for batch in batches:
                runner.run(*batch)

    run(1)
    return rate(rounds * min(asked.in_flight, len(grids)), run, asked.device)


def device_rate(encoder: Encoder, decoded: Sequence[Decoded], asked: Options) -> float:
    """Measures decoded pixels in pageable host memory to embeddings fetched one batch later."""
    images = [decoded[number % len(decoded)] for number in range(asked.images)]

    def run(count: int) -> None:
        before: Launched | None = None
        for start in range(0, count, asked.in_flight):
            for launched in encoder.launch_batches(images[start : min(start + asked.in_flight, count)]):
                if before is not None:
                    before.fetch()
                before = launched
        if before is not None:
            before.fetch()

    run(min(asked.in_flight, asked.images))
    return rate(asked.images, lambda: run(asked.images), asked.device)


async def file_rates(
    pool: DecodePool, worker: GpuWorker, files: Sequence[bytes], asked: Options
) -> tuple[float, float]:
    """Measures the decoders alone, and files to embeddings in host memory, with `in_flight` images in flight."""
    places = asyncio.Semaphore(asked.in_flight)
    size = (asked.side, asked.side)

    async def one(number: int, *, encoded: bool) -> None:
        async with places:
            pixels = await pool.decode(files[number % len(files)], None, size)
            if encoded:
                await asyncio.wrap_future(worker.submit(pixels))

    async def images_per_s(count: int, *, encoded: bool) -> float:
        began = time.perf_counter()
        await asyncio.gather(*[one(number, encoded=encoded) for number in range(count)])
        return count / (time.perf_counter() - began)

    warm = max(asked.in_flight, 2 * asked.workers)
    await images_per_s(warm, encoded=True)
    return await images_per_s(asked.images, encoded=False), await images_per_s(asked.images, encoded=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Images a second from JPEG files to embeddings.")
    parser.add_argument("--arch", choices=(*TOWERS, "both"), default="both")
    parser.add_argument("--side", type=int, help="side of the photos in pixels (default: 1024, tiny: 96)")
    parser.add_argument("--images", type=int, help="images per measurement (default: 512, tiny: 12)")
    parser.add_argument("--in-flight", type=int, help="images in flight (default: 64, tiny: 4)")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="decoder processes")
    parser.add_argument("--shared-mib", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small towers and images, which run without a GPU")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = Options(
        side=options.side or (96 if options.tiny else 1024),
        images=options.images or (12 if options.tiny else 512),
        workers=options.workers,
        in_flight=options.in_flight or (4 if options.tiny else 64),
        shared_bytes=options.shared_mib * 2**20,
        tiny=options.tiny,
        device=torch.device(options.device),
        seed=options.seed,
    )
    files = make_photos(asked.side, min(DISTINCT, asked.images), asked.seed)
    archs: dict[str, object] = {}
    report: dict[str, object] = {
        "benchmark": "decode",
        "gpu": gpu() if asked.device.type == "cuda" else None,
        "cores": os.cpu_count(),
        "workers": asked.workers,
        "images": asked.images,
        "in_flight": asked.in_flight,
        "side": asked.side,
        "jpeg_bytes": sum(map(len, files)) // len(files),
        "tiny": asked.tiny,
        "device": asked.device.type,
        "archs": archs,
        **provenance(options.commit, arguments),
    }
    for arch in TOWERS if options.arch == "both" else [options.arch]:
        archs[arch] = result = measure(arch, asked, files)
        shown = "  ".join(f"{name} {value:.1f}" for name, value in result.items() if isinstance(value, float))
        print(f"{arch}: {shown}", flush=True)
        if options.out is not None:
            save(report, options.out)
    write(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
