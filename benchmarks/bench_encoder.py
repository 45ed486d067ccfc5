"""The encoder's ladder, rung by rung, beside its peers: `python benchmarks/bench_encoder.py --ladder`.

Towers of the published shapes with random weights, so that no checkpoint is needed; patches lie on the device and
embeddings stay there; there is no embedding cache. Needs torch, numpy and safetensors, on a GPU triton, and for errors
transformers. The last line on stdout is JSON, and `--out` writes it after each tower, so that a run that is cut short
leaves what it has.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import peer_vllm
from benchmarks.ladder import Asked, measure
from benchmarks.ladder_summary import sentences, summary, together
from benchmarks.ladder_text import ladder_table
from benchmarks.measure import Deadline, product_tflops
from benchmarks.record import gpu, provenance, save, write
from benchmarks.report_ladder import plot
from benchmarks.rungs import HOPPER_PACKAGES, RUNGS
from benchmarks.towers import SECTIONS
from benchmarks.trained_model import trained_agreement

PEERS = ("transformers", "vllm")
TINY_PEAK_SIDE = 256


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The encoder's ladder beside its peers.")
    parser.add_argument("--ladder", action="store_true", help="all rungs (the default without --only)")
    parser.add_argument("--only", type=_names(RUNGS), help=f"some of {','.join(RUNGS)}")
    parser.add_argument("--peers", type=_names(PEERS), default=(), help=f"some of {','.join(PEERS)}")
    parser.add_argument("--arch", type=_names(tuple(SECTIONS)), default=tuple(SECTIONS), help="default: both")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="small towers and images, to try the program anywhere")
    parser.add_argument("--minutes", type=float, default=8.0, help="what does not begin within them is left out")
    parser.add_argument(
        "--peer-minutes", type=float, default=3.0, help="for vLLM beside each tower, if --minutes leaves less"
    )
    parser.add_argument(
        "--without-hopper",
        action="store_true",
        help="as on a GPU before Hopper: without the packages and launches that only Hopper and newer can use",
    )
    parser.add_argument("--out", type=Path, help="write the JSON to this file too")
    parser.add_argument("--plot", type=Path, help="draw a PNG of the rungs (pip install '.[bench]')")
    parser.add_argument("--commit", help="of the sources, where git is not there to say it")
    asked = parser.parse_args(arguments)
    if asked.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install '.[bench]'")
    if asked.ladder and asked.only:
        parser.error("--ladder asks for all rungs and --only for some")
    if asked.rounds < 1:
        parser.error(f"--rounds is {asked.rounds}; it must be at least 1")
    return asked


def _names(allowed: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(allowed)}")
        return names

    return read


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    deadline = Deadline(60 * options.minutes)
    if options.without_hopper:
        for name in HOPPER_PACKAGES:
            sys.modules[name] = None  # type: ignore[assignment] # what import of a missing package leaves behind
        if options.device != "cpu":
            from encoder.kernels import overlap

            overlap.FIRST_CAPABILITY = (sys.maxsize, 0)
    rungs = options.only or RUNGS
    if options.without_hopper:
        rungs = tuple(name for name in rungs if name != "fp8")
    device = torch.device(options.device)
    asked = Asked(
        rungs=rungs,
        peers=options.peers,
        rounds=options.rounds,
        seed=options.seed,
        tiny=options.tiny,
        dtype=getattr(torch, options.dtype),
        device=device,
        cold_batches=2 if options.tiny else 6,
        cold_images=2 if options.tiny else 8,
    )
    peak = product_tflops(device, TINY_PEAK_SIDE) if options.tiny else product_tflops(device)
    archs: dict[str, object] = {}
    summaries: list[dict[str, Any]] = []
    report: dict[str, object] = {
        "benchmark": "encoder",
        "gpu": gpu() if device.type == "cuda" else None,
        "device": device.type,
        "tiny": options.tiny,
        "without_hopper": options.without_hopper,
        "seed": options.seed,
        "rounds": options.rounds,
        "product_tflops": peak,
        "archs": archs,
        **provenance(options.commit, arguments),
    }
    print(f"{device.type}: {report['gpu']}; a square bfloat16 product reaches {peak:.0f} TFLOP/s", flush=True)
    for arch in options.arch:
        archs[arch] = result = measure(arch, asked, peak, deadline)
        if "vllm" in options.peers:
            peer_vllm.add(result, arch, asked, Deadline(max(60 * options.peer_minutes, deadline.left)))
        summaries.append(summary(result))
        result["summary"], report["summary"] = summaries[-1], together(summaries)
        print(ladder_table(result), flush=True)
        if options.out is not None:
            save(report, options.out)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("\n".join(["", *sentences(together(summaries))]), flush=True)
    if "fp8" in rungs and device.type == "cuda" and not deadline.over:
        report["fp8_trained"] = found = trained_agreement(device)
        print("\n8 bits on trained weights:", *(f"{name}: {value}" for name, value in found.items()), sep="\n  ")
    if options.plot is not None:
        plot([report], options.plot)
    write(report, options.out)
    return 1 if failures(archs) else 0


def failures(archs: Mapping[str, Any]) -> list[str]:
    """What should have run and did not, beside what cannot be had here."""
    return [
        entry["name"]
        for result in archs.values()
        for entry in result["skipped"]
        if entry["reason"].startswith("failed")
    ]


if __name__ == "__main__":
    sys.exit(main())
