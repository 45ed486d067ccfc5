"""8-bit rows and the towers that use them without a GPU: Triton's interpreter runs the kernels, in a process apart.

The product itself, which is the GPU's, is written out in float64 with the demands that the GPU makes on its operands.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.encoder.interpreter import Interpreted

pytest.importorskip("triton", reason="the kernels are Triton's")

pytestmark = pytest.mark.slow

# The interpreter's own casts to small floats truncate or lose carries; torch rounds as a GPU does.
START = """
import contextlib, dataclasses, sys, types
from pathlib import Path

import torch
import torch.nn.functional as F
import triton.language as tl
from triton.runtime import interpreter

of_the_interpreter = interpreter._convert_float

def as_a_gpu_casts(values, before, after, rounding):
    small = {tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8), tl.bfloat16: (torch.bfloat16, torch.int16)}.get(after)
    if small is None or before != tl.float32:
        return of_the_interpreter(values, before, after, rounding)
    cast = torch.from_numpy(values.view("float32").copy()).to(small[0])
    return cast.view(small[1]).numpy().view(f"uint{after.primitive_bitwidth}")

interpreter._convert_float = as_a_gpu_casts
NAN, INF = float("nan"), float("inf")
"""

ROWS = """
from encoder.kernels.norm import norm
from encoder.kernels.scaled import ACTIVATIONS, scaled_rows
from tests.unit.encoder.kernels.scaled_norm import norm_scaled

functions = {
    "none": lambda y: y,
    "gelu_pytorch_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
    "swiglu": lambda y: F.silu(y[:, 0::2]) * y[:, 1::2],
}
assert set(functions) == set(ACTIVATIONS)
torch.manual_seed(0)

def right(values, scales, expected):
    # Half a step of e4m3: 1/16 of the number, or half of the smallest step.
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (len(expected), 1) and scales.dtype == torch.float32
    error = (values.double() * scales - expected).abs()
    # The activation is computed in float32: a little more than half a step where it falls between two.
    assert (error <= expected.abs() / 16 + scales * 2.0**-10 + 1e-5 * expected.abs().amax(1, keepdim=True)).all()

for activation, function in functions.items():
    for width in (128, 144, 90):
        x = torch.randn(7, width * (2 if activation == "swiglu" else 1))
        x[2] = 0
        x[3] *= 1e15
        x[4] *= 1e-15
        x[5, 0] = 300 * x[5].abs().max()
        values, scales = scaled_rows(x, activation)
        right(values, scales, function(x.double()))
        assert not values[2].double().any() and (scales > 0).all() and scales.isfinite().all()
        assert (values.float().abs().amax(1)[[0, 1, 3, 5, 6]] == 448).all()

# The ends of bfloat16's range, and numbers smaller than any scale.
x = torch.full((3, 32), 3e38)
x[1] = 1e-38
x[2, 1:] = -1e-38
right(*scaled_rows(x), x.double())

# What is no number stays so, and in its own row.
x = torch.randn(6, 144)
clean = scaled_rows(x)
x[1, 3], x[4] = NAN, NAN
x[2, 5] = INF
values, scales = scaled_rows(x)
for row in (0, 3, 5):
    assert torch.equal(values[row].float(), clean[0][row].float()) and scales[row] == clean[1][row]
found = values.float() * scales
assert found[1].isnan().any() and found[2].isnan().any() and found[4].isnan().all()

for rows, width in ((5, 144), (3, 128), (2, 1152)):
    for bias in (True, False):
        x, addend = torch.randn(rows, width), torch.randn(rows, width)
        weight, shift = torch.randn(width), torch.randn(width)
        offset = torch.randn(width) if bias else None
        summed = x + addend
        plain = (
            F.layer_norm(summed + shift, (width,), weight, offset, 1e-6) if bias
            else F.rms_norm(summed + shift, (width,), weight, 1e-6)
        )
        stream = x.clone()
        assert torch.allclose(norm(stream, weight, offset, 1e-6, shift=shift, sums=addend[None]), plain, atol=1e-5)
        assert torch.equal(stream, summed)
        stream = x.clone()
        right(*norm_scaled(stream, weight, offset, 1e-6, shift=shift, sums=addend[None]), plain.double())
        assert torch.equal(stream, summed)
        center = 3 * torch.randn(width)
        arguments = {"shift": shift, "sums": addend[None], "center": center}
        right(*norm_scaled(x.clone(), weight, offset, 1e-6, **arguments), plain.double() - center)
        # Rows that do not count are zeros, whatever is in them.
        valid = torch.tensor([rows - 1], dtype=torch.int32)
        stream = x.clone()
        stream[-1] = NAN
        values, scales = norm_scaled(stream, weight, offset, 1e-6, shift=shift, sums=addend[None], valid=valid)
        right(values[:-1], scales[:-1], plain[:-1].double())
        assert not values[-1].float().any() and scales[-1].isfinite()

# The stream is rounded as its dtype is, and what is normed is what was rounded.
x, addend = torch.randn(4, 144).bfloat16(), torch.randn(4, 144).bfloat16()
weight, stream = torch.ones(144).bfloat16(), x.clone()
values, scales = norm_scaled(stream, weight, None, 1e-6, sums=addend[None])
assert torch.equal(stream, x + addend)
right(values, scales, F.rms_norm((x + addend).double(), (144,), None, 1e-6))
print("equal")
"""

TOWER = """
from dataclasses import replace
from configs.encoder_config import EncoderConfig
from encoder.metadata.segments import AttentionBackend
from encoder.fp8 import sensitivity, tower as fp8_tower
from encoder.fp8.channel_means import channel_means
from encoder.fp8.gemm import Fp8Gemm
from encoder.fp8.validation import Fp8RefusedError
from encoder.fused.gemm import Layer
from encoder.fused.tower import FusedTower
from encoder.fused.rope_attention import AttentionKernel, AttentionPlan
from encoder.fused.gemm import CublasGemm
from encoder.towers.weights import load_tower
from tests.embedding_difference import compare_embeddings
from tests.parity.reference_towers import make_reference, random_patches
from tests.unit.encoder.interpreter import many_rows_a_block_of_norms

many_rows_a_block_of_norms()

torch.cuda.Stream = lambda *_: types.SimpleNamespace(wait_stream=lambda other: None)
torch.cuda.current_stream = torch.cuda.Stream
torch.cuda.stream = torch.cuda.device = lambda _: contextlib.nullcontext()

def product(a, b, *, scale_a, scale_b, bias, out_dtype, use_fast_accum):
    # As the GPU's is asked for: rows times columns, a scale for each of both.
    assert a.dtype == b.dtype == torch.float8_e4m3fn and a.is_contiguous() and b.t().is_contiguous()
    assert scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1])
    assert scale_a.is_contiguous() and scale_b.is_contiguous() and not (a.shape[1] % 16 or b.shape[1] % 16)
    global products
    products += 1
    out = (a.double() * scale_a) @ (b.double() * scale_b)
    return (out if bias is None else out + bias).to(out_dtype)

torch._scaled_mm = product
products = 0
grids = [(1, 4, 6), (2, 2, 4)]
counts = [6, 4]
reference = make_reference(sys.argv[1], Path(sys.argv[2]))
eager = load_tower(reference.path, dtype=torch.float32, device=torch.device("cpu"))
patches = random_patches(grids, eager.config.patch_dim)
expected = eager(patches, eager.prepare(grids))
plan = AttentionPlan.single(AttentionKernel(AttentionBackend.TRITON, True))
depth = eager.config.depth
tower = FusedTower(eager, plan, Fp8Gemm(CublasGemm()))
whole = tower(patches, tower.prepare(grids))
assert products == 3 * depth, products
far = compare_embeddings(whole, expected, counts, eager.config.out_hidden_size)
print(far)
assert far.lowest_image_cosine > 0.95 and 0.02 < far.largest_error < 0.35

def rounded(x):
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
    return (x / scales).to(torch.float8_e4m3fn).float() * scales

# Means subtracted before rows are quantised: the same function, and nearer to it with massive activations.
means = channel_means(eager, patches, grids)
tower = FusedTower(eager, plan, Fp8Gemm(CublasGemm(), means=means))
centered = compare_embeddings(tower(patches, tower.prepare(grids)), expected, counts, eager.config.out_hidden_size)
print(centered)
assert centered.lowest_image_cosine > 0.95 and 0.02 < centered.largest_error < 0.35
if hasattr(eager.blocks[0].norm1, "bias"):
    # A channel far above the others behind each norm, the same in all rows, which the next layer's bias cancels.
    massive = load_tower(reference.path, dtype=torch.float32, device=torch.device("cpu"))
    for block in massive.blocks:
        for norm, layer in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp.linear_fc1)):
            norm.bias.data[5] += 1000
            layer.bias.data -= 1000 * layer.weight.data[:, 5]
    errors = []
    for means in (None, channel_means(massive, patches, grids)):
        tower = FusedTower(massive, plan, Fp8Gemm(CublasGemm(), means=means))
        found = tower(patches, tower.prepare(grids))
        errors.append(compare_embeddings(found, expected, counts, eager.config.out_hidden_size).largest_error)
    print(errors)
    assert errors[0] > 0.6 and errors[1] < 0.35

# As at the start: float32, means, and a limit, large beside a float32 tower's error, for all layers and for some.
fp8_tower.trial_batch = lambda rules, device, rows: (patches, grids)
wide = FusedTower(eager, plan, CublasGemm())
config = EncoderConfig(fused_kernels=True, fp8=True, fp8_max_error=1e9)
narrow, agreement = fp8_tower.build_fp8_tower(eager, wide, config, None)
print(agreement)
every = f"of blocks 0-{depth - 1}"
assert agreement.layers == f"qkv {every}; MLP {every}", agreement
assert agreement.bfloat16_error < 1e-4 < 0.02 < agreement.error < 0.35
assert torch.equal(narrow(patches, narrow.prepare(grids)), whole)
sensitivity._SECTIONS = 1  # each group of layers runs alone, which takes a minute with windows and a section a block
config = replace(config, fp8_max_error=0.9 * agreement.over_bfloat16)
narrow, some = fp8_tower.build_fp8_tower(eager, wide, config, None)
print(some)
assert some.layers not in ("", agreement.layers) and some.over_bfloat16 <= config.fp8_max_error
try:
    fp8_tower.build_fp8_tower(eager, wide, replace(config, fp8_max_error=10), None)
    raise SystemExit("it was accepted")
except Fp8RefusedError as error:
    assert "the limit is 10 (fp8_max_error)" in str(error), error

# The last block alone, and the same in plain PyTorch: both sides of its products are rounded. With more blocks, single
# roundings that turn with the order of a sum would turn more in the next.
tower = FusedTower(eager, plan, Fp8Gemm(CublasGemm(), layers=frozenset((depth - 1, layer) for layer in Layer)))
metadata = tower.prepare(grids)
products = 0
found = tower(patches, metadata)
assert products == 3, products
for layer in eager.blocks[-1].modules():
    if isinstance(layer, torch.nn.Linear) and layer is not eager.blocks[-1].attn.proj:
        layer.weight.data = rounded(layer.weight.data)
        layer.register_forward_pre_hook(lambda layer, inputs: (rounded(inputs[0]),))
plain = eager(patches, eager.prepare(grids))
close = compare_embeddings(found, plain, counts, eager.config.out_hidden_size)
far = compare_embeddings(found, expected, counts, eager.config.out_hidden_size)
print(close, far)
assert close.largest_error < 0.01 and far.largest_error > 5 * close.largest_error

# 8 patches of NaN that belong to no segment.
more = lambda x, fill: None if x is None else torch.cat((x, x.new_full((8, *x.shape[1:]), fill)))
tail = torch.arange(metadata.num_tokens, metadata.num_tokens + 2, dtype=torch.int32)
order = lambda x: None if x is None else torch.cat((x, tail))
padded = dataclasses.replace(
    metadata,
    num_patches=metadata.num_patches + 8,
    num_tokens=metadata.num_tokens + 2,
    rope_positions=more(metadata.rope_positions, 7),
    position_indices=more(metadata.position_indices, 0),
    position_weights=more(metadata.position_weights, NAN),
    window_order=order(metadata.window_order),
    window_inverse=order(metadata.window_inverse),
)
beside_nan = tower(more(patches, NAN), padded)[: metadata.num_tokens]
assert compare_embeddings(beside_nan, found, counts, eager.config.out_hidden_size).largest_error < 0.02

print("equal")
"""


def test_rows_in_8_bits_against_plain_pytorch(interpreted: Interpreted) -> None:
    assert interpreted(START + ROWS) == "equal"


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_in_8_bits_is_close_to_the_eager_one_and_padding_of_nan_is_inert(
    interpreted: Interpreted, model_type: str, tmp_path: Path
) -> None:
    assert interpreted(START + TOWER, model_type, str(tmp_path)).endswith("equal")
