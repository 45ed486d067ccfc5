"""Where 8 bits pay: each step of a block in bfloat16 and in 8 bits, with the passes around it, by rows.

`python benchmarks/bench_fp8_products.py` on a GPU of compute capability 9.0 or newer. A step is what runs from one
reading of the residual stream to the next: a norm and its product, q and k turned where the product can, attention's
product, a norm and both products of the MLP; what a step leaves to the next norm is added there. It is captured several
times in a row in one graph, so that launches do not count. The last line is JSON. The rows from which on 8 bits are
used are set by this (`encoder.fp8_products`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.measure import Deadline, interleaved
from benchmarks.record import gpu, provenance, write
from encoder.fp8_products import Fp8Products, scaled
from encoder.fused import best_products
from encoder.fused_norm import FusedNorm
from encoder.products import Affine, After, Part, TorchProducts
from encoder.rotation import pair_frequencies, rotation

ROWS = (196, 512, 784, 1024, 2048, 3136, 4096, 6272, 17008)
# Width, width between the MLP's layers, activation, LayerNorm or RMSNorm.
TOWERS = {"qwen3_vl": (1152, 4304, After.GELU_TANH, True), "qwen2_5_vl": (1280, 3420, After.SWIGLU, False)}
REPEATS, HEADS = 8, 16
LARGEST_BETWEEN = 8.0
"""The MLP's, on random weights and rows of about 1."""
CUDA = torch.device("cuda")


def in_8_bits(wide: TorchProducts) -> Fp8Products:
    """The products of 8 bits beside `wide`, for any number of rows."""
    if not wide.turns:
        return Fp8Products(wide, fewest_rows=0)
    from encoder.quack_fp8 import QuackFp8Products
    from encoder.quack_products import QuackProducts

    assert isinstance(wide, QuackProducts)
    return QuackFp8Products(wide, largest=(LARGEST_BETWEEN,), fewest_rows=0)


def steps(tower: str, rows: int, products: TorchProducts) -> dict[str, Callable[[], object]]:
    """The steps of one block, on random weights and rows."""
    width, between, after, layer_norm = TOWERS[tower]
    between = products.inner_width(between, torch.bfloat16)
    made = 2 * between if after is After.SWIGLU else between

    def layer(inputs: int, outputs: int, part: Part) -> Affine:
        weight, bias = _random(outputs, inputs) * inputs**-0.5, _random(outputs)
        return products.load(Affine(weight, bias), part, 0)

    qkv, proj = layer(width, 3 * width, Part.QKV), layer(width, width, Part.PROJ)
    first, second = layer(width, made, Part.UP), layer(between, width, Part.DOWN)
    norm = FusedNorm(_random(width), _random(width) if layer_norm else None, torch.zeros(width, device=CUDA))
    stream, attended = _random(rows, width), _random(rows, width)
    leaves = isinstance(products, Fp8Products) and not products.turns
    sums = _random(1, rows, width) if leaves else None
    positions = torch.randint(0, 64, (rows, 2), dtype=torch.int32, device=CUDA)
    turn = rotation(positions, pair_frequencies(torch.rand(width // 64, device=CUDA), HEADS))

    def qkv_step() -> Tensor:
        normed = norm.before(qkv, products, stream, sums=sums)
        return products.turned(qkv, normed, turn) if products.turns else products(qkv, normed)

    def proj_step() -> Tensor | None:
        return products.add_later(proj, attended, stream)

    def mlp_step() -> Tensor | None:
        return products.add_both_later(first, second, norm.before(first, products, stream, sums=sums), after, stream)

    found: dict[str, Callable[[], object]] = {"qkv": qkv_step, "proj": proj_step, "mlp": mlp_step}
    if isinstance(products, Fp8Products):
        # What a step in 8 bits is made of.
        packed = _random(rows, made)
        found |= {
            "norm alone": lambda: norm.before(qkv, products, stream, sums=sums),
            "attended rows to 8 bits alone": lambda: scaled(attended),
            "activation to 8 bits alone": lambda: scaled(packed, after),
        }
    return found


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


def captured(step: Callable[[], object]) -> Callable[[int], object]:
    """`REPEATS` of it in one graph."""
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
    parser.add_argument("--minutes", type=float, default=4.0, help="what does not begin within them is left out")
    parser.add_argument("--out", type=Path, help="write the JSON to this file too")
    parser.add_argument("--commit", help="of the sources, where git is not there to say it")
    options = parser.parse_args(arguments)
    deadline = Deadline(60 * options.minutes)
    wide = best_products(torch.bfloat16, CUDA)
    cells: list[dict[str, object]] = []
    with torch.inference_mode():
        for tower in TOWERS:
            for rows in ROWS:
                if deadline.over:
                    break
                ways = {f"bfloat16 {name}": captured(step) for name, step in steps(tower, rows, wide).items()}
                narrow = in_8_bits(wide)
                ways |= {f"fp8 {name}": captured(step) for name, step in steps(tower, rows, narrow).items()}
                found = interleaved(ways, rounds=options.rounds, warm_ups=2, device=CUDA, deadline=deadline)
                us = {name: 1e3 * times.ms / REPEATS for name, times in found.items()}
                cells.append({"tower": tower, "rows": rows, "us": us})
                gains = (f"{name} {us[f'bfloat16 {name}'] / us[f'fp8 {name}']:.2f}" for name in ("qkv", "proj", "mlp"))
                print(f"{tower} {rows} rows, bfloat16 over 8 bits:", *gains, flush=True)
    report = {"benchmark": "fp8_products", "gpu": gpu(), "products": type(wide).__name__, "repeats": REPEATS}
    write(report | {"cells": cells, **provenance(options.commit, arguments)}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
