"""A loaded tower with fused kernels and the fastest measured attention backends, with the eager tower's interface.

The eager tower remains the reference. Requires CUDA and Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from encoder.fused.attention_plan import measure_backends
from encoder.fused.forward import FusedForward
from encoder.fused.gemm import CublasGemm, Gemm
from encoder.fused.rope_attention import AttentionPlan
from encoder.metadata.device_tables import batch_metadata
from encoder.metadata.geometry import Grid
from encoder.metadata.segments import AttentionBackend
from encoder.metadata.tower_metadata import TowerMetadata
from encoder.towers.backends import check_backend
from encoder.towers.tower import VisionTower

logger = logging.getLogger(__name__)


class FusedTower:
    """Has the eager tower's interface: patches to embeddings `[num_tokens, width]`.

    The forward is a pure function of the patches and of the metadata's tensors, so that it can be captured. Metadata
    may include padding: rows past the last border of `frames` belong to no segment and do not affect the images' rows,
    even if they hold NaN.
    """

    def __init__(self, tower: VisionTower, plan: AttentionPlan, gemm: Gemm) -> None:
        # The tower is not referenced, so that weights repacked here are freed when its owner drops it.
        self.config, self.dtype, self.device = tower.config, tower.dtype, tower.device
        self._forward = FusedForward(tower, plan, gemm)
        self.attention_plan, self.gemm = plan, gemm

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
            self._forward(patches.to(self.dtype), metadata, out)


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
