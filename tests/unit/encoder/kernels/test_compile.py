"""The Triton kernels compile ahead of time for an A100 and fit its shared memory, without a GPU at hand."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from encoder import kernels
from encoder.kernels import attention, norm, positions, rope, scaled, segments, short_attention, swiglu
from encoder.kernels.flash import Tile
from encoder.kernels.launch import OPTIONS, parts
from encoder.kernels.tiles import FEW_ROWS_TILES, attention_tile, short_rows
from encoder.metadata import expand_kernel
from encoder.pixels.kernels import COLUMNS_OUT, PATCHES, ROWS_OUT, _patches_kernel, _rows_kernel
from encoder.pixels.layout import PATCH_FIELDS, ROWS_FIELDS

pytestmark = pytest.mark.slow

A100, HOPPER = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)
# Of the 164 KiB of a multiprocessor, a block gets 163.
A100_SHARED_BYTES = 163 * 1024
HEADS = 16
# 8-bit floats are written where there are products for them.
E4M3_OUT = {"out_ptr": "*fp8e4nv"}


def compile_for_a100(
    kernel: Any,
    dtypes: Mapping[str, str],
    constants: Mapping[str, object],
    warps: int,
    stages: int = 3,
    target: GPUTarget = A100,
) -> Any:
    """`dtypes`: of the arguments that are not pointers to bfloat16, by name."""
    signature, values, aligned = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = dtypes.get(name, "*bf16")
        if signature[name].startswith("*") or name.endswith("stride"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages, **OPTIONS})


def fits(compiled: Any, arch: str = "sm_80") -> None:
    assert compiled.asm["cubin"]
    assert f".target {arch}" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= A100_SHARED_BYTES


@pytest.mark.parametrize("dim", [72, 80])
@pytest.mark.parametrize(
    "tile", {*FEW_ROWS_TILES, *(attention_tile(rows, torch.bfloat16) for rows in (256, 8192))}, ids=str
)
def test_attention(dim: int, tile: Tile) -> None:
    head, tail = parts(dim, smallest_tail=16)
    integers = dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32") | {"tiles_ptr": "*i32", "scale": "fp32"}
    constants = {
        "HEADS": HEADS,
        "DIM": dim,
        "HEAD": head,
        "TAIL": tail,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "OVERLAP": False,
    }
    fits(compile_for_a100(attention._attention_kernel, integers, constants, tile.warps, tile.stages))


@pytest.mark.parametrize("dim", [72, 80])
def test_short_attention(dim: int) -> None:
    head, tail = parts(dim, smallest_tail=16)
    dtypes = {"table_ptr": "*fp16", "tiles_ptr": "*i32", "row_stride": "i32", "scale": "fp32"}
    constants = {"HEADS": HEADS, "DIM": dim, "HEAD": head, "TAIL": tail, "ROWS": short_rows(torch.bfloat16), "KEYS": 64}
    constants["OVERLAP"] = False
    fits(compile_for_a100(short_attention._short_attention_kernel, dtypes, constants, warps=4))


@pytest.mark.parametrize(("width", "rms", "warps"), [(1152, False, 1), (1280, True, 1), (4608, False, 8)])
@pytest.mark.parametrize("target", [A100, HOPPER], ids=["sm_80", "sm_90"])
def test_norm(width: int, rms: bool, warps: int, target: GPUTarget) -> None:
    head, tail = parts(width)
    dtypes = dict.fromkeys(("shift_ptr", "sums_ptr", "scales_ptr"), "*fp32")
    dtypes |= {"valid_ptr": "*i32", "rows": "i32", "eps": "fp32"}
    constants = {
        "WIDTH": width,
        "HEAD": head,
        "TAIL": tail,
        "ROWS": 2,
        "RMS": rms,
        "HAS_SHIFT": True,
        "HAS_VALID": True,
        "SUMS": 2,
        "SCALED": False,
        "OVERLAP": target is HOPPER,
    }
    compiled = compile_for_a100(norm._norm_kernel, dtypes, constants, warps, target=target)
    fits(compiled, f"sm_{target.arch}")
    # Waiting for the kernel before is Hopper's alone.
    assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == (target is HOPPER)
    if target is HOPPER:
        in_8_bits = constants | {"SUMS": 1, "SCALED": True}
        narrow = compile_for_a100(
            norm._norm_kernel, dtypes | E4M3_OUT | {"sums_ptr": "*bf16"}, in_8_bits, warps, target=HOPPER
        )
        fits(narrow, "sm_90")
        assert "e4m3x2" in narrow.asm["ptx"]


@pytest.mark.parametrize(
    ("width", "activation"),
    [
        (1152, "none"),
        (1280, "none"),
        (4304, "gelu_pytorch_tanh"),
        (4304, "gelu"),
        (3456, "silu"),
        (3456, "swiglu"),
    ],
)
def test_rows_in_8_bits(width: int, activation: str) -> None:
    head, tail = parts(width)
    narrow = width <= 2048
    constants = {"WIDTH": width, "HEAD": head, "TAIL": tail, "ROWS": 2 if narrow else 1, "ACTIVATION": activation}
    constants["OVERLAP"] = True
    dtypes = E4M3_OUT | {"scales_ptr": "*fp32", "rows": "i32"}
    compiled = compile_for_a100(scaled._scaled_kernel, dtypes, constants, 1 if narrow else 8, target=HOPPER)
    fits(compiled, "sm_90")
    assert "e4m3x2" in compiled.asm["ptx"]


def test_the_others() -> None:
    half_head, half_tail = parts(36)
    fits(
        compile_for_a100(
            rope._rope_kernel,
            {"table_ptr": "*fp16", "rows": "i32", "row_stride": "i32"},
            {"HEADS": HEADS, "HALF": 36, "HEAD": half_head, "TAIL": half_tail, "LINES": 64, "OVERLAP": False},
            warps=4,
        )
    )
    fits(
        compile_for_a100(
            rope._table_kernel,
            {"positions_ptr": "*i32", "frequencies_ptr": "*fp32", "table_ptr": "*fp16", "rows": "i32"},
            {"FREQUENCIES": 18, "ROWS": 8, "COLUMNS": 64},
            warps=4,
        )
    )
    fits(
        compile_for_a100(
            positions._positions_kernel,
            {"indices_ptr": "*i32", "weights_ptr": "*fp32", "rows": "i32"},
            {"WIDTH": 1152, "ROWS": 16, "COLUMNS": 128},
            warps=2,
        )
    )
    fits(
        compile_for_a100(
            swiglu._swiglu_kernel,
            {"rows": "i32"},
            {"WIDTH": 3456, "ROWS": 16, "COLUMNS": 128, "OVERLAP": False},
            warps=4,
        )
    )
    fits(
        compile_for_a100(
            segments._tiles_kernel,
            {"borders_ptr": "*i32", "tiles_ptr": "*i32", "tiles": "i32", "segments": "i32"},
            {"STEPS": 9, "TILE_ROWS": 64, "BLOCK": 128},
            warps=4,
        )
    )


@pytest.mark.parametrize(("columns", "windowed"), [(10, False), (2, True)])
def test_expand(columns: int, windowed: bool) -> None:
    pointers = [name for name in expand_kernel._expand_kernel.arg_names if name.endswith("_ptr")]
    integers = dict.fromkeys(pointers, "*i32") | dict.fromkeys(("slots", "tokens", "windows"), "i32")
    constants = {"UNIT": 4, "COLUMNS": columns, "WINDOWED": windowed, "BLOCK": 256}
    fits(compile_for_a100(expand_kernel._expand_kernel, integers, constants, 4))


@pytest.mark.parametrize(("target", "arch"), [(A100, "sm_80"), (HOPPER, "sm_90")])
@pytest.mark.parametrize("patch", [14, 16])
def test_pixels(patch: int, target: GPUTarget, arch: str) -> None:
    bytes_and_tables = {"buffer_ptr": "*u8", "table_ptr": "*i64", "taps_ptr": "*i32"}
    rows = {"FIELDS": ROWS_FIELDS, "ROWS": ROWS_OUT, "COLUMNS": COLUMNS_OUT}
    fits(compile_for_a100(_rows_kernel, bytes_and_tables, rows, warps=4, target=target), arch)
    patches = {"FIELDS": PATCH_FIELDS, "PATCH": patch, "MERGE": 2, "FRAMES": 2, "PATCHES": PATCHES, "AREA": 256}
    dtypes = bytes_and_tables | {"mean_ptr": "*fp32", "std_ptr": "*fp32"}
    fits(compile_for_a100(_patches_kernel, dtypes, patches, warps=4, target=target), arch)


def overlapping_kernels() -> dict[str, Any]:
    """All kernels that may be launched before the kernel ahead of them has ended, by name."""
    modules = [
        importlib.import_module(f"encoder.kernels.{found.name}") for found in pkgutil.iter_modules(kernels.__path__)
    ]
    members = {name: member for module in modules for name, member in vars(module).items()}
    return {
        name: member
        for name, member in members.items()
        if name.endswith("_kernel") and "OVERLAP" in getattr(member, "arg_names", ())
    }


OVERLAPPED: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "_attention_kernel": (
        {"tiles_ptr": "*i32", "scale": "fp32"} | dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32"),
        {"HEADS": HEADS, "DIM": 72, "HEAD": 64, "TAIL": 16, "ROWS": 64, "KEYS": 64},
    ),
    "_short_attention_kernel": (
        {"table_ptr": "*fp16", "tiles_ptr": "*i32", "row_stride": "i32", "scale": "fp32"},
        {"HEADS": HEADS, "DIM": 80, "HEAD": 64, "TAIL": 16, "ROWS": 64, "KEYS": 64},
    ),
    "_norm_kernel": (
        dict.fromkeys(("shift_ptr", "sums_ptr", "scales_ptr"), "*fp32")
        | {"valid_ptr": "*i32", "rows": "i32", "eps": "fp32"},
        {"WIDTH": 1152, "HEAD": 1024, "TAIL": 128, "ROWS": 2, "RMS": False}
        | {"HAS_SHIFT": True, "HAS_VALID": True, "SUMS": 2, "SCALED": False},
    ),
    "_scaled_kernel": (
        E4M3_OUT | {"scales_ptr": "*fp32", "rows": "i32"},
        {"WIDTH": 3456, "HEAD": 2048, "TAIL": 2048, "ROWS": 1, "ACTIVATION": "swiglu"},
    ),
    "_rope_kernel": (
        {"table_ptr": "*fp16", "rows": "i32", "row_stride": "i32"},
        {"HEADS": HEADS, "HALF": 36, "HEAD": 32, "TAIL": 4, "LINES": 64},
    ),
    "_swiglu_kernel": ({"rows": "i32"}, {"WIDTH": 3456, "ROWS": 16, "COLUMNS": 128}),
}
"""Arguments that are not pointers to bfloat16, and constants, of each such kernel."""


@pytest.mark.parametrize("name", sorted(overlapping_kernels()))
def test_an_overlapping_kernel_waits_before_it_touches_memory(name: str) -> None:
    """A kernel under programmatic dependent launch that reads before its dependency wait reads what the kernel ahead
    has not written yet. The compiler may move instructions, so the order is that of the compiled program."""
    dtypes, constants = OVERLAPPED[name]
    kernel = overlapping_kernels()[name]
    ptx = compile_for_a100(kernel, dtypes, constants | {"OVERLAP": True}, 4, target=HOPPER).asm["ptx"]
    program = ptx[ptx.index(".visible .entry") :]
    first = re.search(r"\b(ld|st|red|atom|cp\.async|prefetch)\b(?!\.(param|shared))", program)
    assert first is not None
    assert program.index("griddepcontrol.wait") < first.start()


def test_kernels_overlap_by_the_shared_options_alone() -> None:
    """What launches another kernel early goes by `overlapping`, whose constant makes the kernel wait."""
    sources = sorted(Path(kernels.__path__[0]).parent.rglob("*.py"))
    assert [file.name for file in sources if re.search("launch_pdl|gdc_", file.read_text())] == ["overlap.py"]
