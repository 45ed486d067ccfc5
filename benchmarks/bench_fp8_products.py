"""Compares each step of a block in bfloat16 and fp8, with the passes around it, by number of rows.

`python benchmarks/bench_fp8_products.py` on a GPU of compute capability 9.0 or newer. A step lasts from one read of the
residual stream to the next: a norm and its product, with q and k rotated if the GEMM can; attention's product; a norm
and both products of the MLP. Additions that a step leaves to the next norm are timed there. A step is captured several
times in one graph, which hides launch time. The results determine which layers run in fp8 (`encoder.fp8.gemm`). The
last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.ladder.measure import Deadline, time_interleaved
from benchmarks.record import gpu, provenance, write
from encoder.fp8.gemm import Fp8Gemm, scaled
from encoder.fused.affine import Affine
from encoder.fused.gemm import Epilogue, Gemm, Layer
from encoder.fused.norm import FusedNorm
from encoder.fused.rope_in_gemm import pair_frequencies, rotation
from encoder.fused.tower import best_gemm

ROWS = (196, 512, 784, 1024, 2048, 3136, 4096, 6272, 17008)
# Width, width between the MLP's layers, activation, whether LayerNorm (else RMSNorm).
TOWERS = {"qwen3_vl": (1152, 4304, Epilogue.GELU_TANH, True), "qwen2_5_vl": (1280, 3420, Epilogue.SWIGLU, False)}
REPEATS, HEADS = 8, 16
CUDA = torch.device("cuda")


def steps(tower: str, rows: int, products: Gemm) -> dict[str, Callable[[], object]]:
    """Returns the steps of one block on random weights and rows."""
    width, between, after, layer_norm = TOWERS[tower]
    between = products.inner_width(between, torch.bfloat16)
    made = 2 * between if after is Epilogue.SWIGLU else between

    def layer(inputs: int, outputs: int) -> Affine:
        return Affine(_random(outputs, inputs) * inputs**-0.5, _random(outputs))

    qkv = products.load(layer(width, 3 * width), Layer.QKV, 0)
    # Quantized too, to measure whether it would be faster.
    proj = products.load(layer(width, width), Layer.QKV, 0)
    scale, shift = _random(width), _random(width)
    norm = FusedNorm(scale, shift if layer_norm else None, torch.zeros(width, device=CUDA))
    first, second = products.load_mlp(
        layer(width, made), layer(between, width), 0, (scale, shift) if after is Epilogue.GELU_TANH else None
    )
    stream, attended = _random(rows, width), _random(rows, width)
    leaves = isinstance(products, Fp8Gemm) and not products.rotates
    sums = _random(1, rows, width) if leaves else None
    positions = torch.randint(0, 64, (rows, 2), dtype=torch.int32, device=CUDA)
    turn = rotation(positions, pair_frequencies(torch.rand(width // 64, device=CUDA), HEADS))

    def qkv_step() -> Tensor:
        normed = norm.before(qkv, stream, sums=sums)
        return products.rotated(qkv, normed, turn) if products.rotates else products(qkv, normed)

    def proj_step() -> Tensor | None:
        return products.accumulate(proj, attended, stream)

    def mlp_step() -> Tensor | None:
        return products.mlp(first, second, norm.before(first, stream, sums=sums), after, stream)

    found: dict[str, Callable[[], object]] = {"qkv": qkv_step, "proj": proj_step, "mlp": mlp_step}
    if isinstance(products, Fp8Gemm):
        # The parts of an fp8 step.
        packed = _random(rows, made)
        found |= {
            "norm alone": lambda: norm.before(qkv, stream, sums=sums),
            "attended rows to 8 bits alone": lambda: scaled(attended),
            "activation to 8 bits alone": lambda: scaled(packed, after),
        }
    return found


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


def captured(step: Callable[[], object]) -> Callable[[int], object]:
    """Captures `REPEATS` runs of the step in one graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            step()
    return lambda number: graph.replay()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Where 8-bit products pay.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="time limit; measurements that would begin later are skipped"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    options = parser.parse_args(arguments)
    deadline = Deadline(60 * options.minutes)
    wide = best_gemm(torch.bfloat16, CUDA)
    cells: list[dict[str, object]] = []
    with torch.inference_mode():
        for tower in TOWERS:
            for rows in ROWS:
                if deadline.over:
                    break
                functions = {f"bfloat16 {name}": captured(step) for name, step in steps(tower, rows, wide).items()}
                narrow = Fp8Gemm(wide)
                functions |= {f"fp8 {name}": captured(step) for name, step in steps(tower, rows, narrow).items()}
                found = time_interleaved(functions, rounds=options.rounds, warm_ups=2, device=CUDA, deadline=deadline)
                us = {name: 1e3 * times.ms / REPEATS for name, times in found.items()}
                cells.append({"tower": tower, "rows": rows, "us": us})
                gains = (f"{name} {us[f'bfloat16 {name}'] / us[f'fp8 {name}']:.2f}" for name in ("qkv", "proj", "mlp"))
                print(f"{tower} {rows} rows, bfloat16 over 8 bits:", *gains, flush=True)
    report = {"benchmark": "fp8_products", "gpu": gpu(), "products": type(wide).__name__, "repeats": REPEATS}
    write(report | {"cells": cells, **provenance(options.commit, arguments)}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
