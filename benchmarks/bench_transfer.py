"""Transfer time from the encoder's device to the engine's on one host, by path: `python benchmarks/bench_transfer.py`.

Timed from the moment an embedding `[num_tokens, width]` is computed on the encoder's GPU in one process until another
process has it on its own GPU. All embeddings differ, and each is verified after it was timed. Each process sees only
its own GPU, as Ray Serve's replicas do. `separate`: one GPU each; `one_gpu`: both on the same one. `today` uses Ray's
object store to a third process, which represents the LLM replica, and then vLLM's transfer of tensors in requests; a
process with pyzmq and torch represents vLLM's engine. No path includes Serve's own messages. Needs torch and numpy;
`today` needs ray, pyzmq and msgspec. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import math
import mmap
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.record import gpu, provenance, write
from benchmarks.transfer import object_store as transfer_today
from benchmarks.transfer.figures import BARS_MS, Options, Took, bars_met, change, device_here, sum_of_bits
from benchmarks.transfer.paths import SLOTS, TRANSFER_PATHS, Receiver, Side, slot_bytes
from deployments.transfer.shared_memory import Arena

TODAY = "today"
PATHS = (*TRANSFER_PATHS, TODAY)
TINY_PATHS = ("application", "shared_memory", "shared_memory_2mib", "cuda_ipc")
PAIR_PATIENCE_S = 240.0


def send_all(path: str, options: Options, shared: mmap.mmap, channel: Connection) -> None:
    """Runs the encoder's process."""
    side = Side(device_here(), channel, shared, options.most_bytes)
    sender = TRANSFER_PATHS[path].sender(side)
    in_place = getattr(sender, "buffer", None) if path == "cuda_ipc_in_place" else None
    for megabytes in options.megabytes:
        shape = (options.num_tokens(megabytes), options.width)
        tokens = torch.randn(shape, device=side.device).to(torch.bfloat16)
        if in_place is not None:
            tokens = in_place[: tokens.nbytes].view(torch.bfloat16).view(shape).copy_(tokens)
        for _ in range(options.warm_ups + options.rounds):
            change(tokens)
            channel.send(sum_of_bits(tokens))
            channel.recv()  # the receiver waits for the embedding, as an engine does
            began = time.perf_counter()  # on Linux, all processes share this clock
            sender.send(tokens)
            channel.send(began)
            channel.recv()


def receive_all(path: str, options: Options, shared: mmap.mmap, channel: Connection, results: Connection) -> None:
    """Runs the engine's process; sends the measurements, or the reason for having none."""
    try:
        side = Side(device_here(), channel, shared, options.most_bytes)
        receiver = TRANSFER_PATHS[path].receiver(side)
        results.send({megabytes: _receive(receiver, side, options, megabytes) for megabytes in options.megabytes})
    except Exception as error:
        traceback.print_exc()
        results.send(f"{type(error).__name__}: {error}")


def _receive(receiver: Receiver, side: Side, options: Options, megabytes: float) -> Took:
    out = torch.zeros(options.num_tokens(megabytes), options.width, dtype=torch.bfloat16, device=side.device)
    seconds = []
    for number in range(options.warm_ups + options.rounds):
        expected = side.channel.recv()
        side.channel.send("ready")
        found_tokens = receiver.receive(out)
        ended = time.perf_counter()
        began = side.channel.recv()
        if (found := sum_of_bits(found_tokens)) != expected:
            raise AssertionError(f"{megabytes} MB: the received bits add up to {found}, the sent ones to {expected}")
        if number >= options.warm_ups:
            seconds.append(ended - began)
        side.channel.send("next")
    return Took.of(seconds, out.nbytes)


@contextmanager
def sees_gpu(number: int | None) -> Iterator[None]:
    """Restricts processes started inside the block to this GPU."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if number is not None:
        names = before.split(",") if before else [str(each) for each in range(number + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[number]
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def measure(path: str, options: Options, gpus: tuple[int | None, int | None]) -> dict[float, Took] | str:
    """Measures one path in two fresh processes on these GPUs; returns the reason if that fails."""
    context = multiprocessing.get_context("spawn")
    arena = Arena(SLOTS * slot_bytes(options.most_bytes))
    one, other = context.Pipe()
    results, told = context.Pipe(duplex=False)
    processes: list[BaseProcess] = [
        context.Process(target=send_all, args=(path, options, arena, one)),
        context.Process(target=receive_all, args=(path, options, arena, other, told)),
    ]
    for process, number in zip(processes, gpus, strict=True):
        with sees_gpu(number):
            process.start()
    for end in (one, other, told):
        end.close()
    try:
        wait([results, processes[0].sentinel], timeout=PAIR_PATIENCE_S)
        if not results.poll(5.0):  # the sender may have exited first, as it does at the end
            return f"no result; the sender ended with {processes[0].exitcode}"
        return results.recv()  # type: ignore[no-any-return]
    except EOFError:
        return "the receiver ended without a word"
    finally:
        for process in processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()


def today(options: Options, gpus: tuple[int | None, int | None]) -> dict[float, Took] | str:
    """Measures the path through Ray in a separate Ray with these GPUs only."""
    with sees_gpu(0 if gpus == (0, 0) else None):
        return transfer_today.measure(options, num_gpus=len({number for number in gpus if number is not None}))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=_megabytes, help="sizes of embeddings, 10^6 bytes; default: 10,70,500")
    parser.add_argument("--width", type=int, default=16384, help="width of a token's embedding; Qwen3-VL-8B has 16384")
    parser.add_argument("--rounds", type=int, help="default: 50")
    parser.add_argument("--ways", type=_paths, help=f"some of {','.join(PATHS)}; default: all")
    parser.add_argument("--tiny", action="store_true", help="other defaults: 0.1 and 1 MB, 5 rounds, some of the paths")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    defaults = ((0.1, 1.0), 5, TINY_PATHS) if given.tiny else ((10.0, 70.0, 500.0), 50, PATHS)
    for name, default in zip(("megabytes", "rounds", "ways"), defaults, strict=True):
        if getattr(given, name) is None:
            setattr(given, name, default)
    for name in ("rounds", "width"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} is {getattr(given, name)}; it must be at least 1")
    return given


def _megabytes(text: str) -> tuple[float, ...]:
    try:
        sizes = tuple(map(float, text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or not all(0 < size < math.inf for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers above 0, separated by commas")
    return sizes


def _paths(text: str) -> tuple[str, ...]:
    paths = tuple(text.split(","))
    for path in paths:
        if path not in PATHS:
            raise argparse.ArgumentTypeError(f"{path!r} is not one of {', '.join(PATHS)}")
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(arguments)
    options = Options(given.megabytes, given.width, given.rounds, 5)
    count = torch.cuda.device_count()
    layouts: dict[str, tuple[int | None, int | None]] = {"host_memory": (None, None)} if not count else {}
    if count >= 2:
        layouts["separate"] = (0, 1)
    if count >= 1:
        layouts["one_gpu"] = (0, 0)
    report: dict[str, object] = {"benchmark": "transfer", **provenance(given.commit, arguments), "gpu": gpu()}
    report |= {"gpus": count, "cpus": os.cpu_count(), "width": options.width, "dtype": "bfloat16"}
    report["peer_access"] = torch.cuda.can_device_access_peer(0, 1) if count >= 2 else None
    report["bars_ms"] = {f"{mb:g}": most for mb, most in BARS_MS.items()}
    measured: dict[str, object] = {}
    for layout, gpus in layouts.items():
        here: dict[str, object] = {}
        for path in given.ways:
            if path != TODAY and TRANSFER_PATHS[path].needs_gpu and not count:
                here[path] = {"unavailable": "there is no GPU"}
                continue
            found = today(options, gpus) if path == TODAY else measure(path, options, gpus)
            if isinstance(found, str):
                here[path] = {"unavailable": found}
                print(f"{layout:12} {path:24} {found}", file=sys.stderr, flush=True)
                continue
            here[path] = {"sizes": {f"{mb:g}": asdict(took) for mb, took in found.items()}, "bars_met": bars_met(found)}
            times = "  ".join(f"{mb:g} MB {took.p50_ms:.2f} ({took.p90_ms:.2f})" for mb, took in found.items())
            print(f"{layout:12} {path:24} {times}  ms, p50 (p90)", file=sys.stderr, flush=True)
        measured[layout] = here
    write({**report, "layouts": measured}, given.out)


if __name__ == "__main__":
    main()
