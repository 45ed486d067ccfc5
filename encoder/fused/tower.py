"""A loaded tower as a chain of fused kernels, with the fastest measured attention backends and the eager tower's
interface; equal to the eager tower, which remains the reference, up to rounding. Requires CUDA and Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.checkpoint.vision_config import VisionConfig
from encoder.fused.affine import Affine
from encoder.fused.attention_plan import measure_backends
from encoder.fused.gemm import CublasGemm, Epilogue, Gemm
from encoder.fused.norm import FusedNorm
from encoder.fused.rope_attention import AttentionPlan, SegmentTiles
from encoder.fused.rotary import RotaryAttention
from encoder.kernels.positions import add_positions_
from encoder.metadata.device_tables import batch_metadata
from encoder.metadata.geometry import Grid
from encoder.metadata.segments import AttentionBackend
from encoder.metadata.tower_metadata import TowerMetadata
from encoder.towers.backends import check_backend
from encoder.towers.layers import ACTIVATIONS, MLP, Block, GatedMLP, PatchMerger
from encoder.towers.tower import VisionTower

logger = logging.getLogger(__name__)

# Up to this number of rows, blocks and a level's merger each leave most of the device idle: they run concurrently.
_MOST_ROWS_BESIDE = 1024


def _epilogue(config: VisionConfig) -> Epilogue | None:
    """Returns the epilogue of the MLP's first GEMM, or None if no kernel has the gate's activation."""
    if not config.traits.gated_mlp:
        return Epilogue(config.hidden_act)
    return Epilogue.SWIGLU if config.hidden_act == "silu" else None


def _mlp(block: Block, gemm: Gemm) -> tuple[Affine, Affine]:
    """Returns both layers of the MLP with padded hidden features.

    The padding is exact: the second layer's weights for the added features are 0, whatever their activation is.
    """
    if isinstance(block.mlp, GatedMLP):
        gate, up, down = (Affine.of(layer) for layer in (block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj))
        width = gemm.inner_width(up.weight.shape[0], up.weight.dtype)
        return Affine.paired(gate.padded(outputs=width), up.padded(outputs=width)), down.padded(inputs=width)
    assert isinstance(block.mlp, MLP)
    up, down = Affine.of(block.mlp.linear_fc1), Affine.of(block.mlp.linear_fc2)
    width = gemm.inner_width(up.weight.shape[0], up.weight.dtype)
    return up.padded(outputs=width), down.padded(inputs=width)


class _Merger:
    def __init__(self, merger: PatchMerger, pending: Tensor) -> None:
        norm, first, second = merger.layers
        self.norm = FusedNorm.of(norm, pending)
        self.first, self.second = Affine.of(first), Affine.of(second)


class _Block:
    def __init__(
        self, tower: VisionTower, index: int, pending: Tensor, attend: RotaryAttention, gemm: Gemm, level: int
    ) -> None:
        """`pending`: biases missing from the residual stream, summed. `level`: deepstack levels before the block."""
        config, block = tower.config, tower.blocks[index]
        assert isinstance(block, Block)
        self.windowed = config.is_windowed(index)
        self.qkv = attend.load(Affine.of(block.attn.qkv), index, config.window_patches if self.windowed else None)
        self.proj = Affine.of(block.attn.proj)
        self.norm1 = FusedNorm.of(block.norm1, pending)
        pending = pending + self.proj.bias.float()
        self.norm2 = FusedNorm.of(block.norm2, pending)
        tanh = _epilogue(config) is Epilogue.GELU_TANH
        self.up, self.down = gemm.load_mlp(*_mlp(block, gemm), index, self.norm2.layer_norm if tanh else None)
        self.pending = pending + self.down.bias.float()
        merger = tower.level_merger(index)
        self.merger = None if merger is None else _Merger(merger, self.pending)
        # Levels are in the order of the blocks, independent of the order in the configuration's list.
        self.level = level if merger is None else level + 1


class FusedTower:
    """Has the eager tower's interface: patches to embeddings `[num_tokens, width]`. Shares a loaded tower's weights if
    their layout fits, and repacks them otherwise.

    fused = FusedTower(tower, plan, CublasGemm())
    embeddings = fused(patches, fused.prepare(grids))

    The forward is a pure function of the patches and of the metadata's tensors, so that it can be captured. Metadata
    may include padding: rows past the last border of `frames` belong to no segment and do not affect the images' rows,
    even if they hold NaN.
    """

    def __init__(self, tower: VisionTower, plan: AttentionPlan, gemm: Gemm) -> None:
        # The tower is not referenced, so that weights repacked here are freed when its owner drops it.
        config = tower.config
        self.config, self.dtype, self.device = config, tower.dtype, tower.device
        self.attention_plan, self.gemm = plan, gemm
        assert not (config.window_size and config.deepstack_visual_indexes), "levels do not leave in window order"
        self._epilogue = _epilogue(config)
        self._activation = ACTIVATIONS[config.hidden_act]
        self._embed = Affine.of(tower.patch_embed.proj)
        self._positions = None if tower.pos_embed is None else tower.pos_embed.weight.detach()
        self._attend = RotaryAttention(gemm, plan, tower.rotary.frequencies, config.num_heads)
        pending, level = torch.zeros(config.hidden_size, device=tower.device), 0
        self._blocks: list[_Block] = []
        for index in range(config.depth):
            self._blocks.append(_Block(tower, index, pending, self._attend, gemm, level))
            pending, level = self._blocks[-1].pending, self._blocks[-1].level
        self._merger = _Merger(tower.merger, pending)
        self._beside = torch.cuda.Stream(tower.device) if level else None

    def compile_kernels(self, batches: Sequence[Sequence[Grid]] = ()) -> None:
        """Compiles the kernels for every number of rows, and for `batches` of grids, before the first run.

        Without QuACK's GEMMs, which take the longest, kernels are compiled when they are first needed.
        """
        if not self.gemm.rotates:
            return
        from encoder.fused.compile_ahead import compile_ahead

        kinds = [(block.windowed, block.merger is None) for block in self._blocks]
        # One block of each kind runs every kernel.
        blocks = [self._blocks[index] for index in sorted({*map(kinds.index, kinds)})]

        @torch.inference_mode()
        def run(grids: Sequence[Grid]) -> None:
            metadata = self.prepare(grids)
            patches = torch.zeros(metadata.num_patches, self.config.patch_dim, dtype=self.dtype, device=self.device)
            self._run(blocks, patches, metadata, patches.new_empty(metadata.num_tokens, self.config.width))

        with torch.cuda.device(self.device):
            compile_ahead(run, batches)

    def prepare(self, grid_thw: Sequence[Grid]) -> TowerMetadata:
        """Builds metadata of `grid_thw`, `(t, h, w)` in patches per image. Raises `ValueError` for an invalid grid.

        The forward follows `attention_plan`, not the backend in the metadata.
        """
        return batch_metadata(grid_thw, self.config, self.device, AttentionBackend.VARLEN)

    @torch.inference_mode()
    def __call__(self, patches: Tensor, metadata: TowerMetadata) -> Tensor:
        """`patches`: `[num_patches, patch_dim]`, any float dtype. Returns `[num_tokens, width]`, the tower's dtype."""
        out = patches.new_empty(metadata.num_tokens, self.config.width, dtype=self.dtype)
        self.into(patches, metadata, out)
        return out

    @torch.inference_mode()
    def into(self, patches: Tensor, metadata: TowerMetadata, out: Tensor) -> None:
        """Like `__call__`, into `out`, contiguous."""
        metadata.check(patches, self.config.patch_dim)
        with torch.cuda.device(self.device):
            self._run(self._blocks, patches.to(self.dtype), metadata, out)

    def _run(self, blocks: Sequence[_Block], patches: Tensor, metadata: TowerMetadata, out: Tensor) -> None:
        """Writes embeddings of `patches` `[num_patches, patch_dim]` to `out` `[num_tokens, width]`.

        Both are in the weights' dtype, on the current device. A pure function: no synchronisation, no host work per
        image, shapes that follow from shapes.
        """
        gemm, rows = self.gemm, patches.shape[0]
        x = self._embedded(patches, metadata)
        angles = self._attend.angles(metadata.rope_positions, x.dtype)
        tiled: dict[bool, SegmentTiles] = {}
        # The norm before attention writes rows outside all segments as zeros, so that padding cannot affect real rows.
        valid = metadata.frames.cu_seqlens[-1:]
        slices = out.split(self.config.out_hidden_size, dim=1)
        main = torch.cuda.current_stream()
        beside = main if self._beside is None or rows > _MOST_ROWS_BESIDE else self._beside
        kept: list[Tensor] = []
        sums: Tensor | None = None
        for block in blocks:
            if block.windowed not in tiled:
                segments = metadata.segments(windowed=block.windowed)
                tiled[block.windowed] = self._attend.tile(segments, block.qkv, rows, x.dtype)
            normed = block.norm1.before(block.qkv.affine, x, valid, sums)
            sums = gemm.accumulate(block.proj, self._attend(block.qkv, normed, angles, tiled[block.windowed]), x)
            normed = block.norm2.before(block.up, x, sums=sums)
            if self._epilogue is not None:
                sums = gemm.mlp(block.up, block.down, normed, self._epilogue, x)
            else:
                pairs = gemm(block.up, normed)
                sums = gemm.accumulate(block.down, self._activation(pairs[:, 0::2]) * pairs[:, 1::2], x)
            if block.merger is not None:
                normed = block.merger.norm(x, sums=sums)
                sums = None
                if beside is not main:
                    # Kept until the streams join, so that no other tensor reuses its memory before.
                    kept.append(normed)
                    beside.wait_stream(main)
                with torch.cuda.stream(beside):
                    self._merge(block.merger, normed, slices[block.level])
                del normed
        normed = self._merger.norm(x, sums=sums).view(rows // self.config.merge_unit, -1)
        if metadata.window_inverse is None:
            self._merge(self._merger, normed, slices[0])
        else:
            torch.index_select(self._merge(self._merger, normed), 0, metadata.window_inverse, out=out)
        if beside is not main:
            main.wait_stream(beside)

    def _embedded(self, patches: Tensor, metadata: TowerMetadata) -> Tensor:
        """Returns the residual stream before the first block: `[num_patches, hidden_size]`, in window order."""
        config = self.config
        x = self.gemm(self._embed, patches) if config.traits.patch_bias else F.linear(patches, self._embed.weight)
        if self._positions is not None:
            assert metadata.position_indices is not None
            assert metadata.position_weights is not None
            add_positions_(x, self._positions, metadata.position_indices, metadata.position_weights)
        if metadata.window_order is None:
            return x
        # Whole merge blocks are reordered, so that the patches of a window and of a token stay contiguous.
        tokens = x.view(x.shape[0] // config.merge_unit, -1)
        return tokens.index_select(0, metadata.window_order).view(x.shape[0], -1)

    def _merge(self, merger: _Merger, normed: Tensor, out: Tensor | None = None) -> Tensor:
        """`normed`: `[num_tokens, merged]`; `out`: a level's slice of the output, or None for a new tensor."""
        return self.gemm(merger.second, self.gemm(merger.first, normed, Epilogue.GELU), out=out)


def fuse(tower: VisionTower, plan: AttentionPlan | None = None, gemm: Gemm | None = None) -> FusedTower:
    """Returns the fused form of a loaded tower on a CUDA device.

    `plan`: None measures the installed attention backends. `gemm`: None uses QuACK's if installed and supported, else
    cuBLAS's. Shares the tower's weights except padded or joined ones: dropping the tower frees the originals of those.

    Raises:
        ValueError: the tower is on another device.
        BackendUnavailableError: a backend in the plan is not installed or does not fit, or no backend fits.
    """
    if tower.device.type != "cuda":
        raise ValueError(f"the fused forward needs a CUDA device, and the tower is on {tower.device}")
    config = tower.config
    if plan is None:
        plan = measure_backends(config.num_heads, config.head_dim, tower.dtype, tower.device)
    for kernel in plan.kernels:
        check_backend(kernel.backend, tower.dtype, config.head_dim, tower.device)
    return FusedTower(tower, plan, gemm or best_gemm(tower.dtype, tower.device))


def best_gemm(dtype: torch.dtype, device: torch.device) -> Gemm:
    """Returns QuACK's GEMMs for bfloat16 on Hopper if the package is installed, else cuBLAS's."""
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) == (9, 0):
        try:
            from encoder.fused.quack_gemm import QuackGemm
        except ImportError:
            logger.info("using cuBLAS GEMMs; QuACK's, which come with FlashAttention-4, would be faster on this GPU")
        else:
            return QuackGemm(device)
    return CublasGemm()
