"""The fused towers without a GPU: Triton's interpreter runs their kernels on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.encoder.interpreter import Interpreted

pytest.importorskip("triton", reason="the fused towers are made of Triton's kernels")

pytestmark = pytest.mark.slow

# Streams are CUDA's alone, so here they are nothing.
START = """
import contextlib, dataclasses, sys, types
from pathlib import Path

import torch

from encoder.metadata.segments import AttentionBackend
from encoder.fused.tower import FusedTower
from encoder.fused.rope_attention import AttentionKernel, AttentionPlan
from encoder.fused.gemm import CublasGemm
from encoder.towers.weights import load_tower
from tests.parity.reference_towers import make_reference, random_patches, relative_error
from tests.unit.encoder.interpreter import many_rows_a_block_of_norms

many_rows_a_block_of_norms()

torch.cuda.Stream = lambda *_: types.SimpleNamespace(wait_stream=lambda other: None)
torch.cuda.current_stream = torch.cuda.Stream
torch.cuda.stream = torch.cuda.device = lambda _: contextlib.nullcontext()
"""

SCRIPT = """
grids = [(1, 4, 6), (2, 2, 4)]
reference = make_reference(sys.argv[1], Path(sys.argv[2]))
eager = load_tower(reference.path, dtype=torch.float32, device=torch.device("cpu"))
patches = random_patches(grids, eager.config.patch_dim)
expected = eager(patches, eager.prepare(grids))
for turns in (True, False):
    tower = FusedTower(eager, AttentionPlan.single(AttentionKernel(AttentionBackend.TRITON, turns)), CublasGemm())
    metadata = tower.prepare(grids)
    error = relative_error(tower(patches, metadata), expected)
    assert error < 1e-5, error
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
        position_weights=more(metadata.position_weights, float("nan")),
        window_order=order(metadata.window_order),
        window_inverse=order(metadata.window_inverse),
    )
    error = relative_error(tower(more(patches, float("nan")), padded)[: metadata.num_tokens], expected)
    assert error < 1e-5, error
print("equal")
"""


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_equals_the_eager_tower_and_padding_of_nan_is_inert(
    interpreted: Interpreted, model_type: str, tmp_path: Path
) -> None:
    assert interpreted(START + SCRIPT, model_type, str(tmp_path)) == "equal"


UNSORTED = """
from benchmarks.ladder.towers import config_of, random_tower

config = dataclasses.replace(
    config_of("qwen3_vl", tiny=True, dtype="float32"), depth=2, deepstack_visual_indexes=(1, 0)
)
eager = random_tower(config, seed=0, dtype=torch.float32, device=torch.device("cpu"))
tower = FusedTower(eager, AttentionPlan.single(AttentionKernel(AttentionBackend.TRITON, True)), CublasGemm())
patches = random_patches([(1, 4, 4)], config.patch_dim)
error = relative_error(tower(patches, tower.prepare([(1, 4, 4)])), eager(patches, eager.prepare([(1, 4, 4)])))
assert error < 1e-5, error
print("equal")
"""


def test_deepstack_levels_leave_in_the_order_of_their_blocks(interpreted: Interpreted) -> None:
    """The eager tower puts levels out in the order of the blocks, as transformers and vLLM do; the fused tower did so
    in the order of the configuration's list. Where that is not ascending, the levels of the two were exchanged.
    """
    assert interpreted(START + UNSORTED) == "equal"
