"""The encoder's ladder, rung by rung, compared with its peers: `python benchmarks/bench_encoder.py --ladder`.

Towers have the published shapes and random weights, so no checkpoint is needed (`--weights massive` plants massive
activations in them). Patches are on the device, embeddings stay there, and there is no embedding cache. All contestants
take turns in random order, with vLLM's in a separate process; then the fastest of each side run alone for `--sustain`
seconds. Every figure has the GPU's clock and power. `--accuracy MODEL` measures errors on a checkpoint's own weights
instead. Needs torch, numpy and safetensors, on a GPU triton, and for errors transformers. The last line on stdout is
JSON, and `--out` is written after each shape, so that an interrupted run keeps its results; `--resume` continues from
them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.ladder.accuracy import accuracy_table, measure_accuracy
from benchmarks.ladder.baton import Peer
from benchmarks.ladder.gpu_clock import Readings, sample_gpu
from benchmarks.ladder.ladder import NO_TIME, Ladder, Options, new_record
from benchmarks.ladder.massive import WEIGHTS
from benchmarks.ladder.measure import Deadline, product_tflops
from benchmarks.ladder.rungs import HOPPER_PACKAGES, RUNGS
from benchmarks.ladder.summary import sentences, summary, sustained_sentences, together
from benchmarks.ladder.text import ladder_table
from benchmarks.ladder.towers import HELD_OUT, SECTIONS, SHAPES
from benchmarks.peers import vllm_process
from benchmarks.record import ROOT, gpu, provenance, save, write
from benchmarks.reports.ladder import plot
from encoder.checkpoint.files import CheckpointError

PEERS = ("transformers", "vllm")
TINY_PEAK_SIDE = 256
TRAINED = str(ROOT / "models" / "scenes-8m")
"""Trained weights, which have outliers that random ones lack."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The encoder's ladder beside its peers.")
    parser.add_argument("--ladder", action="store_true", help="all rungs (the default without --only)")
    parser.add_argument("--only", type=_names(RUNGS), help=f"some of {','.join(RUNGS)}")
    parser.add_argument("--peers", type=_names(PEERS), default=(), help=f"some of {','.join(PEERS)}")
    parser.add_argument("--arch", type=_names(tuple(SECTIONS)), default=tuple(SECTIONS), help="default: all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="small towers and images, which run without a GPU")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="time limit; measurements that would begin later are skipped"
    )
    parser.add_argument("--shapes", type=_names((*SHAPES, *HELD_OUT)), default=(), help="default: all")
    parser.add_argument(
        "--sustain", type=float, default=3.0, metavar="S", help="seconds of each sustained run; 0: none"
    )
    parser.add_argument(
        "--settle", type=float, default=0.3, metavar="S", help="seconds before each sustained run that are not counted"
    )
    parser.add_argument(
        "--sustain-all", action="store_true", help="sustain every configuration, not only the fastest of each side"
    )
    parser.add_argument(
        "--accuracy",
        metavar="MODEL",
        help="instead of times, the error of each rung on this checkpoint's weights against float32; once more with "
        "--without-hopper for the kernels of an A100",
    )
    parser.add_argument(
        "--weights",
        choices=tuple(WEIGHTS),
        default="random",
        help="massive: with massive activations, as trained towers have them, and fp8's error limited as in a server",
    )
    parser.add_argument("--resume", action="store_true", help="measure what the file of --out lacks")
    parser.add_argument(
        "--without-hopper",
        action="store_true",
        help="simulate a GPU before Hopper: do not use packages and kernel launches that need Hopper or newer",
    )
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--plot", type=Path, help="draw a PNG of the rungs (pip install '.[bench]')")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    asked = parser.parse_args(arguments)
    if asked.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install '.[bench]'")
    if asked.ladder and asked.only:
        parser.error("--ladder asks for all rungs and --only for some")
    if asked.resume and asked.out is None:
        parser.error("--resume needs --out")
    if min(asked.sustain, asked.settle) < 0:
        parser.error(f"--sustain is {asked.sustain} and --settle {asked.settle}; they must be at least 0")
    if asked.accuracy is not None and (asked.tiny or asked.resume or asked.peers):
        parser.error("--accuracy goes with --only, --device, --without-hopper, --out and --commit")
    if asked.rounds < 1:
        parser.error(f"--rounds is {asked.rounds}; it must be at least 1")
    return asked


def _device(text: str) -> str:
    count = torch.cuda.device_count()
    allowed = ("cpu", *(("cuda",) if count else ()), *(f"cuda:{number}" for number in range(count)))
    if text not in allowed:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(allowed)}")
    return text


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
        _hide_hopper(options.device)
    if options.accuracy is not None:
        try:
            found = measure_accuracy(options.accuracy, _rungs(options), torch.device(options.device))
        except CheckpointError as error:
            raise SystemExit(f"--accuracy: {error}") from error
        print(accuracy_table(found), flush=True)
        source = provenance(options.commit, arguments)
        report = {"benchmark": "accuracy", "without_hopper": options.without_hopper, **found, **source}
        write({**report, "gpu": None if options.device == "cpu" else gpu()}, options.out)
        return 0
    report = _begun(options, arguments)
    folder = options.out.parent if options.out is not None else Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # The peer imports vLLM while our own contestants are built; it uses the GPU only on request.
        start = partial(Peer, vllm_process.make, folder / "vllm.log")
        wanted = "vllm" in options.peers and importlib.util.find_spec("vllm") is not None
        peer = stack.enter_context(start()) if wanted else None
        readings = stack.enter_context(sample_gpu(0 if options.device.startswith("cuda") else None))
        for number, arch in enumerate(options.arch):
            share = Deadline(deadline.left / (len(options.arch) - number))
            if peer is not None and not peer.alive:
                peer = stack.enter_context(start())
            _measure(arch, report, options, share, readings, peer)
    print("\n".join(["", *sustained_sentences(report["summary"]), *sentences(report["summary"])]), flush=True)
    if "fp8" in _rungs(options) and options.device != "cpu" and not deadline.over and "fp8_trained" not in report:
        report["fp8_trained"] = found = measure_accuracy(TRAINED, ("fusion", "fp8"), torch.device(options.device))
        print(f"\n8 bits on trained weights:\n{accuracy_table(found)}", flush=True)
    if options.plot is not None:
        plot([report], options.plot)
    write(report, options.out)
    return 1 if failures(report["archs"]) else 0


def _rungs(options: argparse.Namespace) -> tuple[str, ...]:
    rungs: tuple[str, ...] = options.only or RUNGS
    return tuple(name for name in rungs if name != "fp8") if options.without_hopper else rungs


def _begun(options: argparse.Namespace, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Returns the report of the resumed file, or an empty one. Raises SystemExit for a file of another run, or for one
    that is no report."""
    device = torch.device(options.device)
    peak = product_tflops(device, TINY_PEAK_SIDE) if options.tiny else product_tflops(device)
    fresh: dict[str, Any] = {
        "benchmark": "encoder",
        "gpu": gpu() if device.type == "cuda" else None,
        "device": device.type,
        "tiny": options.tiny,
        "without_hopper": options.without_hopper,
        "seed": options.seed,
        "weights": options.weights,
        "rounds": options.rounds,
        "settle_s": options.settle,
        "sustain_s": options.sustain,
        "product_tflops": peak,
        "archs": {},
        "summary": together([]),
        **provenance(options.commit, arguments),
    }
    print(f"{device.type}: {fresh['gpu']}; a square bfloat16 product reaches {peak:.0f} TFLOP/s", flush=True)
    if not options.resume or not options.out.exists():
        return fresh
    try:
        found: dict[str, Any] = dict(json.loads(options.out.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(f"--resume: {options.out} is no report of this benchmark: {error}") from error
    for key in ("benchmark", "gpu", "tiny", "without_hopper", "seed", "weights", "commit"):
        if found.get(key) != fresh[key]:
            raise SystemExit(f"--resume: {options.out.name} has {key} {found.get(key)!r}, this run {fresh[key]!r}")
    return found


def _measure(
    arch: str,
    report: dict[str, Any],
    options: argparse.Namespace,
    deadline: Deadline,
    readings: Readings,
    peer: Peer | None,
) -> None:
    """Measures one tower into the report, which is saved after each shape."""
    asked = Options(
        rungs=_rungs(options),
        peers=options.peers,
        rounds=options.rounds,
        seed=options.seed,
        tiny=options.tiny,
        dtype=getattr(torch, options.dtype),
        device=torch.device(options.device),
        cold_batches=2 if options.tiny else 6,
        cold_images=2 if options.tiny else 8,
        settle_s=options.settle,
        sustain_s=options.sustain,
        sustain_all=options.sustain_all,
        shapes=options.shapes,
        weights=options.weights,
    )
    record = report["archs"].setdefault(arch, new_record(arch, asked))
    record["skipped"] = [entry for entry in record["skipped"] if entry["reason"] != NO_TIME]

    def keep() -> None:
        record["summary"] = summary(record)
        report["summary"] = together([one["summary"] for one in report["archs"].values() if "summary" in one])
        if options.out is not None:
            save(report, options.out)

    ladder = Ladder(
        arch,
        asked,
        record,
        peak_tflops=report["product_tflops"],
        deadline=deadline,
        readings=readings,
        save=keep,
        peer=peer,
    )
    ladder.measure()
    keep()
    print(ladder_table(record), flush=True)
    del ladder
    if options.device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()


def _hide_hopper(device: str) -> None:
    """Simulates a host without the packages, and a GPU without the launches, that need Hopper or newer."""
    for name in HOPPER_PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment] # makes an import fail as for a missing package
    if device != "cpu":
        from encoder.kernels import overlap

        overlap.FIRST_CAPABILITY = (sys.maxsize, 0)


def failures(archs: Mapping[str, Any]) -> list[str]:
    """Returns the names of contestants that failed; unavailable ones are not included."""
    return [
        entry["name"]
        for result in archs.values()
        for entry in result["skipped"]
        if entry["reason"].startswith("failed")
    ]


if __name__ == "__main__":
    sys.exit(main())
